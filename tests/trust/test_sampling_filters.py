"""Sampling filters: the distribution that tokens are drawn from is not the engine's, and training knows it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield_commands import CommandServer

pytestmark = pytest.mark.timeout(180)

#: Settings that let a model that knows nothing earn different rewards within a group.
GRADED = (
    "reward.pattern=null",
    "reward.ground_truth_pattern=null",
    "reward.method=regex",
    "reward.expected='.*[0-4].*'",
)

Settings = Callable[..., list[str]]


def steps(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize(
    "filters",
    [
        ("sampling.top_p=0.6",),
        ("sampling.top_k=5",),
        ("sampling.min_p=0.1", "sampling.temperature=0.7"),
        ("sampling.top_p=0.9", "sampling.top_k=12", "algorithm.name=decoupled_ppo"),
        ("sampling.top_k=5", "algorithm.name=opmd_kimi"),
    ],
    ids=lambda filters: ",".join(filters),
)
def test_ratios_start_at_one(
    jackfield: CommandServer, quickstart_settings: Settings, tmp_path: Path, filters: tuple[str, ...]
) -> None:
    """Old log-probs are the engine's own, so a step with one update clips nothing, whatever was drawn from."""
    done = jackfield("run", *quickstart_settings("filtered", *GRADED, *filters, "optimizer.lr=1e-3"))
    assert 0 == done.code, done.error
    lines = steps(tmp_path / "filtered")
    assert 3 == len(lines)
    for line in lines:
        if "policy/ratio" in line:
            assert 1.0 == pytest.approx(line["policy/ratio"], abs=1e-4)
            assert 0.0 == pytest.approx(line["policy/approx_kl"], abs=1e-6), "no single ratio is off"
            assert 0.0 == line["policy/clip_fraction"]
        assert "seconds/old_log_probs" in line
    weighs_tokens = "algorithm.name" not in " ".join(filters)
    assert weighs_tokens == ("correction/mean" in lines[0])


def test_the_correction_weighs_by_what_the_filter_left(
    jackfield: CommandServer, quickstart_settings: Settings, tmp_path: Path
) -> None:
    """A drawn token's weight is its probability before the filter by that after it: the mass of the kept tokens."""
    settings = quickstart_settings("filtered", *GRADED, "sampling.top_k=5", "schedule.steps=1")
    assert 0 == jackfield("run", *settings).code
    plain = quickstart_settings("plain", *GRADED, "schedule.steps=1")
    assert 0 == jackfield("run", *plain).code
    filtered, unfiltered = (steps(tmp_path / name)[0] for name in ("filtered", "plain"))
    assert 0.0 < filtered["correction/min"] < filtered["correction/max"] < 1.0
    assert filtered["correction/kl"] > 0.1, "the mean of -log of the kept mass"
    assert filtered["correction/mean"] <= math.exp(-filtered["correction/kl"]) * 1.5
    assert not [name for name in unfiltered if name.startswith("correction/")], "nothing to correct without a filter"


@pytest.mark.parametrize(
    ("where", "overrides"),
    [
        ("algorithm.old_log_probs", ("sampling.top_p=0.6", "algorithm.old_log_probs=rollout")),
        (
            "algorithm.old_log_probs",
            (
                "sampling.min_p=0.1",
                "algorithm.old_log_probs=rollout",
                "algorithm.correction={enabled: true, reject: token}",
            ),
        ),
        ("sampling.log_probs", ("sampling.log_probs=raw",)),
        ("sampling.log_probs", ("sampling.log_probs=raw", "sampling.temperature=0.7")),
        ("sampling.temperature", ("sampling.temperature=0",)),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_trained_on_is_refused_before_the_run(
    jackfield: CommandServer, quickstart_settings: Settings, tmp_path: Path, where: str, overrides: tuple[str, ...]
) -> None:
    done = jackfield("run", *quickstart_settings("refused", *overrides))
    assert 1 == done.code
    assert ("[config.invalid-value]" in done.error, where in done.error) == (True, True), done.error
    assert not (tmp_path / "refused").exists(), "nothing was begun"


def test_filters_of_evaluations_change_nothing(
    jackfield: CommandServer, quickstart_settings: Settings, tmp_path: Path
) -> None:
    """Nobody is trained on an evaluation's answers: they may be greedy, filtered or have raw log-probs."""
    overrides = ("evaluation={every: 1, tasks: 2, sampling: {max_new_tokens: 4, top_k: 5, log_probs: raw}}",)
    done = jackfield("run", *quickstart_settings("evaluated", *overrides, "schedule.steps=1"))
    assert 0 == done.code, done.error
    assert "correction/mean" not in steps(tmp_path / "evaluated")[0]
