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

import attrs
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


class TestTheBoundOfSchedules:
    """Analytic bounds of ``schedules.py``, by hand."""

    @pytest.fixture
    def bounds(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        return load("_schedules_bound", monkeypatch)

    def test_stages_that_wait_for_each_other_add_up(self, bounds: ModuleType) -> None:
        work = bounds.Workload(name="w", generate=20.0, tail=5.0, update=7.0, log_probs=2.0, sync=3.0)
        for k in (1, 2, 5):
            period = k * 20.0 + 5.0 + 2.0 + 7.0 + 3.0
            assert period / k == pytest.approx(bounds.bound(work, bounds.Plan(name="p", k=k), (2 * k, 4 * k)))

    def test_a_busy_device_bounds_what_overlaps(self, bounds: ModuleType) -> None:
        work = bounds.Workload(name="w", generate=20.0, update=7.0, sync=3.0)
        plan = bounds.Plan(name="p", o=1)
        assert bounds.bound(work, plan, (4, 12)) == 20.0 + 3.0
        assert bounds.bound(attrs.evolve(work, shared=True), plan, (4, 12)) == 20.0 + 7.0 + 3.0

    def test_mini_batches_start_with_the_first_rewards(self, bounds: ModuleType) -> None:
        class Delayed(bounds.Workload):  # type: ignore[misc,name-defined]
            def reward_seconds(self, batch: int, group: int, rollout: int) -> float:
                return (20.0, 5.0)[group]

        sizes = {"groups": 2, "rollouts": 1, "mini_batches": 2, "at_once": True}
        work = Delayed(name="w", generate=10.0, log_probs=2.0, update=6.0, sync=1.0, **sizes)
        assert bounds.step_ends(work, bounds.Plan(name="whole"), 1) == [10.0 + 20.0 + 2.0 + 6.0 + 1.0]
        assert bounds.step_ends(work, bounds.Plan(name="parts", streams=True), 1) == [10.0 + 20.0 + 3.0 + 1.0]

    def test_asynchronous_steps_overtake_stragglers(self, bounds: ModuleType) -> None:
        work = bounds.Workload(name="w", generate=20.0, tail=60.0, update=7.0, sync=0.0)
        asynchronous = bounds.bound(work, bounds.Plan(name="p", staleness=9), (10, 20))
        assert asynchronous == pytest.approx(20.0)
        assert bounds.bound(work, bounds.Plan(name="p", k=5), (10, 20)) == pytest.approx(20.0 + (60.0 + 7.0) / 5)

    def test_the_stage_times_reproduce_the_seeds_speed_ups(self, bounds: ModuleType) -> None:
        for work, seeds in bounds.TRINITY.items():
            times = [bounds.seeds_schedule(work, plan) for plan in bounds.TRINITY_PLANS]
            assert [times[0] / each for each in times] == pytest.approx(seeds, rel=0.13), work.name


def ran(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCHMARKS / f"{name}.py", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_options_that_are_given_win_over_quick() -> None:
    done = ran("algorithms", "--quick", "--json", "--rows", "64", "--length", "20")
    settings = json.loads(done.stdout.splitlines()[-1])["settings"]
    assert (64, 20, 1) == (settings["rows"], settings["length"], settings["repeat"])
    done = ran("control_loop", "--quick", "--json", "--cluster", "inline", "--samples", "64", "--steps", "3")
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 3, done.stderr


@pytest.mark.timeout(250)
def test_schedules_reach_their_bound_on_virtual_time_and_run_really() -> None:
    done = ran("schedules", "--quick", "--json", "--workloads", "GSM8K 7B")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    rows = [*found["recipe"].values(), *(row for table in found["trinity"].values() for row in table.values())]
    assert len(rows) == 10
    shares = [row["share_of_bound"] for row in rows]
    assert all(0.95 <= share["simulated"] <= 1.0001 for share in shares), shares
    pipeline = found["recipe"]["update pipeline"]
    assert {"ours", "seed", "bound"} <= pipeline.keys()
    assert pipeline["seconds_per_step"]["real"] > 100, "computation alone is 120 s, a hundredth in the run"


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
