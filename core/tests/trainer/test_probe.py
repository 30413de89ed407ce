"""A replica whose log-probs are not the engine's is named after the update, before anybody generates with it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import attrs
import pytest

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, GenerateResult
from jackfield.config import make_config
from jackfield.data.formats import Task
from jackfield.errors import DeadlineExceeded, WeightsError
from jackfield.runtime.engine import EngineGroup
from jackfield.runtime.workers import Workers
from jackfield.trainer.weights import ReplicaProbe
from jackfield.weights import Replica
from jackfield_virtual_clock import VirtualClock

LOG_PROBS = (-0.5, -1.5)


@attrs.define(eq=False)
class FakeReplica:
    """Generates two tokens of the engine's log-probs, or somewhat different ones."""

    shift: float = 0.0
    silent: bool = False
    requests: list[GenerateRequest] = attrs.field(factory=list)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        if self.silent:
            await asyncio.Event().wait()
        return GenerateResult(
            request_id=request.request_id,
            token_ids=(7, 8),
            log_probs=(LOG_PROBS[0] + self.shift, LOG_PROBS[1]),
            weight_versions=(3, 3),
            finish_reason="length",
        )


@attrs.define(eq=False)
class FakeEngine:
    """Scores two tokens."""

    scored: list[tuple[Sequence[int], Sequence[Sequence[int]]]] = attrs.field(factory=list)

    async def score(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]]:
        self.scored.append((prompt_ids, responses))
        return [list(LOG_PROBS) for _ in responses]


def check(*replicas: FakeReplica, stops: bool = True, versions: Sequence[int] = (3,)) -> tuple[list[float], FakeEngine]:
    """The distances that are reported."""
    reported: list[float] = []
    engine, clock, prompts = FakeEngine(), VirtualClock(), [(5, 6)]

    async def prompt(task: Task, most: int) -> tuple[int, ...]:
        return prompts.pop()

    values = {"model": {"path": "none"}, "deadlines": {"rollout": 9.0}, "sampling": {"temperature": 0.7}}
    values["log_prob_check"] = {"probe_tokens": 2, "on_mismatch": "stop" if stops else "warn"}
    role: Any = SimpleNamespace(
        config=make_config(values, ()),
        clock=clock,
        tasks={"train": [None]},
        workers=SimpleNamespace(agents=Workers([SimpleNamespace(prompt_ids=prompt)])),
        note=lambda name, value: reported.append(value),
    )
    probe = ReplicaProbe(role=role, actor=cast(EngineGroup, engine))

    async def main() -> None:
        asked = [Replica(cast(BaseRolloutServer, each), number=number) for number, each in enumerate(replicas)]
        for version in versions:
            await probe.check(asked, version)

    clock.run(main())
    return reported, engine


def test_the_engine_scores_what_each_replica_generated_once() -> None:
    """The prompt is made once; replicas draw at the engine's temperature, and only with the new weights."""
    replicas = FakeReplica(), FakeReplica(shift=0.004)
    reported, engine = check(*replicas, versions=(3, 4))
    assert [pytest.approx(0.002)] * 2 == reported
    assert [((5, 6), [(7, 8), (7, 8)])] * 2 == engine.scored
    asked = replicas[0].requests[0]
    assert ((5, 6), 3, 2, 0.7) == (
        asked.prompt_ids, asked.minimum_weight_version, asked.sampling.max_new_tokens, asked.sampling.temperature
    )  # fmt: skip
    assert asked.sampling.ignore_eos
    assert asked.sampling.seed is not None, "no random number of the replica's own is used up"


@pytest.mark.parametrize("shift", [0.03, -0.03, math.nan, math.inf])
def test_a_replica_beyond_the_bound_is_named(shift: float) -> None:
    with pytest.raises(WeightsError) as caught:
        check(FakeReplica(), FakeReplica(shift=shift), FakeReplica(shift=0.021))
    assert ("weights.log-probs", "replica 1") == (caught.value.code, caught.value.where)
    assert "log_prob_check.bound" in str(caught.value.fix)


def test_where_it_is_corrected_for_it_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jackfield"):
        reported, _ = check(FakeReplica(shift=0.04), stops=False)
    assert [pytest.approx(0.02)] == reported
    (record,) = caplog.records
    assert "replica 0 computes other log-probs" in record.getMessage()


def test_a_replica_that_does_not_answer_is_not_waited_for_without_end() -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        check(FakeReplica(), FakeReplica(silent=True))
    assert "probe of version 3" in caught.value.message
