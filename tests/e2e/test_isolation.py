"""A run whose engine and rollout server live in two environments with pins that exclude each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("ray")

import environment  # of tools/

from .conftest import QUICKSTART, ROOT, metrics
from .test_modes import GRADED, steps

pytestmark = pytest.mark.timeout(900)  # uv installs torch twice, where the environments are not there yet

GUIDE = QUICKSTART.parent / "guides" / "two_environments.yaml"  #: what the guide shows
JACKFIELD = Path(sys.executable).with_name("jackfield")


def test_engine_and_rollout_server_with_conflicting_pins(
    made: Path, tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    """From its file alone: each environment is made, the doctor looks at both, and after every sync they agree on the
    log-probabilities of the probe.

    The environments stay where they are: another run of the tests installs again only what has changed. They take torch
    from the same index as ``.venv``, and from uv's cache, which lies in the home folder.
    """
    config = yaml.safe_load(GUIDE.read_text())
    config |= {"folder": str(tmp_path / "run"), "model": {"path": str(made / "model")}}
    config["data"]["train"] = str(made / "problems.jsonl")
    for name, described in config["environments"].items():
        described |= {"folder": str(ROOT / "environments" / f"test-{name}"), "installer": "uv"}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))

    cache = subprocess.check_output([environment.UV, "cache", "dir"], text=True, timeout=60).strip()
    variables = {**ray_environment, **environment.installer_settings(), "UV_CACHE_DIR": cache}

    def jackfield(*arguments: str) -> str:
        command = [JACKFIELD, *arguments]
        done = subprocess.run(
            command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False
        )
        assert 0 == done.returncode, (done.stdout + done.stderr)[-4000:]
        return done.stdout

    for name, kind in (("training", "engine"), ("serving", "rollout")):
        assert f"ok      {kind}" in jackfield("env", "create", name, str(file))
    report = json.loads(jackfield("plugins", "doctor", "--config", str(file), "--json"))
    pythons = {str(ROOT / "environments" / f"test-{name}" / "bin" / "python") for name in ("training", "serving")}
    assert pythons <= {row["path"] for row in report["interpreters"]}
    script = "import importlib.metadata as m; print(m.version('transformers'))"
    versions = {subprocess.check_output([python, "-c", script], text=True, timeout=60) for python in pythons}
    assert {"5.19.0\n", "5.23.0\n"} == versions

    jackfield("run", str(file), *GRADED, "observe.progress=false")
    done = steps(metrics(tmp_path / "run"))
    assert [1, 2, 3] == [line["step"] for line in done]
    assert all(line["grad_norm"] > 0 and line["log_prob_check/replica/mean"] < 1e-4 for line in done)
