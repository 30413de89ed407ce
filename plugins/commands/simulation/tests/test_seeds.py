"""Random runs with random faults keep their invariants, and a failure is shown as the smallest run that has it."""

from __future__ import annotations

import contextlib
import os
from collections import Counter

import attrs
import pytest

from jackfield.errors import ConfigError, RunError
from jackfield.simulation import FAULTS, ROLES, Fault, Simulation, SimulationSettings, Times, check_seeds, simulate
from jackfield.trainer.role import Schedule
from jackfield_random_runs import random_settings

pytest.importorskip("torch")
SEEDS = 200
DATA = {"groups_per_batch": 4, "rollouts_per_group": 2}


def settings(steps: int = 8, *faults: Fault, times: Times | None = None, **schedule: object) -> SimulationSettings:
    run = {"schedule": {"steps": steps, **schedule}, "data": DATA, "checkpoint": {"every": 2}}
    return SimulationSettings(run=run, times=times or Times(), faults=faults)


@pytest.mark.timeout(300)
def test_random_runs_with_random_faults_keep_their_invariants() -> None:
    check_seeds(range(SEEDS), random_settings)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_ten_thousand_random_runs_keep_their_invariants() -> None:
    check_seeds(range(10_000), random_settings, processes=2)


@pytest.mark.parametrize(
    ("schedule", "at", "number"),
    [({"mode": "async", "max_staleness": 2}, 1, 1), ({"stream_mini_batches": True, "sync_offset": 2}, 3, 0)],
    ids=["async", "stream"],
)
def test_a_step_that_loses_samples_between_updates_trains_on_each_group_as_often(
    schedule: dict[str, object], at: int, number: int
) -> None:
    """Groups that were leased again after a loss are at other places, and mini-batches have others than before."""
    run = {
        "schedule": {"steps": 2, **schedule},
        "data": {"groups_per_batch": 4, "rollouts_per_group": 1},
        "algorithm": {"mini_batches": 2, "epochs": 2},
    }
    lost = Fault(role="store unit", phase="update", kind="dies", at=at, number=number)
    simulate(SimulationSettings(run=run, times=Times(generate=0.0, reward=(0.5, 0.5, 30.0)), faults=[lost]), seed=822)


def test_random_runs_have_faults_of_each_role_and_kind() -> None:
    faults = [fault for seed in range(SEEDS) for fault in random_settings(seed).faults]
    found = Counter((fault.role, fault.kind) for fault in faults)
    assert {(role, kind) for role in ROLES for kind in FAULTS} == found.keys()


def test_random_runs_have_turns_interruptions_and_several_processes() -> None:
    drawn = [(chosen := random_settings(seed), chosen.config("runs/a")) for seed in range(SEEDS)]
    turns = [each for _, each in drawn if each.weights.in_turns and each.cluster.replicas > 1]
    partial = [chosen.keeps for chosen, each in drawn if each.schedule.partial_rollout]
    assert min(len(turns), *Counter(partial).values(), sum(chosen.distributed for chosen, _ in drawn)) >= SEEDS // 20
    assert {False, True} == set(partial)


@pytest.mark.parametrize("role", ["trainer", "explorer", "controller"])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_role_that_stands_still_stops_others_only_in_their_common_process(role: str, distributed: bool) -> None:
    late = Fault(role=role, phase="update", kind="answers late", at=3, seconds=30.0)
    run = simulate(attrs.evolve(settings(8, late, sync_offset=1), distributed=distributed))
    (begun,) = [float(text.split()[0]) for text in run.trace if "answers late" in text]
    meanwhile = [stage for stage, _, end, _ in run.spans if begun < end < begun + 30.0]
    assert distributed == ("generate" in meanwhile)


@pytest.mark.parametrize("keeps", [False, True])
def test_interrupted_rollouts_go_on_where_they_were(keeps: bool) -> None:
    """On shared devices each update interrupts the rollouts of the next batch, which take no longer for it."""
    partial = attrs.evolve(settings(4, sync_offset=1, partial_rollout=True), shared=True, keeps=keeps, tokens=100)
    run = simulate(attrs.evolve(partial, times=Times(reward=12.0, update=6.0)))
    assert sum(stage == "generate" for stage, *_ in run.spans) > 4 * 4 * 2
    seconds = sum(end - start for stage, start, end, _ in run.spans if stage == "generate")
    assert 320.0 == pytest.approx(seconds, abs=1e-6 if keeps else 32.0), "a token that has begun is complete"


def test_a_run_repeats_itself() -> None:
    chosen = random_settings(3)
    first, second = simulate(chosen, seed=3), simulate(chosen, seed=3)
    assert first.trace == second.trace
    assert first.clock.now == second.clock.now


