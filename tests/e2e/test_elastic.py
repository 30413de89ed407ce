"""Replicas that come and go while a run goes on: the same losses, no sample lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import Run
from .scaling import Scaler
from .test_modes import GRADED, steps

#: What a replica computes depends in its last bits on what else it computes; losses do not, with these settings.
SAME = ("algorithm.old_log_probs=engine", "schedule.steps=4", *GRADED)
OURS = ("policy/loss", "policy/ratio", "grad_norm", "reward/mean", "response_tokens/mean", "samples")


@pytest.fixture(scope="module")
def fixed() -> dict[str, Any]:
    """Lines of the run with one replica, once it was done."""
    return {}


@pytest.mark.parametrize("settings", [(), ("runtime.offload=true",)], ids=["beside the engine", "in turns with it"])
def test_a_run_that_has_two_replicas_for_a_while_is_the_run_with_one(
    small_run: Run, tmp_path: Path, fixed: dict[str, Any], settings: tuple[str, ...]
) -> None:
    if not fixed:
        fixed["lines"] = small_run("fixed", *SAME)[1]
    scaler = Scaler(tmp_path / "elastic", [(1, 2, 1), (2, 1, 3)])
    result, lines = small_run("elastic", *SAME, *settings, "runtime.metrics_port=0", hooks=[scaler])
    for one, other in zip(steps(fixed["lines"]), steps(lines), strict=True):
        assert [pytest.approx(one[name], abs=1e-5) for name in OURS] == [other[name] for name in OURS]
    assert not (result.folder / "samples" / "failed.jsonl").exists()
    assert [[0, 1], [0]] == [scaling.replicas for scaling in scaler.scalings]
    assert [[0, 1], [0]] == [scaling.shown for scaling in scaler.scalings]
    assert [1, 2] == [line["replicas"] for line in lines if line["kind"] == "sync"][:2]
    assert 1 == [line["replicas"] for line in lines if line["kind"] == "sync"][-1]
    assert [False, True, False, False] == ["seconds/join" in line for line in steps(lines)]
