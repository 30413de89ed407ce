"""What benchmarks decide by themselves: what their options mean, whether curves differ, whether the peer is there."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
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


def ran(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCHMARKS / f"{name}.py", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_options_that_are_given_win_over_quick() -> None:
    done = ran("algorithms", "--quick", "--json", "--rows", "64", "--length", "20")
    settings = json.loads(done.stdout.splitlines()[-1])["settings"]
    assert (64, 20, 1) == (settings["rows"], settings["length"], settings["repeat"])
    done = ran("control_loop", "--quick", "--json", "--cluster", "inline", "--samples", "64", "--steps", "3")
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 3, done.stderr


def test_the_controller_is_measured_on_virtual_time() -> None:
    done = ran("control_loop", "--virtual", "--quick", "--json", "--samples", "64", "--replicas", "2")
    assert done.returncode == 0, done.stderr
    assert 0.0 < json.loads(done.stdout.splitlines()[-1])["controller_share_by_samples"]["64"]["2"] < 2


def test_the_queues_benchmark_has_a_reason_for_each_figure_that_is_missing() -> None:
    options = ("--sizes", "1", "--backends", "memory", "--controller-rows", "500")
    done = ran("transfer_queue", "--quick", *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["put_ratio"] is found["at_once_fraction"] is None
    assert {"zmq", "TransferQueue 0.1.11", "64 MB"} <= found["reasons"].keys()
    assert "it was not chosen (--backends)" == found["reasons"]["zmq"]
    assert f"controller, {found['controller'][0]['rows']:>9,} rows" in done.stdout


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("transfer_queue", ("--backends", "nosuch"), "no such backend: nosuch; known are memory; sql; sql, PostgreSQL"),
        ("weights", ("--receivers", "0"), "--receivers: 0 is not above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, options: tuple[str, ...], expected: str) -> None:
    done = ran(name, *options)
    assert (2, True) == (done.returncode, expected in done.stderr), done.stderr
