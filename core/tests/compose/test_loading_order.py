"""When engines load and replicas start that share devices."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jackfield.compose import builder
from jackfield.config import make_config
from jackfield.runtime.engine import EngineGroup


@pytest.mark.parametrize(
    ("offload", "shares", "expected"),
    [
        (True, True, ["actor", "actor to cpu", "critic", "critic to cpu", "replicas"]),
        (False, True, ["actor", "critic", "replicas"]),
        (False, False, ["actor", "critic", "replicas"]),
    ],
)
def test_servers_find_the_memory_that_engines_have_left(
    monkeypatch: pytest.MonkeyPatch, offload: bool, shares: bool, expected: list[str]
) -> None:
    """A server reserves a part of the memory when it starts, and each engine loads before that."""
    log = []

    class Builder(builder.RunBuilder):
        async def _load(self, name: str) -> None:
            async def to(device: str) -> None:
                log.append(f"{name} to {device}")

            log.append(name)
            self._engines[name] = cast(EngineGroup, SimpleNamespace(to=to))

        async def start_replicas(self) -> None:
            log.append("replicas")

    config = make_config({"model": {"path": "none"}, "cluster": {"device": "cuda", "offload": offload}})
    workers = SimpleNamespace(shares_devices=shares, replicas=1, watch=None)
    role: Any = SimpleNamespace(config=config, engines=("actor", "critic"), workers=workers, name="all")
    monkeypatch.setattr(builder, "Trainer", lambda **_: None)
    made: Any = Builder(role=role, stop=cast(Any, SimpleNamespace(requested=None)), factory=None, make_workers=None)  # type: ignore[arg-type]
    asyncio.run(made.trainer())
    assert expected == log
