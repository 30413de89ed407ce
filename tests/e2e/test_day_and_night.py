"""Users are served and their answers kept; a run learns from them; its model is promoted while users go on asking."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from jackfield_commands import CommandServer

from .conftest import ROOT
from .test_collected import lines, ok
from .test_modes import GRADED

pytestmark = pytest.mark.timeout(240)

Settings = Callable[..., list[str]]
GUIDES = ROOT / "examples" / "guides"


def command(*arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    texts = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(texts, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def done(*arguments: object) -> tuple[int, str]:
    process = command(*arguments)
    out, error = process.communicate(timeout=60)
    return process.returncode, out + error


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

    def end(self) -> None:
        self.ending.set()
        self.join(60)
        for client in self.clients:
            client.close()
        assert self.failure is None, self.failure


def test_from_a_day_to_the_next(
    jackfield: CommandServer, quickstart_settings: Settings, made: Path, tmp_path: Path
) -> None:
    day, promoted = tmp_path / "day", tmp_path / "promoted.json"
    question = json.loads((made / "problems.jsonl").read_text().splitlines()[0])["question"]
    serving = command(GUIDES / "serve_day_and_night.py", made / "model", "--collect", day, "--promoted", promoted)
    assert serving.stdout is not None
    users = None
    try:
        users = Users([serving.stdout.readline().strip() for _ in range(2)], question)
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
        code, said = done(GUIDES / "promote.py", run, promoted, "--score", "1.5")
        assert (1, True) == (code, "not promoted" in said), said
        assert not promoted.exists()
        code, said = done(GUIDES / "promote.py", run, promoted, "--score", "0")
        assert (0, True) == (code, "as version 1" in said), said
        assert f"serving version 1: {run / 'model'}\n" == serving.stdout.readline()
        for number in (0, 1):
            assert [1] * 6 == users.ask(number, n=1).choices[0].model_extra["weight_versions"]
        users.end()
        assert all(0 in versions for versions in users.versions), "they were served before"
    finally:
        if users is not None and users.is_alive():
            users.ending.set()
        serving.send_signal(signal.SIGINT)
        _, error = serving.communicate(timeout=60)
    assert (0, "") == (serving.returncode, error)
