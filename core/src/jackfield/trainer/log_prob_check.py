"""A check of the training pass's log-probs against those of inference and rollout.

The probe (:class:`jackfield.weights.ReplicaProbe`) asks replicas after a weight sync. This check compares the training
pass of an optimizer step with an inference pass of the same weights, and with the log-probs that the rollout servers
returned for the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import attrs

from jackfield.errors import RunError
from jackfield.queue import BatchMeta
from jackfield.runtime.engine import PREFIX
from jackfield.trainer.role import Role

_SAMPLE_FACTOR = 10.0  #: a single sample's mean distance may exceed the bound of the batch by this factor
_NEARLY_ALL = 0.99  #: sampling filters are suspected when this share of the distance has one sign

_TRAIN_MODE_CAUSES = (
    "dropout in train mode (a model's own, an adapter's), or noise in the routing of experts",
    "kernels or a dtype that the engine has in train mode alone",
    "positions (dynamic or long rope) that depend on how rows are split into micro-batches",
)
_FILTERS = (
    "tokens drawn from a sharper or filtered distribution (top_p, top_k, min_p, a lower temperature, in the agent "
    "or the server), or log-probs that are not of the distribution that was drawn from"
)
_ROLLOUT_CAUSES = (
    "sampling parameters other than the run's: temperature, filters, raw log-probs",
    "token ids: prompt or response ids that an agent returns are not those that were sent and generated (a chat "
    "template rendered again, text tokenised again)",
    "numerics of the server: dtype, rope settings, routing of experts",
)


@attrs.define(kw_only=True, eq=False)
class LogProbCheck:
    """Compares log-probs in the first step, the first after a weight sync, and every few."""

    role: Role
    bound: float  #: on the mean distance between training pass and rollout, in nats
    train_mode_bound: float  #: on the mean distance between training pass and inference pass, in nats
    slack: float = 0.0  #: nats by which sampling filters may raise the rollout's log-probs
    dropout: bool = False  #: whether the model trains with dropout; training and inference passes then differ
    _begun: bool = attrs.field(default=False, init=False)
    _passed: int | None = attrs.field(default=None, init=False)  #: the newest weight version that passed the check

    def is_due(self, step: int) -> bool:
        """Return whether to compare the first update of ``step`` (from 0) or of the process."""
        return self.role.config.log_prob_check.every > 0 and (not self._begun or self._is_scheduled(step))

    def _is_scheduled(self, step: int) -> bool:
        config, schedule = self.role.config, self.role.schedule
        first = config.critic.warmup_steps if self.role.algorithm.critic else 0  # the first step that trains the policy
        return step in (first, schedule.sync_interval) or schedule.is_due(config.log_prob_check.every, step)

    def judge(self, update: Mapping[str, float], batch: BatchMeta, step: int, version: int) -> dict[str, float]:
        """Check the distances that an update measured; return its other metrics.

        A distance beyond its bound is refused with the likely causes (``run.log-probs``). Distances become metrics at
        scheduled steps only, so that a resumed run has the same metrics as one that was not interrupted.
        """
        self._begun = True
        found = {name.removeprefix(PREFIX): value for name, value in update.items() if name.startswith(PREFIX)}
        mean, shown = dict[str, float](), dict[str, str]()
        for name in ("train_mode", "rollout"):
            tokens, most = found.get(f"{name}/tokens", 0.0), found.get(f"{name}/max", 0.0)
            mean[name] = found.get(f"{name}/sum", 0.0) / max(tokens, 1.0)
            shown[name] = f"{mean[name]:.3g} over {tokens:.0f} tokens, at most {most:.3g}"
            if tokens and self._is_scheduled(step):
                for kind, value in (("mean", mean[name]), ("max", most), ("tokens", tokens)):
                    self.role.note(f"{PREFIX}{name}/{kind}", value)
        samples = {name: value for name, value in found.items() if name.startswith("sample/")}
        farthest = max(samples, key=lambda name: (samples[name] != samples[name], samples[name]), default="")
        distance, most, where = samples.get(farthest, 0.0), _SAMPLE_FACTOR * self.bound, f"step {step + 1}"
        on_mismatch = self.role.config.log_prob_check.on_mismatch
        if not self.dropout and not mean["train_mode"] <= self.train_mode_bound:
            message = "the pass that is trained on computes other log-probs than an inference pass of the same weights"
            expected = f"a mean distance of at most {self.train_mode_bound:.3g} nats"
            stops = on_mismatch != "warn"
            _refuse(message, where, expected, shown["train_mode"], _TRAIN_MODE_CAUSES, stops=stops)
        elif not mean["rollout"] <= self.bound or not distance <= most:
            message = "the rollout's log-probs are not those of the policy that is trained, with weights of one version"
            expected = f"a mean distance of at most {self.bound:.3g} nats, {most:.3g} in any sample"
            key = farthest.removeprefix("sample/").removesuffix("/max")
            seen = f"{shown['rollout']}; farthest: sample {key}, {distance:.3g}"
            causes = self._rollout_causes(found, batch, version)
            _refuse(message, where, expected, seen, causes, stops=on_mismatch == "stop")
        elif "rollout/tokens" in found:
            self._passed = version
        return {name: value for name, value in update.items() if not name.startswith(PREFIX)}

    def _rollout_causes(self, found: Mapping[str, float], batch: BatchMeta, version: int) -> list[str]:
        """List the possible causes of a mismatch, the likeliest first."""
        causes = list(_ROLLOUT_CAUSES)
        if found["rollout/signed_sum"] >= _NEARLY_ALL * found["rollout/sum"]:
            causes.insert(0, _FILTERS)
        weights = "weights of the replicas: another model folder, or a cast (weights.dtype)"
        if version:
            weights = f"weights that were published as version {version}: exported names or values, a replica's copies"
        if self._passed is not None and self._passed < version:
            causes.insert(0, f"{weights} (version {self._passed} was right)")
        else:
            causes.append(weights)
        if own := [tags["own_sampling"] for tags in batch.tags if "own_sampling" in tags]:
            first = f"the agent's own sampling parameters in {len(own)} of {len(batch)} samples, such as {own[0]}"
            causes.insert(0, first)
        return causes


def _refuse(message: str, where: str, expected: str, found: str, causes: Iterable[str], *, stops: bool) -> None:
    listed = "; ".join(f"({number}) {cause}" for number, cause in enumerate(causes, 1))
    fix = f"likely causes: {listed}. log_prob_check.bound and log_prob_check.on_mismatch set what is let through"
    if stops:
        raise RunError(message, code="run.log-probs", where=where, expected=expected, found=found, fix=fix)
    logging.getLogger("jackfield").warning("%s at %s (%s); %s", message, where, found, fix)
