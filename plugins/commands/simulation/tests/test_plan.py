"""``jackfield plan``: predictions against values computed by hand, what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml
from click.testing import CliRunner

from jackfield.cli import main
from jackfield.config import make_config
from jackfield.errors import ConfigError, DeadlineExceeded
from jackfield.plugins import discover
from jackfield_simulation.planning import Plan, Prediction, make_plan
from jackfield_simulation.stage_times import read_times, written_times

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(240)
TIMES: dict[str, Any] = {"generate": 100.0, "reward": 0.0, "log_probs": 10.0, "update": 30.0, "sync": 5.0}
RUN: dict[str, Any] = {
    "model": {"path": "model"},
    "data": {"train": "tasks.jsonl", "groups_per_batch": 4, "rollouts_per_group": 2},
    "algorithm": {"mini_batches": 2, "old_log_probs": "engine"},
    "evaluation": {"every": 0},
    "cluster": {"placement": "separate"},
}
_LATE = 3.0  #: seconds: reports of the reward pipeline wait this long for others, once or twice a step


def planned(times: dict[str, Any], steps: int = 4, **sections: Any) -> Plan:
    config = make_config({**RUN, **sections})
    return make_plan(config, discover(), written_times({**TIMES, **times}, "times"), steps)


def by_name(plan: Plan) -> dict[str, Prediction]:
    return {each.name: each for each in [plan.own, *plan.others]}


def about(seconds: float) -> Any:
    """A step time that the reports of the reward pipeline make a little longer."""
    return pytest.approx(seconds + _LATE / 2, abs=_LATE / 2 + 0.01)


def test_on_policy_is_the_sum_of_the_stages_and_one_step_off_the_longer_side() -> None:
    plan = planned({})
    training = 10 + 2 * 30 + 5
    assert about(100 + training) == plan.own.step_time
    assert 100 * plan.own.step_time == pytest.approx(plan.own.run_time)
    assert (0, 0.0) == (plan.own.staleness_bound, plan.own.staleness_max)
    assert about(100) == plan.own.waits["trainer for rollouts"]
    assert about(75) == plan.own.waits["explorer for weights"]
    assert 75 / 175 == pytest.approx(plan.own.idle["replicas"], abs=0.02)
    assert 100 / 175 == pytest.approx(plan.own.idle["engine"], abs=0.02)
    one_off = by_name(plan)["one step off-policy"]
    assert about(100) == one_off.step_time
    assert (1, 1.0) == (one_off.staleness_bound, one_off.staleness_mean)
    assert 0.0 == pytest.approx(one_off.idle["replicas"], abs=0.03)
    assert about(75) == by_name(planned({"generate": 20.0}))["one step off-policy"].step_time


def test_on_shared_devices_training_and_rollouts_take_turns() -> None:
    plan = planned({}, cluster={"placement": "shared"})
    assert {"shared"} == {each.placement for each in [plan.own, *plan.others]}
    assert about(175) == plan.own.step_time
    assert all(each.step_time >= 100 + 70 for each in plan.others)
    assert plan.own.step_time - 3 * 5 / 4 == pytest.approx(by_name(plan)["a sync every 4 steps"].step_time, abs=_LATE)


def test_pipeline_and_one_step_off_hide_the_wait_for_rewards() -> None:
    """The recipe: two thirds of a step's rewards are there when its first mini-batch begins."""
    plan = planned({"reward": {"uniform": [1, 40]}}, cluster={"placement": "shared"}, data={**RUN["data"]})
    found = by_name(plan)
    waited = plan.own.waits["trainer for rewards"]
    assert 20 < waited < 45
    assert found["update pipeline"].step_time < plan.own.step_time - 5
    assert found["one step off-policy"].step_time < plan.own.step_time - waited / 3
    assert plan.best.staleness_bound >= 1
    assert plan.best.step_time <= 1.01 * min(each.step_time for each in found.values())


