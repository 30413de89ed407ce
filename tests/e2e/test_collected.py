"""Exploring without a trainer, and training without explorers on what was collected."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield.queue import effective_acks, read_ledger
from jackfield_commands import Command, CommandServer

from .conftest import metrics
from .test_modes import GRADED, INVARIANT, steps

pytestmark = pytest.mark.timeout(240)

Settings = Callable[..., list[str]]
SMALL = ("data.groups_per_batch=2", "data.rollouts_per_group=2", "sampling.max_new_tokens=4", INVARIANT, *GRADED)


def lines(folder: Path) -> list[dict[str, Any]]:
    return steps(metrics(folder))


def trained(folder: Path) -> dict[str, list[int]]:
    """The steps at which the trainer was done with each sample."""
    found: dict[str, list[int]] = {}
    for entry in read_ledger(folder):
        if entry["event"] == "ack" and entry["consumer"] == "trainer":
            for key in entry["keys"]:
                found.setdefault(key, []).append(entry["step"])
    return found


def ok(done: Any) -> str:
    assert 0 == done.code, done.out + done.error
    return str(done.out)


def collect(jackfield: CommandServer, settings: Settings, *more: str) -> str:
    return ok(jackfield("run", *settings("collected", "mode=explore", *SMALL, *more)))


def wait_until(command: Command, done: Callable[[], bool]) -> None:
    while not done():
        assert command.running, command.out + command.error
        time.sleep(0.01)


def test_explore_fills_a_folder_and_train_learns_from_it_in_epochs(
    jackfield: CommandServer, quickstart_settings: Settings, tmp_path: Path
) -> None:
    """Three batches of two groups are collected without an engine; two epochs of them are six steps."""
    said = collect(jackfield, quickstart_settings)
    assert "3 batches of samples" in said
    assert not (tmp_path / "collected" / "model").exists()
    assert [4.0] * 3 == [line["samples"] for line in lines(tmp_path / "collected")]
    assert [] == [name for line in lines(tmp_path / "collected") for name in line if "stale" in name], "no step trains"
    exported = tmp_path / "rows.jsonl"
    ok(jackfield("queue", "export", str(tmp_path / "collected"), str(exported)))
    rows = [json.loads(line) for line in exported.read_text().splitlines()]
    assert 12 == len(rows)
    assert all({"reward", "rollout_log_probs", "task"} <= row["columns"].keys() for row in rows)
    for name, samples in (("from_run", tmp_path / "collected"), ("from_rows", exported)):
        more = (f"data.samples={samples}", "data.train=null", "data.epochs=2", "schedule.steps=100")
        ok(jackfield("run", *quickstart_settings(name, "mode=train", *SMALL, *more)))
        uses = trained(tmp_path / name)
        assert {2} == set(map(len, uses.values())), "each sample twice"
        assert 12 == len(uses)
        assert all(first < 3 <= second for first, second in uses.values()), "an epoch is over before the next begins"
        assert 6 == len(lines(tmp_path / name))
        assert (tmp_path / name / "model" / "model.safetensors").is_file()
    assert any(line["grad_norm"] > 0 for line in lines(tmp_path / "from_run"))
    generated = [
        [line.get("generated/samples") for line in lines(tmp_path / name)] for name in ("collected", "from_run")
    ]
    assert [[4.0] * 3, [None] * 6] == generated, "nothing is generated in mode train"
    again = ok(jackfield("run", *quickstart_settings(name, "mode=train", *SMALL, *more)))
    assert "holds the finished run" in again


def test_the_rewards_that_are_missing_are_scored(
    jackfield: CommandServer, quickstart_settings: Settings, tmp_path: Path
) -> None:
    """Samples with a task and no reward are rewarded before they are trained on."""
    collect(jackfield, quickstart_settings, "schedule.steps=2")
    exported = tmp_path / "rows.jsonl"
    ok(jackfield("queue", "export", str(tmp_path / "collected"), str(exported)))
    rows = [json.loads(line) for line in exported.read_text().splitlines()]
    rewards = [row["columns"].pop("reward") for row in rows]
    expected = sum(sum(each) if isinstance(each, list) else each for each in rewards)
    for row in rows:
        del row["types"]["reward"]
    exported.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = (f"data.samples={exported}", "data.train=null", "observe.samples_per_step=8")
    ok(jackfield("run", *quickstart_settings("train", "mode=train", *SMALL, *more)))
    found = lines(tmp_path / "train")
    assert expected == pytest.approx(sum(line["reward/mean"] * line["samples"] for line in found))
    del rows[0]["columns"]["task"], rows[0]["types"]["task"]
    exported.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused = jackfield("run", *quickstart_settings("refused", "mode=train", *SMALL, *more))
    assert 1 == refused.code
    assert "data.samples" in refused.error
    assert "reward" in refused.error


@pytest.mark.parametrize("mode", ["explore", "train"])
def test_kill_and_the_same_command_goes_on(
    jackfield: CommandServer, quickstart_settings: Settings, tmp_path: Path, mode: str
) -> None:
    more: tuple[str, ...] = ("schedule.steps=8", "checkpoint.every=1")
    if mode == "train":
        collect(jackfield, quickstart_settings, "schedule.steps=4")
        more = (*more, f"data.samples={tmp_path / 'collected'}", "data.epochs=2")
    command = ("run", *quickstart_settings("killed", f"mode={mode}", *SMALL, *more))
    first = jackfield.start(*command)
    wait_until(first, lambda: (tmp_path / "killed" / "checkpoints" / "step_00000002" / "manifest.json").exists())
    first.send(signal.SIGKILL)
    first.wait()
    ok(jackfield(*command))
    numbers = [line["step"] for line in lines(tmp_path / "killed")]
    assert set(range(1, 9)) == set(numbers)
    if mode == "train":
        acks = effective_acks(list(read_ledger(tmp_path / "killed")))["trainer"]
        assert {4, 5, 6, 7} == set(acks.values()), "the last use of each sample is in the second epoch"
        uses = trained(tmp_path / "killed")
        assert 16 == len(uses)
    else:
        exported = tmp_path / "rows.jsonl"
        ok(jackfield("queue", "export", str(tmp_path / "killed"), str(exported)))
        rows = [json.loads(line) for line in exported.read_text().splitlines()]
        assert Counter(dict.fromkeys(range(8), 4)) == Counter(row["batch"] for row in rows)
        assert 32 == len({row["key"] for row in rows})


def test_limits_end_a_run_and_higher_ones_continue_it(
    jackfield: CommandServer, quickstart_settings: Settings, tmp_path: Path
) -> None:
    """A run of at most 100 steps ends with the step that reaches a limit."""
    command = ("run", *quickstart_settings("limited", *SMALL, "schedule.steps=100", "evaluation.tasks=2"))
    ok(jackfield(*command, "schedule.until.samples=9"))
    assert [1, 2, 3] == [line["step"] for line in lines(tmp_path / "limited")]
    assert "holds the finished run" in ok(jackfield(*command, "schedule.until.samples=9"))
    ok(jackfield(*command, "schedule.until.samples=16"))
    assert [1, 2, 3, 4] == [line["step"] for line in lines(tmp_path / "limited")]
    ok(jackfield(*command, "schedule.until.reward=-1"))
    assert 5 == lines(tmp_path / "limited")[-1]["step"]
    ok(jackfield(*command, "schedule.until.score=-1", "evaluation.every=1"))
    assert 6 == lines(tmp_path / "limited")[-1]["step"]
    ok(jackfield(*command, "schedule.until.samples=20"))
    assert 6 == lines(tmp_path / "limited")[-1]["step"], "more samples were used before"
    score = ("evaluation.every=1", "evaluation.tasks=2", "schedule.until.score=-1")
    ok(jackfield("run", *quickstart_settings("other", *SMALL, *score)))
    assert [1] == [line["step"] for line in lines(tmp_path / "other")], "the score before the first step does not count"
    ok(jackfield("run", *quickstart_settings("third", *SMALL, "schedule.until.device_seconds=0.001")))
    assert [1] == [line["step"] for line in lines(tmp_path / "third")]


def test_a_served_queue_is_filled_and_then_trained_on(
    jackfield: CommandServer, quickstart_settings: Settings, tmp_path: Path
) -> None:
    """Two processes fill it; a trainer without explorers learns from it, also after it was killed."""
    served = f"queue.address={tmp_path / 'queue' / 'queue' / 'address.json'}"
    durable = ("transfer_queue.name=sql", "queue.durable=true")
    explore = (served, "mode=explore", "schedule.steps=8", *durable, *SMALL)
    controller = jackfield.start("queue", "serve", *quickstart_settings("queue", *explore[1:]))
    try:
        wait_until(controller, lambda: "is served" in controller.out)
        main = jackfield.start("run", *quickstart_settings("filled", *explore))
        more = jackfield.start("run", "--role", "explore", *quickstart_settings("more", *explore))
        ok(main.wait())
        ok(more.wait())
        assert [4.0] * 8 == [line["samples"] for line in lines(tmp_path / "filled")]
        ok(jackfield("run", *quickstart_settings("filled", *explore, "schedule.steps=9")))
        assert [4.0] * 9 == [line["samples"] for line in lines(tmp_path / "filled")], "it goes on with more"
        train = (served, "mode=train", "checkpoint.every=1", "data.epochs=2", "schedule.steps=100", *durable, *SMALL)
        command = ("run", *quickstart_settings("train", *train))
        first = jackfield.start(*command)
        wait_until(first, lambda: (tmp_path / "train" / "checkpoints" / "step_00000003" / "manifest.json").exists())
        first.send(signal.SIGKILL)
        first.wait()
        ok(jackfield(*command))
        assert set(range(1, 19)) == {line["step"] for line in lines(tmp_path / "train")}
        acks = effective_acks(list(read_ledger(tmp_path / "queue")))["trainer"]
        assert dict.fromkeys(range(9, 18), 4) == Counter(acks.values())
        assert all(line["staleness/max"] == line["step"] - 1 for line in lines(tmp_path / "train"))
    finally:
        controller.send(signal.SIGTERM)
        controller.wait()


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        (("mode=explore", "--role=train"), "mode"),
        (("mode=train", "--role=explore"), "mode"),
        (("mode=train", "data.samples=absent"), "absent"),
        (("mode=train",), "data.samples"),
        (("mode=explore", "schedule.mode=async"), "schedule.mode"),
        (("mode=explore", "checkpoint.at_end=false"), "checkpoint.at_end"),
        (("mode=explore", "queue.max_bytes=100"), "queue.max_samples"),
        (("mode=explore", "schedule.until.reward=1"), "schedule.until.reward"),
        (("mode=explore", "queue.archive=kept"), "queue.archive"),
        (("mode=explore", "schedule.sync_offset=1"), "schedule.sync_offset"),
        (("mode=explore", "mixing.replay.ratio=0.5"), "mixing.replay"),
        (("schedule.until.score=1",), "evaluation.every"),
        (("data.train=null",), "data.train"),
        (("cluster.max_model_len=8", "data.max_prompt_tokens=5"), "data.max_prompt_tokens"),
        (("queue.rewards=distributed",), "queue.rewards"),
        (("weights.kind=delta", "--role=explore"), "weights.kind"),
        (("weights.in_turns=true", "cluster.placement=shared", "cluster.replicas=2"), "weights.in_turns"),
        (("schedule.on_stale=drop",), "schedule.on_stale"),
        (("data.epochs=2",), "data.epochs"),
        (("algorithm.shaping={overlong_length: 4, overlong_buffer: 6}",), "algorithm.shaping.overlong_buffer"),
        (("mode=train", "data.samples=x", "mixing.replay={ratio: 1}"), "mixing.replay"),
        (("cluster.placement=separate", "cluster.offload=true"), "cluster.offload"),
        (("mode=train", "schedule.stream_mini_batches=true", "data.samples=x"), "schedule.stream_mini_batches"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_by_name(
    jackfield: CommandServer, quickstart_settings: Settings, tmp_path: Path, settings: tuple[str, ...], where: str
) -> None:
    options = [each for each in settings if each.startswith("--")]
    chosen = [each for each in settings if not each.startswith("--")]
    arguments = [*options, *quickstart_settings("refused", *SMALL, *chosen)]
    refused = jackfield("run", *arguments)
    assert 1 == refused.code
    assert where in refused.error
    assert "\n  expected: " in refused.error
    assert "\n  fix: " in refused.error
    for command in ("validate", "explain") if where != "absent" else ():  # a folder's content is the run's to check
        checked = jackfield("config", command, *arguments)
        assert (1, refused.error) == (checked.code, checked.error), "they refuse what the run refuses"
    assert not (tmp_path / "refused").exists()


def test_an_archive_is_trained_on(jackfield: CommandServer, quickstart_settings: Settings, tmp_path: Path) -> None:
    """What a training run consumed and kept is trained on again, by another algorithm, without its first policy."""
    archive = tmp_path / "archive"
    ok(jackfield("run", *quickstart_settings("first", *SMALL, f"queue.archive={archive}")))
    learns = ("mode=train", f"data.samples={archive}", "data.train=null", "algorithm.name=rloo", "schedule.steps=50")
    ok(jackfield("run", *quickstart_settings("second", *SMALL, *learns)))
    first, second = lines(tmp_path / "first"), lines(tmp_path / "second")
    assert [4.0] * 3 == [line["samples"] for line in second]
    rewards = [sum(line["reward/mean"] for line in each) for each in (first, second)]
    assert rewards[0] == pytest.approx(rewards[1])
