"""What the benchmark beside TRL decides by itself: whether curves differ, and whether the peer is there."""

from __future__ import annotations

import importlib.util
import random
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def curves(seed: int, gain: float, count: int = 5) -> list[list[float]]:
    """Learning curves whose noise is that of the seeds: 0.01 of a whole curve and 0.005 of a step."""
    rng = random.Random(seed)
    levels = [rng.gauss(0.5, 0.01) for _ in range(count)]
    return [[level + gain * step + rng.gauss(0, 0.005) for step in range(24)] for level in levels]


def test_equal_learners_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = load("_vs_trl_curves", monkeypatch).compare
    called_different = sum(compare(curves(2 * n, 0.02), curves(2 * n + 1, 0.02)).differ for n in range(40))
    assert called_different <= 2  # the level of the test is 1 in 100


def test_a_slower_learner_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    result = load("_vs_trl_curves", monkeypatch).compare(curves(1, 0.02), curves(2, 0.017))
    assert result.differ
    assert result.p == pytest.approx(2 / 252)


def test_fewer_than_five_seeds_are_not_enough_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    result = load("_vs_trl_curves", monkeypatch).compare(curves(1, 0.02, count=4), curves(2, 0.0, count=4))
    assert not result.tested
    assert not result.differ


def test_a_missing_peer_is_exit_code_2_and_says_how_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = load("vs_trl", monkeypatch)

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(benchmark, "version", missing)
    with pytest.raises(SystemExit) as ended:
        benchmark.require_peer()
    assert ended.value.code == 2
    assert "make benchmark-peers" in capsys.readouterr().err


def test_the_reward_is_the_share_of_wanted_words(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_score = load("_vs_trl_task", monkeypatch).compute_score
    assert compute_score("", "biaka coale hemi", "bhrt", {}) == pytest.approx(2 / 3)
    assert compute_score("", "", "bhrt", {}) == 0.0