def test_a_straggler_delays_no_asynchronous_step_and_a_further_rollout_in_flight_takes_its_place() -> None:
    """One rollout in ten waits for its tools for a minute: 16 in flight leave replicas idle, so more are proposed."""
    times = {"generate": 5.0, "environment": [10.0] * 9 + [60.0], "update": 5.0, "log_probs": 0.0, "sync": 0.0}
    plan = planned(times, steps=12, data={**RUN["data"], "groups_per_batch": 8})
    found = by_name(plan)
    default = found["asynchronous, staleness 4"]
    assert default.step_time < 0.5 * plan.own.step_time
    assert plan.best.step_time < 0.8 * default.step_time
    assert "schedule.rollouts_in_flight=48" in plan.best.overrides, "more than these make steps no faster"
    assert found["asynchronous, staleness 4, 64 rollouts in flight"].step_time > 0.99 * plan.best.step_time


def test_of_limits_that_are_as_fast_the_one_with_the_newest_weights_is_best() -> None:
    """With four times as many rollouts in flight as needed, the explorer works ahead to the bound."""
    times = {"generate": 5.0, "environment": {"uniform": [0, 10]}, "update": 5.0, "log_probs": 0.0, "sync": 0.0}
    plan = planned(times, steps=8, schedule={"mode": "async", "max_staleness": 4, "rollouts_in_flight": 32})
    fewer = by_name(plan)["this file, 8 rollouts in flight"]
    assert ["schedule.rollouts_in_flight=null"] == fewer.overrides
    assert fewer.step_time <= 1.01 * plan.own.step_time
    assert fewer.staleness_mean < plan.own.staleness_mean - 1
    assert fewer is attrs.evolve(plan, others=[fewer]).best


def test_large_batches_are_simulated_by_group_and_say_so() -> None:
    times = {"generate": {"uniform": [50, 100]}, "reward": {"uniform": [1, 40]}}
    data = {**RUN["data"], "groups_per_batch": 16, "rollouts_per_group": 16}
    folded = planned(times, data=data)
    assert "one that takes as long as the last" in folded.notes[0]
    assert 99 + 70 + 5 < folded.own.step_time < 100 + 40 + 75 + 2 * _LATE


@pytest.mark.parametrize(
    ("sections", "name", "reason"),
    [
        ({"algorithm": {"mini_batches": 1}}, "update pipeline", "not split into 1 mini-batches"),
        ({"algorithm": {"name": "gpg", "mini_batches": 2}}, "update pipeline", "needs the whole batch"),
    ],
)
def test_schedules_that_the_file_cannot_have_are_left_out_with_the_reason(
    sections: dict[str, Any], name: str, reason: str
) -> None:
    plan = planned({}, **sections)
    reasons = {each["name"]: each["reason"] for each in plan.left_out}
    assert reason in reasons[name]
    assert name not in by_name(plan)
    assert "one step off-policy" in by_name(plan)


def test_an_open_placement_is_planned_both_ways() -> None:
    plan = planned({}, cluster={"device": "cuda"})
    found = by_name(plan)
    assert ("shared", "separate") == (plan.own.placement, found["one step off-policy, separate"].placement)
    assert found["one step off-policy, separate"].step_time < found["one step off-policy, shared"].step_time
    assert ["schedule.sync_offset=1", "cluster.placement=separate"] == found["one step off-policy, separate"].overrides


def test_a_file_with_the_best_schedule_keeps_it() -> None:
    plan = planned({}, schedule={"sync_offset": 1, "steps": 7})
    assert plan.best is plan.own
    back = by_name(plan)["on-policy"]
    assert ["schedule.sync_offset=0"] == back.overrides
    first = back.run_time - 7 * back.step_time
    assert 0 <= first < 1, "on-policy, nothing fills before the first step"
    assert about(75) == plan.own.run_time - 7 * plan.own.step_time, "the first step also waits for its training"


def test_deadlines_of_the_file_hold() -> None:
    with pytest.raises(DeadlineExceeded):
        planned({"update": 500.0}, deadlines={"batch": 100.0})


