"""Whether the policy that is trained is the one that generated: log-probs of the training pass, compared.

The probe (:class:`jackfield.weights.ReplicaProbe`) asks replicas after a synchronisation. This check looks at what is
trained on: the pass of an optimizer step, against an inference pass of the same weights and against the rollout's own
log-probs of the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from jackfield.errors import RunError
from jackfield.queue import BatchMeta
from jackfield.runtime.log_probs import PREFIX, Comparison
from jackfield.trainer.schedule import Schedule

_SAMPLE_FACTOR = 10.0  #: by which one sample may be farther away than all are on average
_NEARLY_ALL = 0.99  #: share of the whole distance that is in one direction

_TRAIN_MODE_CAUSES = (
    "dropout in train mode (a model's own, an adapter's), or noise in the routing of experts",
    "kernels or a dtype that the engine has in train mode alone",
    "positions (dynamic or long rope) that depend on how rows are split into micro-batches",
)
_FILTERS = (
    "tokens drawn from a sharper or filtered distribution (top_p, top_k, min_p, a lower temperature, in the agent "
)
_FILTERS += "or the server), or log-probs that are not of the distribution that was drawn from"
_ROLLOUT_CAUSES = (
    "sampling parameters other than the run's: temperature, filters, raw log-probs",
    "token ids: prompt or response ids that an agent returns are not those that were sent and generated (a chat "
    "template rendered again, text tokenised again)",
    "numerics of the server: dtype, rope settings, routing of experts",
)


@attrs.define(kw_only=True, eq=False)
class LogProbCheck:
    """Compares on the first batch that is trained on, on the first after a synchronisation, and every so many steps."""

    every: int
    schedule: Schedule
    bound: float  #: of the mean distance of the training pass from the rollout, in nats
    train_mode_bound: float  #: of its mean distance from an inference pass, in nats
    rollout: bool  #: whether there are log-probs of a rollout
    stops: bool  #: whether a distance beyond a bound is an error; else it is a warning
    corrects: bool  #: importance weights correct for the rollout's: a distance of theirs is a warning
    note: Callable[[str, float], None]  #: gets the step's metrics
    slack: float = 0.0  #: nats by which the rollout's log-probs may be higher: what sampling filters explain
    dropout: bool = False  #: it is wanted: training and inference passes differ
    first_step: int = 0  #: the first one in which the policy is trained
    _begun: bool = attrs.field(default=False, init=False)
    _passed: int | None = attrs.field(default=None, init=False)  #: the newest weight version that was found right

    def is_due(self, step: int) -> bool:
        """Return whether the first update of ``step`` (from 0) is compared; the first one of a process is."""
        return not self._begun or self._is_scheduled(step)

    def _is_scheduled(self, step: int) -> bool:
        first = step in (self.first_step, self.schedule.sync_interval)
        return first or self.schedule.is_due(self.every, step)

    def comparison(self, engine: str, version: int) -> Comparison:
        """Return what the engine is to compare.

        Args:
            engine: column of an inference pass's log-probs.
            version: of the engine's weights.
        """
        slack, dropout = self.slack, self.dropout
        return Comparison(engine=engine, version=version if self.rollout else None, slack=slack, dropout=dropout)

    def judge(self, update: Mapping[str, float], batch: BatchMeta, step: int, version: int) -> dict[str, float]:
        """Look at what an update has found; its metrics without that.

        A resumed run has the metrics of one that was not interrupted: what is compared beside the schedule is no
        metric.

        Raises:
            RunError: ``run.log-probs``, with the likely causes, where a distance is beyond its bound.
        """
        self._begun = True
        found = {name: value for name, value in update.items() if name.startswith(PREFIX)}
        engine, rollout = (_Distance.of(found, name) for name in ("train_mode", "rollout"))
        if self._is_scheduled(step):
            self._note("train_mode", engine)
            self._note("rollout", rollout)
        if not self.dropout and not engine.mean <= self.train_mode_bound:
            _report(self._train_mode_error(engine, step), stops=self.stops)
        elif not rollout.mean <= self.bound or not rollout.sample <= _SAMPLE_FACTOR * self.bound:
            _report(self._rollout_error(rollout, batch, step, version), stops=self.stops and not self.corrects)
        elif rollout.tokens:
            self._passed = version
        return {name: value for name, value in update.items() if name not in found}

    def _note(self, name: str, distance: _Distance) -> None:
        if distance.tokens:
            self.note(f"{PREFIX}{name}/mean", distance.mean)
            self.note(f"{PREFIX}{name}/max", distance.largest)
            self.note(f"{PREFIX}{name}/tokens", distance.tokens)

    def _train_mode_error(self, found: _Distance, step: int) -> RunError:
        return RunError(
            "the pass that is trained on computes other log-probs than an inference pass of the same weights",
            code="run.log-probs",
            where=f"step {step + 1}",
            expected=f"a mean distance of at most {self.train_mode_bound:.3g} nats",
            found=str(found),
            fix=_likely(_TRAIN_MODE_CAUSES),
        )

    def _rollout_error(self, found: _Distance, batch: BatchMeta, step: int, version: int) -> RunError:
        expected = f"a mean distance of at most {self.bound:.3g} nats, {_SAMPLE_FACTOR * self.bound:.3g} in any sample"
        return RunError(
            "the rollout's log-probs are not those of the policy that is trained, with weights of one version",
            code="run.log-probs",
            where=f"step {step + 1}",
            expected=expected,
            found=f"{found}; farthest: sample {found.key}, {found.sample:.3g}",
            fix=_likely(self._rollout_causes(found, batch, version)),
        )

    def _rollout_causes(self, found: _Distance, batch: BatchMeta, version: int) -> list[str]:
        """The likeliest first, as far as it shows."""
        causes = list(_ROLLOUT_CAUSES)
        if found.signed >= _NEARLY_ALL * found.sum:
            causes.insert(0, _FILTERS)
        weights = "weights of the replicas: another model folder, or a cast (weights.dtype)"
        if version:
            weights = f"weights that were published as version {version}: exported names or values, a replica's copies"
        if self._passed is not None and self._passed < version:
            causes.insert(0, f"{weights} (version {self._passed} was right)")
        else:
            causes.append(weights)
        return _own_sampling(batch) + causes


def _report(error: RunError, *, stops: bool) -> None:
    if stops:
        raise error
    logging.getLogger("jackfield").warning("%s at %s (%s); %s", error.message, error.where, error.found, error.fix)


def _own_sampling(batch: BatchMeta) -> list[str]:
    """What agents asked for, where it was not what they were given."""
    own = [tags["own_sampling"] for tags in batch.tags if "own_sampling" in tags]
    if not own:
        return []
    return [f"the agent's own sampling parameters in {len(own)} of {len(batch)} samples, such as {own[0]}"]


def _likely(causes: Any) -> str:
    listed = "; ".join(f"({number}) {cause}" for number, cause in enumerate(causes, 1))
    return f"likely causes: {listed}. log_prob_check.bound and log_prob_check.on_mismatch set what is let through"


@attrs.frozen(kw_only=True)
class _Distance:
    """Over the tokens that were compared; 0 without any."""

    tokens: float
    sum: float
    largest: float
    signed: float
    key: str  #: of the farthest sample
    sample: float  #: its mean distance

    @classmethod
    def of(cls, found: Mapping[str, float], name: str) -> _Distance:
        get = {key.removeprefix(f"{PREFIX}{name}/"): value for key, value in found.items()}.get
        samples = {key: value for key, value in found.items() if key.startswith(f"{PREFIX}sample/")}
        farthest = max(samples, key=lambda key: (samples[key] != samples[key], samples[key]), default="")
        return cls(
            tokens=get("tokens", 0.0),
            sum=get("sum", 0.0),
            largest=get("max", 0.0),
            signed=get("signed_sum", 0.0),
            key=farthest.removeprefix(f"{PREFIX}sample/").removesuffix("/max"),
            sample=samples.get(farthest, 0.0),
        )

    @property
    def mean(self) -> float:
        return self.sum / max(self.tokens, 1.0)

    def __str__(self) -> str:
        return f"{self.mean:.3g} over {self.tokens:.0f} tokens, at most {self.largest:.3g}"
