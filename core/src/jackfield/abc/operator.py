"""Contract of an operator, which changes rows of data: tasks before they are explored, experiences before training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import attrs

from jackfield.abc.reward import Generate, HttpClient, RewardContext, absent
from jackfield.clock import Clock

OperatorType = Literal["filter", "mapper", "deduplicator", "selector", "scorer", "synthesizer"]
Target = Literal["tasks", "experiences"]
Use = Literal["policy", "reward"]

_DEFAULTS = RewardContext()


class Score(Protocol):
    """Scores responses with the reward of the run."""

    async def __call__(self, values: Mapping[str, Any], response: str) -> float:
        """Return the score of a response to the task of a row, of which ``values`` are the columns.

        Raise what the reward raises, or ``reward.context`` where the host has no reward.
        """


@attrs.frozen(kw_only=True, eq=False)
class OperatorContext:
    """The context that an operator gets at its construction."""

    clock: Clock = attrs.field(factory=Clock)
    seed: int = 0  #: of this stage of the pipeline
    target: Target = "tasks"
    #: names of the columns with ``prompt``, ``answer``, ``response`` and so on, where rows name them otherwise
    columns: Mapping[str, str] = attrs.field(factory=dict)
    folder: Path | None = None  #: for files of this operator, which are kept until the stage ends; None: there is none
    http: HttpClient = _DEFAULTS.http
    generate: Generate = _DEFAULTS.generate  #: with the model ``policy`` of the run, or another one that the host has
    score: Score = attrs.field(factory=lambda: absent("reward"))
    #: adds a number to the stage's counter ``NAME``
    count: Callable[[str, float], None] = lambda name, number: None

    def column(self, name: str) -> str:
        """Return the name of a column of which settings give the usual name."""
        return self.columns.get(name, name)


@attrs.frozen(kw_only=True)
class Row:
    """One row of data: a record of a task, or an experience."""

    key: str  #: unique among all rows of the pipeline, and stable
    values: Mapping[str, Any]  #: columns by name, JSON values; only those that the operator reads


@attrs.frozen(kw_only=True)
class NewRow:
    """A row that an operator made."""

    parents: tuple[str, ...]  #: keys of the rows of the request from which it was made
    values: Mapping[str, Any]  #: all of its columns; those that are not given are the first parent's


@attrs.frozen(kw_only=True)
class OperatorRequest:
    """Some rows to process."""

    rows: tuple[Row, ...]
    batch: int = 0  #: number of this request in its stage, from 0; of experiences, the training step, from 0
    steps: int = 0  #: of experiences, the number of training steps of the run; otherwise 0
    deadline_seconds: float = 600.0  #: the call is cancelled after so long


@attrs.frozen(kw_only=True)
class OperatorResult:
    """What becomes of the rows of a request. Rows that are not named stay as they are."""

    updates: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)  #: by key, columns with their new values
    removed: Mapping[str, str] = attrs.field(factory=dict)  #: by key, why the row is not kept
    set_aside: Mapping[str, str] = attrs.field(factory=dict)  #: by key, why the row cannot be processed
    made: tuple[NewRow, ...] = ()  #: in the order in which they follow the rows of the request


@attrs.frozen(kw_only=True)
class Selection:
    """The order of the rows after a selector, and how many of them are kept."""

    by: str  #: name of a column with numbers
    largest_first: bool = True
    limit: int | None = None  #: number of rows; None: all


class Operator(ABC):
    """A step of a pipeline. Calls come one after the other, each with some rows.

    Invariants, each checked by the conformance suite: only declared columns are read and written; the same rows, seed
    and state give the same result; results do not depend on how rows are cut into requests, unless the operator says
    that it compares them; each key of a result is one of its request; a row that cannot be processed is set aside, and
    the others are not affected; what :meth:`restore` gets continues as if nothing had happened.
    """

    abi_version: ClassVar[str] = "1.0"
    type: ClassVar[OperatorType]
    #: settings that only :meth:`decide` reads: other values of these need no new call of :meth:`process`
    decides_by: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any, context: OperatorContext) -> None:
        self.config = config
        self.context = context

    @property
    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """Names of the columns that it reads; ``*`` stands for all."""

    @property
    @abstractmethod
    def writes(self) -> tuple[str, ...]:
        """Names of the columns that it writes; ``*`` stands for any."""

    @abstractmethod
    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Process some rows. A filter computes its statistics here, as updates, and removes nothing."""

    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        """Return the rows that a filter does not keep, by key, with the reason; only its statistics are read."""
        return {}

    @property
    def selection(self) -> Selection | None:
        """The order and number of all rows after this operator; None: their order stays."""
        return None

    @property
    def compares(self) -> bool:
        """Return whether rows of a request are compared: then a group, or all rows of it, come in one request."""
        return False

    @property
    def uses(self) -> tuple[Use, ...]:
        """Return what of the run results depend on: the policy, by ``context.generate``; the reward, by ``score``."""
        return ()

    @property
    def version(self) -> str:
        """Return what results depend on beside rows, settings and seed: the version of a model, or a digest of code."""
        return ""

    def state(self) -> Any:
        """Return what was learnt from rows so far, as JSON values, for a checkpoint."""
        return None

    def restore(self, state: Any) -> None:
        """Continue from a :meth:`state`, before the first request."""
        return

    async def start(self) -> None:
        """Open connections and load models, before the first request."""
        return

    async def close(self) -> None:
        """End everything the operator started."""
        return
