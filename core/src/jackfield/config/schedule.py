"""The section ``schedule``: when batches are generated, trained on and published."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs.validators import ge, gt

from jackfield.settings import option


@attrs.frozen(kw_only=True)
class UntilConfig:
    """What ends a run before ``schedule.steps``: the first of these that is reached at the end of a step."""

    samples: int | None = option(None, "samples, trained on or (mode: explore) collected", gt(0))
    tokens: int | None = option(None, "tokens of responses", gt(0))
    seconds: float | None = option(None, "seconds of the run's steps, without starts", gt(0.0))
    device_seconds: float | None = option(
        None, "the same, times the devices (on a CPU: places) of this run's ranks and replicas", gt(0.0)
    )
    reward: float | None = option(None, "mean reward of a step's samples")
    score: float | None = option(None, "mean score of an evaluation")


@attrs.frozen(kw_only=True)
class ScheduleConfig:
    """When batches are generated, trained on and published."""

    steps: int = option(100, "training steps", gt(0))
    mode: Literal["sync", "async"] = option(
        "sync", "sync: step t trains on batch t; async: on any complete groups, as many as a batch has"
    )
    sync_interval: int = option(1, "k: publish weights every k steps", gt(0))
    sync_offset: int = option(0, "o: batches that explorers may run ahead (mode: sync)", ge(0))
    max_staleness: int | None = option(
        None, "mode: async: maximum steps between a token's weights and its step; null: sync_interval", ge(0)
    )
    on_stale: Literal["wait", "train_corrected", "drop"] = option(
        "wait",
        "mode: async: what happens when a group would exceed max_staleness; wait: the trainer waits for it in time; "
        "train_corrected: it is trained on late, with off-policy correction; drop: it is generated again",
    )
    stream_mini_batches: bool = option(
        False, "update pipeline (mode: sync): update on mini-batches of whole groups in the order of their rewards"
    )
    rollouts_in_flight: int | None = option(
        None, "an explorer starts no group while this many rollouts run; null: those of one batch", gt(0)
    )
    partial_rollout: bool = option(
        False, "on shared devices a training phase interrupts rollouts, which go on from their tokens afterwards"
    )
    until: UntilConfig = option(factory=UntilConfig, help="what ends the run before its last step")
    max_retries: int = option(8, "retries of a failed group, and groups in a row that may end without a score", ge(0))

    @property
    def limits(self) -> dict[str, float]:
        """Return what ends the run, by name: ``steps``, and the limits of ``until`` that are set."""
        return {"steps": self.steps, **attrs.asdict(self.until, filter=lambda _, value: value is not None)}
