"""The lifecycle events of a run, and the registration of small parts.

Hooks are pluggy hooks of the project ``jackfield``. An implementation is a function marked with
:data:`hookimpl`, in an object that the run registers or in the ``hooks`` module that a manifest names. Each hook
takes one frozen event, so that it can grow. No hook is called per token or per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import pluggy

if TYPE_CHECKING:
    from jackfield.abc.rollout import WeightReceipt

hookspec = pluggy.HookspecMarker("jackfield")
hookimpl = pluggy.HookimplMarker("jackfield")

#: ``register(kind, name, part)``: offer a small part, an advantage estimator, a loss, a sampler and so on.
Registrar = Callable[[str, str, Any], None]


@attrs.frozen(kw_only=True)
class RunStarted:
    """A run begins."""

    name: str
    folder: str
    total_steps: int
    first_step: int  #: 0, or where a resumed run goes on
    config: Mapping[str, Any]  #: the whole resolved configuration, plain values


@attrs.frozen(kw_only=True)
class RunEnded:
    """A run ends, well or not."""

    folder: str
    steps: int  #: completed
    error: BaseException | None = None
    stopped: bool = False  #: a signal or the caller has ended it before its end


@attrs.frozen(kw_only=True)
class StageEnded:
    """A stage of the run (generate, reward, advantages, update, sync, evaluate, …) has ended.

    Times are in seconds on the run's clock. ``step`` counts from 0: the ticket, or the step that the trainer is at.
    """

    name: str
    lane: str  #: who worked: ``explorer``, ``reward``, ``trainer``, ``weights``
    start: float
    end: float
    step: int


@attrs.frozen(kw_only=True)
class StepEnded:
    """The trainer has finished a step; ``step`` counts completed steps, from 1."""

    step: int
    metrics: Mapping[str, float]


@attrs.frozen(kw_only=True)
class EvaluationEnded:
    """An evaluation has ended; ``step`` is the weight version that was evaluated."""

    step: int
    metrics: Mapping[str, float]


@attrs.frozen(kw_only=True)
class SampleRecord:
    """One row of a sample table."""

    key: str
    prompt: str
    response: str
    reward: float | None
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    tags: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class SamplesRecorded:
    """Some samples of a step or of an evaluation, for people to read."""

    step: int
    partition: str
    samples: tuple[SampleRecord, ...]


@attrs.frozen(kw_only=True)
class SamplesFailed:
    """Rows that ended without becoming training data since the last such event: key to reason."""

    step: int
    reasons: Mapping[str, str]


@attrs.frozen(kw_only=True)
class WeightsSynced:
    """Every replica has acknowledged a weight version."""

    version: int
    receipts: tuple[WeightReceipt, ...]
    seconds: float
    sent_bytes: int = 0  #: of the weights, to a worker: fewer of a delta


@attrs.frozen(kw_only=True)
class CheckpointSaved:
    """A checkpoint is on the disk, whole."""

    step: int  #: completed steps that it contains
    folder: str
    bytes: int


class HookSpecs:
    """The hooks of a run and their parameters."""

    @hookspec
    def register_parts(self, register: Registrar) -> None:
        """Offer small parts under names: advantage estimators, losses, samplers, operators, trackers."""

    @hookspec
    def run_started(self, event: RunStarted) -> None:
        """Called once, before the first step."""

    @hookspec
    def run_ended(self, event: RunEnded) -> None:
        """Called once, also after a failure."""

    @hookspec
    def stage_ended(self, event: StageEnded) -> None:
        """Called for each stage of each step."""

    @hookspec
    def step_ended(self, event: StepEnded) -> None:
        """Called after each step of the trainer."""

    @hookspec
    def evaluation_ended(self, event: EvaluationEnded) -> None:
        """Called after each evaluation."""

    @hookspec
    def samples_recorded(self, event: SamplesRecorded) -> None:
        """Called once a step with the samples that tables show."""

    @hookspec
    def samples_failed(self, event: SamplesFailed) -> None:
        """Called at most once a step."""

    @hookspec
    def weights_synced(self, event: WeightsSynced) -> None:
        """Called after each synchronisation."""

    @hookspec
    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        """Called after each checkpoint; the run removes the oldest ones as the configuration says."""