def test_durations_are_those_of_the_schedule() -> None:
    """On-policy, a step is the sum of its stages; one step off-policy, the longest of generation and training."""
    times = Times(generate=10.0, reward=2.0, update=6.0, sync=1.0)
    on_policy, one_off = simulate(settings(times=times)), simulate(settings(times=times, sync_offset=1))
    step = on_policy.clock.now / 8
    assert 10.0 + 2.0 + 6.0 + 1.0 <= step <= 10.0 + 2.0 + 6.0 + 1.0 + 3.0, "lists of reports wait up to 2 s for others"
    assert one_off.clock.now < 8 * 13.5 + 12.0
    assert {"generate": 80.0, "update": 48.0, "sync": 8.0} == pytest.approx(
        {name: on_policy.busy()[name] for name in ("generate", "update", "sync")}
    )


def test_measured_and_drawn_durations_depend_on_the_place_alone() -> None:
    times = Times(
        generate={"uniform": [1.0, 40.0]}, reward=(1.0, 2.0), update=lambda stage, step, part, rollout, draw: step
    )
    drawn = {(batch, group): times.draw("generate", 7, batch, group) for batch in range(4) for group in range(4)}
    assert drawn == {place: times.draw("generate", 7, *place) for place in reversed(list(drawn))}
    assert all(1.0 <= seconds <= 40.0 for seconds in drawn.values())
    assert 16 == len(set(drawn.values()))
    assert {1.0, 2.0} == {times.draw("reward", 7, batch) for batch in range(20)}
    assert 3.0 == times.draw("update", 7, 3, 0, 0)


@pytest.mark.parametrize("kind", ["dies", "freezes"])
@pytest.mark.parametrize("role", ["trainer", "engine rank", "controller"])
def test_without_a_role_that_it_needs_the_run_resumes_from_its_newest_checkpoint(role: str, kind: str) -> None:
    run = simulate(settings(30, Fault(role=role, phase="between", kind=kind, at=24)))
    assert (2, 30) == (run.starts, len(run.steps))
    plain = simulate(settings(30))
    assert run.clock.now > plain.clock.now + (30.0 if kind == "freezes" else 2.0)


@pytest.mark.parametrize("role", ["explorer", "agent worker", "replica", "reward worker", "store unit"])
def test_other_roles_are_replaced_while_the_run_goes_on(role: str) -> None:
    run = simulate(settings(8, Fault(role=role, phase="generate", kind="dies", at=20)))
    assert (1, 8) == (run.starts, len(run.steps))
    assert any(f"{role} 0 is found dead" in text for text in run.trace)


def test_a_failure_shows_seed_settings_invariant_and_trace_of_a_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedule, "may_start", lambda self, batch, version: True)
    monkeypatch.setattr(Schedule, "check", lambda self, step, oldest: 0)
    idle = Fault(role="agent worker", phase="sync", kind="answers late")
    with pytest.raises(RunError) as caught:
        simulate(settings(8, idle), seed=5)
    text = str(caught.value)
    assert ("run.simulation", "seed 5") == (caught.value.code, caught.value.where)
    assert "the invariant 'staleness' is broken" in text
    assert "'steps': 2" in text
    assert "faults=()" in text or "faults=[]" in text
    assert "step 1 has ended" in text


def test_forked_processes_find_the_same() -> None:
    def settings_of(seed: int) -> SimulationSettings:
        return short(0.5) if seed == 3 else settings(1)

    with pytest.raises(RunError) as caught:
        check_seeds(range(5), settings_of, processes=2)
    assert ("run.simulation", "seed 3") == (caught.value.code, caught.value.where)


def short(seconds: float) -> SimulationSettings:
    return SimulationSettings(run={"schedule": {"steps": 1}, "data": DATA}, deadline=seconds)


def test_a_run_that_stands_still_fails_in_time() -> None:
    with pytest.raises(RunError) as caught:
        simulate(short(3.0))
    assert "run.simulation" == caught.value.code
    assert "waited 3 s for a step" in str(caught.value.found)


def test_settings_of_a_run_are_those_of_its_configuration() -> None:
    config = settings(3, sync_interval=3).config("runs/a")
    again = SimulationSettings.of_config(config, Times(), shared=True)
    assert config == again.config("runs/a")
    wrong = SimulationSettings(run={"schedule": {"stepz": 3}})
    with pytest.raises(ConfigError) as caught:
        wrong.config("runs/a")
    assert "config.unknown-key" == caught.value.code


def test_all_work_is_recorded() -> None:
    run = Simulation(settings(3))
    run.run()
    assert [1, 2, 3] == list(run.steps)
    assert {"next_batch", "update_actor", "publish_weights"} <= {stage.name for stage in run.stages}
    assert 3 * 4 * 2 == sum(stage == "generate" for stage, *_ in run.spans)


def test_the_folder_in_shared_memory_has_a_holder() -> None:
    """Checks of leaks, which other processes make at the same time, see that it is not left behind."""
    held = set[bool]()

    def look(*place: object) -> float:
        links = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the listing's own
                links.append(os.readlink(f"/proc/self/fd/{number}"))
        held.add(any(link.startswith("/dev/shm/jackfield-") and os.path.isdir(link) for link in links))
        return 1.0

    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm on this machine")
    simulate(settings(1, times=Times(generate=look)))
    assert {True} == held
