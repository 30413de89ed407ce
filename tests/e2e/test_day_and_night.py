"""Users are served and their answers kept; a run learns from them; its model is promoted while users go on asking."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors.torch import load_file, save_file

from jackfield_commands import CommandServer

from .test_collected import lines, ok, wait_until
from .test_modes import GRADED

pytestmark = pytest.mark.timeout(240)

Settings = Callable[..., list[str]]


def done(*arguments: object) -> tuple[int, str]:
    """Run a Python module; return its status and output."""
    texts = [sys.executable, *map(str, arguments)]
    ended = subprocess.run(texts, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout + ended.stderr


class Users(threading.Thread):
    """Ask all replicas in turn until they are ended; every answer has to come."""

    def __init__(self, urls: list[str], question: str) -> None:
        super().__init__()
        self.clients = [openai.OpenAI(base_url=url, api_key="none", max_retries=0) for url in urls]
        self.question, self.ending = question, threading.Event()
        self.failure: Exception | None = None
        self.versions: list[set[int]] = [set() for _ in urls]

    def run(self) -> None:
        try:
            while not self.ending.is_set():
                for number in range(len(self.clients)):
                    answer = self.ask(number, n=1)
                    self.versions[number].update(answer.choices[0].model_extra["weight_versions"])
        except Exception as error:
            self.failure = error

    def ask(self, number: int, n: int) -> Any:
        messages: Any = [{"role": "user", "content": self.question}]
        more = {"return_token_ids": True, "ignore_eos": True}
        chat = self.clients[number].chat.completions
        return chat.create(model="any", messages=messages, n=n, max_tokens=6, extra_body=more)

    def end_clients(self) -> None:
        for client in self.clients:
            client.close()

    def end(self) -> None:
        self.ending.set()
        self.join(60)
        self.end_clients()
        assert self.failure is None, self.failure


def test_from_a_day_to_the_next(
    jackfield: CommandServer, quickstart_settings: Settings, made: Path, tmp_path: Path
) -> None:
    day, served = tmp_path / "day", tmp_path / "served"
    question = json.loads((made / "problems.jsonl").read_text().splitlines()[0])["question"]
    address = f"rollout.openai={{collect: {day}}}"
    serving = jackfield.start("serve", *quickstart_settings("served", "cluster.replicas=2", address))
    users = None
    try:
        wait_until(serving, lambda: serving.out.count("\n") == 2)
        users = Users(serving.out.splitlines(), question)
        for number in (0, 1, 0, 1):  # the day: users ask for two answers and rate them
            answer = users.ask(number, n=2)
            for choice in answer.choices:
                body = {"id": answer.id, "index": choice.index, "reward": float(choice.index)}
                users.clients[number].post("/feedback", body=body, cast_to=object)
        users.ask(0, n=1)  # it gets no rating
        night = tmp_path / "night.jsonl"
        module = ("-m", "jackfield_openai.collecting", day, night, "--scored-only")
        while (found := done(*module)) != (0, f"8 samples in {night}\n"):
            assert found[0] == 0, found[1]
        users.start()  # the night: they go on asking
        small = ("data.groups_per_batch=2", "data.train=null", f"data.samples={night}", "mode=train", *GRADED)
        evaluated = ("evaluation.every=1", "evaluation.tasks=4", "optimizer.lr=1e-2", "optimizer.warmup_steps=0")
        ok(jackfield("run", *quickstart_settings("learned", *small, *evaluated)))
        run = tmp_path / "learned"
        assert [0.5] * 2 == [line["reward/mean"] for line in lines(run)]
        assert all(line["grad_norm"] > 0 for line in lines(run))
        refused = jackfield("promote", str(run), str(served), "--score", "1.5")
        assert 1 == refused.code
        assert "run.not-promoted" in refused.error
        assert not (served / "serve" / "promoted.json").exists()
        assert "as version 1" in ok(jackfield("promote", str(run), str(served), "--score", "0"))
        wait_until(serving, lambda: f"serving version 1: {run / 'model'}" in serving.out)
        for number in (0, 1):
            assert [1] * 6 == users.ask(number, n=1).choices[0].model_extra["weight_versions"]
        users.end()
        assert all(0 in versions for versions in users.versions), "they were served before"
    finally:
        if users is not None and users.is_alive():
            users.ending.set()
        serving.send(signal.SIGTERM)
    assert 128 + signal.SIGTERM == serving.wait().code, serving.error
    assert "ended" in serving.out


def finished_run(folder: Path, model: Path, score: float, *, of_step: int = 3) -> Path:
    """A folder that looks like a finished run of three steps, whose last evaluation was after ``of_step``."""
    shutil.copytree(model, folder / "model")
    (folder / "finished.json").touch()
    records = [{"kind": "step", "step": step} for step in (1, 2, 3)]
    records.append({"kind": "evaluation", "step": of_step, "score": score})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


def test_a_model_that_does_not_fit_is_not_served_and_a_restart_serves_the_promoted_one(
    jackfield: CommandServer, quickstart_settings: Settings, made: Path, tmp_path: Path
) -> None:
    trains = (
        "mode=offline",
        "algorithm.name=sft",
        "model.lora={rank: 2}",
        "sampling.temperature=0",
    )  # it has no effect
    command = ("serve", *quickstart_settings("served", "rollout.openai={}", *trains))
    other = finished_run(tmp_path / "other", made / "model", 0.9)
    weights = load_file(other / "model" / "model.safetensors")
    save_file({f"{name}.more": tensor for name, tensor in weights.items()}, other / "model" / "model.safetensors")
    serving = jackfield.start(*command)
    wait_until(serving, lambda: "/v1" in serving.out)
    ok(jackfield("promote", str(other), str(tmp_path / "served"), "--score", "0.9"))
    wait_until(serving, lambda: "version 1 is not served" in serving.error)
    users = Users(serving.out.split(), "Ben has 6 books.")
    assert [0] * 6 == users.ask(0, n=1).choices[0].model_extra["weight_versions"]
    good = finished_run(tmp_path / "good", made / "model", 0.9)
    ok(jackfield("promote", str(good), str(tmp_path / "served"), "--score", "0.9"))
    wait_until(serving, lambda: "serving version 2" in serving.out)
    assert [2] * 6 == users.ask(0, n=1).choices[0].model_extra["weight_versions"]
    users.end_clients()
    serving.send(signal.SIGKILL)
    serving.wait()
    serving = jackfield.start(*command)
    wait_until(serving, lambda: "serving version 2" in serving.out)
    users = Users(serving.out.split()[:1], "Ben has 6 books.")
    assert [2] * 6 == users.ask(0, n=1).choices[0].model_extra["weight_versions"]
    users.end_clients()
    serving.send(signal.SIGINT)
    assert 128 + signal.SIGINT == serving.wait().code


@pytest.mark.parametrize("lacks", ["score", "evaluation at the end", "model"])
def test_a_run_that_is_not_good_enough_is_not_promoted(
    jackfield: CommandServer, made: Path, tmp_path: Path, lacks: str
) -> None:
    run = finished_run(
        tmp_path / "run",
        made / "model",
        0.4 if lacks == "score" else 0.9,
        of_step=2 if lacks == "evaluation at the end" else 3,
    )
    if lacks == "model":
        (run / "finished.json").unlink()
    refused = jackfield("promote", str(run), str(tmp_path / "served"), "--score", "0.5")
    assert 1 == refused.code
    assert "run.not-promoted" in refused.error
    assert not (tmp_path / "served").exists()


def test_exploration_goes_on_with_a_promoted_model(
    jackfield: CommandServer, quickstart_settings: Settings, made: Path, tmp_path: Path
) -> None:
    """Samples say which model made each token; the queue has those of both models."""
    small = ("data.groups_per_batch=2", "data.rollouts_per_group=2", *GRADED)
    ends = ("schedule.steps=4000", "checkpoint.every=1000", "schedule.rollouts_in_flight=2")
    exploring = jackfield.start("serve", "--explore", *quickstart_settings("explored", *small, *ends))
    explored = tmp_path / "explored"
    wait_until(exploring, lambda: (explored / "metrics.jsonl").exists() and len(lines(explored)) > 1)
    good = finished_run(tmp_path / "good", made / "model", 0.9)
    ok(jackfield("promote", str(good), str(explored), "--score", "0.9"))
    wait_until(exploring, lambda: "serving version 1" in exploring.out)
    there = len(lines(explored))
    wait_until(exploring, lambda: len(lines(explored)) > there + 4)
    exploring.send(signal.SIGTERM)
    assert 128 + signal.SIGTERM == exploring.wait().code, exploring.error
    ok(jackfield("queue", "export", str(explored), str(tmp_path / "rows.jsonl")))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {0, 1} == {row["tags"]["weight_version_min"] for row in rows if "weight_version_min" in row["tags"]}


def test_replicas_without_an_address_are_refused(jackfield: CommandServer, quickstart_settings: Settings) -> None:
    refused = jackfield("serve", *quickstart_settings("served"))
    assert 1 == refused.code
    assert "rollout.openai" in refused.error


def test_replicas_in_a_ray_cluster_take_over_a_promoted_model(
    jackfield: CommandServer,
    quickstart_settings: Settings,
    ray_environment: dict[str, str],
    ray_interpreters: str,
    made: Path,
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray")
    ray = ("cluster.name=ray", "cluster.ray.num_cpus=2", "cluster.ray.object_store_bytes=200000000", ray_interpreters)
    settings = quickstart_settings("served", *ray, "cluster.replicas=2", "rollout.openai={}")
    serving = jackfield.start("serve", *settings, environment=ray_environment)
    wait_until(serving, lambda: serving.out.count("/v1") == 2)
    users = Users(serving.out.split(), "Ben has 6 books.")
    assert [0] * 6 == users.ask(1, n=1).choices[0].model_extra["weight_versions"]
    good = finished_run(tmp_path / "good", made / "model", 0.9)
    ok(jackfield("promote", str(good), str(tmp_path / "served"), "--score", "0.9"))
    wait_until(serving, lambda: "serving version 1" in serving.out)
    for number in (0, 1):
        assert [1] * 6 == users.ask(number, n=1).choices[0].model_extra["weight_versions"]
    users.end_clients()
    serving.send(signal.SIGTERM)
    assert 128 + signal.SIGTERM == serving.wait().code
