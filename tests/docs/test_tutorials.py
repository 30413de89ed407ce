"""The tutorials work when they are followed to the letter: files as shown, commands as shown, in their order.

Two things differ: ``pip install --editable`` installs into a folder on the path, so that this environment stays as it
is, and the quickstart's warm-up is shorter. A line below a command is one that the command prints.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackfield.compose import run
from jackfield.config import load_config
from jackfield_commands import CommandServer

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = REPOSITORY / "examples" / "quickstart"
PAGES = sorted(path for path in (REPOSITORY / "docs" / "tutorials").glob("*.md") if path.stem != "index")
STEP = re.compile(r"^```(?:\{code-block\} \w+\n:caption: (\S+)\n\n|console\n)(.*?)^```$", re.MULTILINE | re.DOTALL)
PORT = 8765  #: of the page's server


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``make quickstart`` leaves, with a fifth of its SFT."""
    folder = tmp_path_factory.mktemp("quickstart")
    sys.path.insert(0, str(QUICKSTART))
    try:
        from make_task import EASY, make_task
    finally:
        sys.path.remove(str(QUICKSTART))
    make_task(folder / "made", 1, difficulty=EASY)
    settings = {
        "folder": folder / "warmup",
        "model.path": folder / "made" / "model",
        "data.train": folder / "made" / "demonstrations.jsonl",
        "schedule.steps": 40,
        "evaluation.every": 0,
        "observe.progress": "false",
    }
    run(load_config(QUICKSTART / "warmup.yaml", [f"{name}={value}" for name, value in settings.items()]))
    return folder


class Reader:
    """Someone who follows a page in a folder."""

    def __init__(self, folder: Path, jackfield: CommandServer) -> None:
        self.folder, self._jackfield = folder, jackfield
        self.environment = {"PYTHONPATH": str(folder / "site"), "JACKFIELD_CERTIFICATES": str(folder / "certificates")}
        self.servers: list[subprocess.Popen[bytes]] = []

    def follow(self, command: str) -> str:
        """Do what a line says; return what it prints."""
        words = shlex.split(command)
        if words[0] == "jackfield":
            done = self._jackfield(*words[1:], environment=self.environment, folder=self.folder, seconds=250)
            assert 0 == done.code, f"{command}\n{done.out}{done.error}"
            return done.out + done.error
        if words[-1] == "&":
            return self._serve(words[:-1])
        if words[0] == "pip":
            assert "--editable" in words
            words[words.index("--editable")] = "--target=site"
            words = [sys.executable, "-m", *words]
        elif words[0] == "python":
            words[0] = sys.executable
        environment = {**os.environ, **self.environment}
        done = subprocess.run(
            words, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert 0 == done.returncode, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _serve(self, words: list[str]) -> str:
        assert words[0] == "python"
        self.servers.append(subprocess.Popen([sys.executable, *words[1:]], cwd=self.folder))
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", PORT)) == 0:
                    return ""
        raise AssertionError(f"{words} does not listen on port {PORT}")


@pytest.fixture
def reader(tmp_path: Path, quickstart: Path, jackfield: CommandServer) -> Iterator[Reader]:
    """In a folder like the repository's root after ``make quickstart``."""
    for name in ("examples", "docs"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").symlink_to(quickstart)
    (tmp_path / "certificates").mkdir()
    found = Reader(tmp_path, jackfield)
    yield found
    for server in found.servers:
        server.kill()
        server.wait()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_can_be_followed(page: Path, reader: Reader) -> None:
    steps = STEP.findall(page.read_text(encoding="utf-8"))
    assert any(name for name, _ in steps)
    assert any(not name for name, _ in steps)
    for name, text in steps:
        if name:
            (reader.folder / name).write_text(text, encoding="utf-8")
            continue
        shown, printed = "", ""
        for line in text.splitlines():
            if line.startswith("$ "):
                shown, printed = line, reader.follow(line.removeprefix("$ "))
            else:
                assert line in printed.splitlines(), f"{shown} prints\n{printed}"