@pytest.mark.parametrize("mode", ["offline", "train", "explore"])
def test_other_modes_have_no_schedule(mode: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planned({}, mode=mode)
    assert ("config.invalid-value", "mode") == (caught.value.code, caught.value.where)


# -- stage times


@pytest.mark.parametrize(
    ("changed", "code", "where"),
    [
        ({"updates": 1.0}, "unknown-key", "updates"),
        ({"sync": -1}, "invalid-value", "sync"),
        ({"environment": -1}, "invalid-value", "environment"),
        ({"sync": float("nan")}, "invalid-value", "sync"),
        ({"sync": float("inf")}, "invalid-value", "sync"),
        ({"sync": 10**400}, "invalid-value", "sync"),
        ({"sync": True}, "wrong-type", "sync"),
        ({"sync": None}, "wrong-type", "sync"),
        ({"sync": "5"}, "wrong-type", "sync"),
        ({"generate": []}, "invalid-value", "generate"),
        ({"generate": [1.0, -2.0]}, "invalid-value", "generate[1]"),
        ({"generate": {"uniforn": [1, 2]}}, "unknown-key", "generate"),
        ({"generate": {}}, "unknown-key", "generate"),
        ({"generate": {"seed": [1]}}, "unknown-key", "generate"),
        ({"generate": {"uniform": [1, 2], "gauss": [1, 2]}}, "unknown-key", "generate"),
        ({"generate": {"uniform": [1]}}, "wrong-type", "generate.uniform"),
        ({"generate": {"uniform": [1, "2"]}}, "wrong-type", "generate.uniform"),
        ({"generate": {"uniform": 3}}, "wrong-type", "generate.uniform"),
        ({"generate": {"uniform": [-1, 2]}}, "invalid-value", "generate.uniform"),
        ({"generate": {"uniform": [1, float("inf")]}}, "invalid-value", "generate.uniform"),
        ({"generate": {"lognormvariate": [1000, 1]}}, "invalid-value", "generate.lognormvariate"),
        ({"generate": {"expovariate": [0]}}, "invalid-value", "generate.expovariate"),
        ({"generate": {"gauss": [-100, 1]}}, "invalid-value", "generate.gauss"),
    ],
)
def test_wrong_times_are_refused(changed: dict[str, Any], code: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        written_times({**TIMES, **changed}, "times.json")
    error = caught.value
    assert (f"config.{code}", f"times.json: {where}") == (error.code, error.where)
    assert all((error.expected, error.found is not None, error.fix))


@pytest.mark.parametrize("missing", TIMES)
def test_a_stage_without_a_time_is_named(missing: str) -> None:
    with pytest.raises(ConfigError) as caught:
        written_times({name: value for name, value in TIMES.items() if name != missing}, "times.json")
    assert ("config.missing-key", f"times.json: {missing}") == (caught.value.code, caught.value.where)


def step(number: int, **metrics: Any) -> dict[str, Any]:
    seconds = {"rollout": 8.0, "update_actor": 6.0, "old_log_probs": 1.0, "publish_weights": 0.5}
    own = {f"seconds/{name}": value for name, value in seconds.items()}
    return {"kind": "step", "step": number, **own, "waits/trainer/columns": 2.0, "staleness/max": 0.0, **metrics}


def run_folder(folder: Path, *lines: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_times_are_read_from_the_metrics_of_a_run_without_its_first_step(tmp_path: Path) -> None:
    slow = step(1, **{"seconds/rollout": 99.0})
    later = step(3, **{"seconds/rollout": 9.0})
    folder = run_folder(tmp_path / "run", {"kind": "evaluation", "score": 0.1}, slow, step(2), later)
    config = make_config({**RUN, "folder": str(folder)})
    for given in (None, str(folder), str(folder / "metrics.jsonl")):
        times, source = read_times(given, config)
        assert str(folder / "metrics.jsonl") == source
        assert [8.0, 9.0, 8.0] == [times.draw("generate", 0, batch, 0, 0) for batch in range(3)]
        drawn = {name: times.draw(name, 0, 0, 0, 0) for name in ("reward", "log_probs", "update", "sync")}
        assert {"reward": 2.0, "log_probs": 1.0, "update": 3.0, "sync": 0.5} == drawn, "two mini-batches per step"


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([step(1), step(2, **{"staleness/max": 1.0})], "invalid-value"),
        ([{"kind": "evaluation", "step": 0}], "missing-key"),
        ([{"kind": "step", "step": 1, "seconds/update_actor": 1.0}], "missing-key"),
        ([step(1, **{"seconds/rollout": None})], "wrong-type"),
        ([step(1, **{"seconds/rollout": -1.0})], "invalid-value"),
        ([[1]], "wrong-type"),
    ],
)
def test_metrics_that_have_no_times_are_refused(tmp_path: Path, lines: list[Any], code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_times(str(run_folder(tmp_path / "run", *lines)), make_config(RUN))
    assert f"config.{code}" == caught.value.code
    assert "metrics.jsonl" in str(caught.value.where)


# -- the command


def called(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["plan", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**RUN, "folder": str(tmp_path / "run")}))
    (tmp_path / "times.json").write_text(json.dumps(TIMES))
    return tmp_path / "run.yaml"


def test_the_command_prints_tables_and_json(file: Path) -> None:
    arguments = (file, "schedule.steps=10", "--times", file.with_name("times.json"), "--steps", 4)
    code, text = called(*arguments)
    assert 0 == code, text
    assert "trainer for rollouts: 100" in text
    code, output = called(*arguments, "--json")
    found = json.loads(output)
    assert (0, []) == (code, found["notes"])
    rows = [found["own"], *found["others"]]
    assert {each["name"] for each in rows} == set(names_of(text))
    assert sorted(each["step_time"] for each in found["others"]) == [each["step_time"] for each in found["others"]]
    assert {"replicas", "engine", "reward", "explorer"} == found["own"]["idle"].keys()
    assert all(0 <= share <= 1 for each in rows for share in each["idle"].values())
    assert "schedule.sync_offset=1" in found["best"]["overrides"], found["best"]
    assert text.rstrip().endswith(" ".join(found["best"]["overrides"]))


def names_of(text: str) -> list[str]:
    """The last column of the printed table."""
    lines = text.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("STEP "))
    at = lines[head].index("SCHEDULE")
    rows = lines[head + 1 : lines.index("", head)]
    return [line[at:] for line in rows if not line.startswith(("left out", "note"))]


