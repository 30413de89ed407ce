"""What the tests of the sandbox share: the levels that hold here, and samples that are scored."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from jackfield.abc.reward import RewardContext, ScoreRequest, ScoreResult
from jackfield.sdk import structure
from jackfield_reward_sandbox.reward import SandboxReward
from jackfield_reward_sandbox.settings import Config
from jackfield_sandbox import _confinement
from jackfield_sandbox.box import LEVELS, attempt

Sample = tuple[str, Any]  #: code, and tests
Run = Callable[..., list[ScoreResult]]


def _python() -> str | None:
    """The interpreter of the weaker levels: as root, one that other users can read."""
    folders = Path(os.path.realpath(sys.executable)).parents
    readable = all(folder.stat().st_mode & stat.S_IXOTH for folder in folders)
    return None if os.geteuid() or readable else shutil.which("python3", path="/usr/local/bin:/usr/bin")


@functools.cache
def settings_of(level: str) -> dict[str, Any]:
    """Settings for a level of isolation."""
    return {"isolation": level, "python": None if level == "namespaces" else _python()}


@functools.cache
def held() -> list[str]:
    """The levels that this machine allows."""
    found = []
    for level in LEVELS[1:]:
        config = structure(Config, settings_of(level))
        if attempt(level, {**attrs.asdict(config), "program": "main.py"}, tempfile.gettempdir()) is None:
            found.append(level)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests of a level at each that this machine allows."""
    if "level" in metafunc.fixturenames:
        metafunc.parametrize("level", held())


@pytest.fixture
def isolated(level: str) -> dict[str, Any]:
    """Settings for a level of isolation; the test runs at each level that this machine allows."""
    return settings_of(level)


@pytest.fixture
def levels() -> list[str]:
    """The levels that this machine allows."""
    return held()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Score samples with the settings given; afterwards no process and no file may be left."""
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o711)
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setenv("JACKFIELD_SECRET_OF_A_TEST", "s3cr3t")
    _confinement.control("subreaper", 1)

    def score(samples: Sequence[Sample], extra: dict[str, Any] | None = None, **settings: Any) -> list[ScoreResult]:
        async def main() -> list[ScoreResult]:
            agent = SandboxReward(structure(Config, settings), RewardContext())
            await agent.start()
            try:
                requests = [as_request(code, tests, extra) for code, tests in samples]
                return list(await asyncio.gather(*map(agent.compute_score, requests)))
            finally:
                await agent.close()

        return asyncio.run(main())

    yield score
    wait_for_all()
    assert [] == [name for name in os.listdir(folder) if name.startswith("jackfield-sandbox")]
    shutil.rmtree(folder)
    _confinement.control("subreaper", 0)


def as_request(code: str, tests: Any, extra: dict[str, Any] | None = None) -> ScoreRequest:
    """A request whose response is a block of code."""
    truth = tests if isinstance(tests, str) else json.dumps(tests)
    solution = f"So:\n```python\n{code}\n```\n"
    return ScoreRequest(data_source="code", solution_str=solution, ground_truth=truth, extra_info=extra or {})


def wait_for_all() -> None:
    """Wait until every descendant of this process has ended; one that does not end is the test's time limit."""
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        return
