"""Code that the model writes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from .conftest import Worker, call, with_tools


def test_code_runs_apart_and_its_end_is_told(tmp_path: Path) -> None:
    """Output, errors, exit status, deadlines; each call starts afresh, and no file is left."""
    settings: dict[str, Any] = {
        "python": {"sandbox": {"isolation": "none", "preamble": "import math"}, "seconds": 20.0},
        "shell": {"sandbox": {"isolation": "none", "language": "shell"}, "concurrency": 1},
        "short": {"sandbox": {"isolation": "none"}, "seconds": 0.5, "concurrency": 1},
    }

    async def work(worker: Worker) -> Any:
        tools = worker.rollout()
        return [
            await call(tools, "python", code="x = 6\nprint(math.floor(x * 7.5))"),
            await call(tools, "python", code="print(x)"),
            await call(tools, "shell", code="echo $((6 * 7)); exit 3"),
            await call(tools, "short", code="print(1, flush=True)\nwhile True: pass"),
            await call(tools, "python", code=3),
            await call(tools, "python"),
        ]

    before = set(os.listdir(tempfile.gettempdir()))
    good, fresh, shell, late, wrong, missing = with_tools(tmp_path, settings, work)
    assert (False, "45") == (good.is_error, good.text)
    assert fresh.is_error
    assert "NameError: name 'x' is not defined" in fresh.text
    assert (True, "42\n[it ended with exit status 3]") == (shell.is_error, shell.text)
    assert (True, "1\n[it ran longer than 0.5 s]") == (late.is_error, late.text)
    assert wrong.is_error
    assert missing.is_error
    left = {name for name in set(os.listdir(tempfile.gettempdir())) - before if name.startswith("jackfield-tool-")}
    assert set() == left


def test_the_best_isolation_of_the_machine_is_used(tmp_path: Path) -> None:
    """`auto` takes at least `limits`: code does not get more memory than it may have."""
    settings = {"python": {"sandbox": {"memory_bytes": 2**28}, "concurrency": 1}}

    async def work(worker: Worker) -> Any:
        [source] = worker.toolbox._sources
        return source.level, await call(worker.rollout(), "python", code="print(len(bytes(2**29)))")  # type: ignore[attr-defined]

    level, result = with_tools(tmp_path, settings, work)
    assert level in ("limits", "filters", "namespaces")
    assert result.is_error
    assert "MemoryError" in result.text