def test_without_times_the_command_says_what_to_give(file: Path) -> None:
    code, text = called(file)
    assert 1 == code
    assert "[config.missing-key] there are no stage times to plan with at --times" in text
    assert "fix: write seconds of generate, reward, log_probs, update, sync" in text
    code, text = called(file, "--json")
    assert (1, "config.missing-key") == (code, json.loads(text)["error"]["code"])


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("times.json", "{", "config.unreadable"),
        ("times.json", "[1]", "config.wrong-type"),
        ("none.json", None, "config.missing-key"),
        ("none.jsonl", None, "config.missing-key"),
        ("folder", None, "config.missing-key"),
    ],
)
def test_files_that_cannot_be_read_are_named(file: Path, name: str, content: str | None, code: str) -> None:
    if content is not None:
        file.with_name(name).write_text(content)
    ended, text = called(file, "--times", file.with_name(name))
    assert 1 == ended
    assert code in text
    assert name in text


def test_wrong_usage_and_wrong_settings_have_their_exit_codes(file: Path) -> None:
    assert 2 == called(file, "--steps", 1)[0]
    assert 2 == called()[0]
    times = ("--times", file.with_name("times.json"))
    code, text = called(file, "schedule.max_staleness=1", *times)
    assert 1 == code
    assert "schedule.max_staleness" in text
    code, text = called(file, "schedule.until.score=1", *times)
    assert (1, True) == (code, "at evaluation.every" in text), text
    code, text = called(file, "queue.rewards=distributed", *times)
    assert (1, True) == (code, "--role" in text), text


def test_a_folder_without_metrics_has_no_times(file: Path) -> None:
    code, text = called(file, "--times", file.parent)
    assert (1, True) == (code, "[config.missing-key]" in text), text
    assert f"found: no {file.parent / 'metrics.jsonl'}" in text
