"""The GPU tier without a GPU: all stages run with tiny sizes, and one that fails does not end the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import gpu
from jackfield_commands import CommandServer
from packages import ROOT, discover


def run(jackfield: CommandServer, folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the tool in a folder; return its exit code and its results."""
    command = [str(ROOT / "tools" / "gpu.py"), "--work", str(folder), *arguments]
    done = jackfield.start(*command, program="python").wait(580)
    assert (folder / "results.json").is_file(), done.error
    return done.code, json.loads((folder / "results.json").read_text(encoding="utf-8"))["stages"]


@pytest.mark.timeout(600)
def test_all_stages_run_without_a_gpu(jackfield: CommandServer, tmp_path: Path) -> None:
    code, stages = run(jackfield, tmp_path, "--device", "cpu", "--small")
    assert list(gpu.STAGES) == list(stages)
    assert (0, {}) == (code, {name: found for name, found in stages.items() if found["status"] == "failed"})
    assert {"trl"} >= {name for name, found in stages.items() if found["status"] == "skipped"}
    training, run_ = stages["training"]["result"], stages["grpo"]["result"]
    assert training["fsdp"]["mfu"] > 0
    assert min(training["fsdp"]["tokens_per_second"], training["plain"]["tokens_per_second"]) > 0
    assert {"generate", "update_actor"} <= run_["stages"].keys() or run_["stages"]
    assert stages["engine_conformance"]["result"]["engine:fsdp"]["passed"] > 2


def test_a_stage_that_fails_is_reported_and_the_next_one_runs(jackfield: CommandServer, tmp_path: Path) -> None:
    """There is no GPU of this number: one stage fails, another one says why it is skipped."""
    code, stages = run(jackfield, tmp_path, "--device", "cuda:99", "--stage", "environment", "--stage", "trl")
    assert (1, ["failed", "skipped"]) == (code, [found["status"] for found in stages.values()])
    assert stages["environment"]["error"]
    assert stages["trl"]["reason"]


@pytest.mark.parametrize(
    ("body", "told"),
    [("os._exit(3)", "ended with 3"), ("threading.Event().wait()", "no end within"), ("1 / 0", "ZeroDivisionError")],
    ids=["dies", "hangs", "raises"],
)
def test_a_stage_that_ends_badly_is_named(tmp_path: Path, body: str, told: str) -> None:
    program = (
        "import gpu, os, sys, threading, types, pathlib\n"
        f"def environment(plan):\n    {body}\n"
        "sys.modules['gpu_stages'] = types.SimpleNamespace(\n"
        "    environment=environment, Plan=lambda **fields: fields, Skipped=type('Skipped', (Exception,), {}))\n"
        "gpu.STAGES['environment'] = 0.5 if 'Event' in sys.argv[2] else 60.0\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "print(gpu.run_stage('environment', {}, folder))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), body]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=True)
    assert told in done.stdout


def test_packages_are_found_in_their_sources_and_only_missing_wheels_are_used(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    for name in ("nowhere_else", "attrs"):
        with zipfile.ZipFile(tmp_path / "wheels" / f"{name}-9.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    path = gpu.source_path(tmp_path / "wheels", tmp_path / "work")
    assert ["nowhere_else"] == [each.name for each in Path(path[-1]).iterdir()]
    assert {str(package.source) for package in discover().values()} <= set(path)
    program = "from jackfield.plugins import discover; print([r.name for r in discover().records() if not r.error])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "'fsdp'" in done.stdout
