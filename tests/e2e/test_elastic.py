"""Replicas that come and go while a run goes on: the same losses, no sample lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield.routing import Replica, Router

from .conftest import Run
from .scaling import Scaler
from .test_modes import GRADED, INVARIANT, steps

#: Neither tokens nor losses depend on which replica computes what beside which other requests.
SAME = ("algorithm.old_log_probs=engine", "schedule.steps=4", INVARIANT, *GRADED)
OURS = ("policy/loss", "policy/ratio", "grad_norm", "reward/mean", "response_tokens/mean", "samples")


@pytest.fixture(scope="module")
def fixed() -> dict[str, Any]:
    """Lines of the run with one replica, once it was done."""
    return {}


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that is removed has a request."""
    from jackfield_rollout_transformers.server import TransformersServer

    generate, route = TransformersServer.generate, Router.route
    leaving, begun = set[int](), asyncio.Event()

    async def note(server: TransformersServer, request: GenerateRequest) -> GenerateResult:
        if server.context.replica in leaving and not request.request_id.startswith("probe"):
            begun.set()
        return await generate(server, request)

    async def wait(
        router: Router, replicas: Mapping[int, Replica], seconds: float, updating: Sequence[int] = ()
    ) -> int:
        leaving.update(router._replicas.keys() - replicas.keys())
        if leaving and not any(router._running[router._replicas[number]] for number in leaving):
            await begun.wait()
        return await route(router, replicas, seconds, updating)

    monkeypatch.setattr(TransformersServer, "generate", note)
    monkeypatch.setattr(Router, "route", wait)


@pytest.mark.parametrize(
    ("settings", "again"),
    [(("deadlines.drain=60",), False), (("cluster.offload=true", "deadlines.drain=0"), True)],
    ids=["beside the engine", "in turns with it"],
)
@pytest.mark.usefixtures("busy")
def test_a_run_that_has_two_replicas_for_a_while_is_the_run_with_one(
    small_run: Run,
    tmp_path: Path,
    fixed: dict[str, Any],
    settings: tuple[str, ...],
    again: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The second is removed while it generates. What it has begun it ends, or (``again``) the first generates it."""
    if not fixed:
        fixed["lines"] = small_run("fixed", *SAME)[1]
    caplog.set_level("INFO", "jackfield")
    scaler = Scaler(tmp_path / "elastic", [(1, 2, 1), (2, 1, 4)])
    result, lines = small_run("elastic", *SAME, *settings, "cluster.metrics_port=0", hooks=[scaler])
    for one, other in zip(steps(fixed["lines"]), steps(lines), strict=True):
        assert [pytest.approx(one[name], abs=1e-5) for name in OURS] == [other[name] for name in OURS]
    (moved,) = re.findall(r"replicas 1 were removed, (\d+) of their requests continue elsewhere", caplog.text)
    assert again == (int(moved) > 0)
    assert not (result.folder / "samples" / "failed.jsonl").exists()
    assert [[0, 1], [0]] == [scaling.replicas for scaling in scaler.scalings]
    assert [[0, 1], [0]] == [scaling.shown for scaling in scaler.scalings]
    assert [1, 2] == [line["replicas"] for line in lines if line["kind"] == "weights"][:2]
    assert [False, True, False, False] == ["seconds/load_weights" in line for line in steps(lines)]
