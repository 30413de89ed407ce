"""Cheap workers for the tests of hosts and clusters."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from jackfield.abc.rollout import GenerateRequest, GenerateResult, HealthReport
from jackfield.errors import EngineError
from jackfield.runtime.process import ROLLOUT, rollout_service
from jackfield.sdk.rpc import Contract, Service


class Counter:
    """A worker whose methods count, fail or wait."""

    def __init__(self, start: int = 0) -> None:
        self.number = start
        self.cancelled = self.refuses = False

    async def add(self, number: int, *, twice: bool = False) -> int:
        self.number += 2 * number if twice else number
        return self.number

    async def count(self) -> int:
        return self.number

    async def pid(self) -> int:
        return os.getpid()

    async def refuse(self) -> None:
        raise EngineError("no", code="engine.state", where="here", expected="yes", found="no", fix="say yes")

    async def stumble(self) -> None:
        raise ZeroDivisionError("by nought")

    async def hang(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def hung(self) -> bool:
        while not self.cancelled:
            await asyncio.sleep(0)
        return self.cancelled

    async def refuse_to_end(self) -> None:
        self.refuses = True

    async def close(self) -> None:
        if self.refuses:
            await self.refuse()


COUNTER = Contract(Counter)


class Replica:
    """A rollout server that fails requests of a weight version, and is not healthy after those of version 9."""

    healthy = True

    def __getattr__(self, name: str) -> object:
        if name in {method.name for method in ROLLOUT}:
            return self.health
        raise AttributeError(name)

    async def health(self) -> HealthReport:
        return HealthReport(healthy=self.healthy, detail="it is broken")

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.minimum_weight_version is None:
            return GenerateResult(
                request_id=str(os.getpid()), token_ids=(), log_probs=(), weight_versions=(), finish_reason="length"
            )
        self.healthy = request.minimum_weight_version < 9
        raise ZeroDivisionError("by nought")


async def make(worker: dict[str, Any], stack: AsyncExitStack) -> Mapping[str, Service]:
    """Make a worker of a kind."""
    match worker["kind"]:
        case "replica":
            return {"worker": rollout_service(Replica(), 0)}  # type: ignore[arg-type]
        case "counter":
            counter = Counter(worker["start"])
            stack.push_async_callback(counter.close)
            return {"Counter": Service(target=counter, contract=Contract(Counter))}
    raise EngineError("cannot be made", where="the worker")
