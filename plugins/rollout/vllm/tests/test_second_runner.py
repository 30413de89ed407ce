"""The plugin keeps its contract on vLLM's second model runner, which vLLM takes on GPUs, and returns experts by it.

That runner's kernels are written in Triton. Triton's interpreter computes them on a CPU, slowly and by numpy; so this
says what the plugin and vLLM do together, and nothing about the kernels on a GPU. The environment: see
``environment.yaml`` beside this file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.engine import ModelSpec
from jackfield_conformance.registry import Check, Subject, run_check
from jackfield_conformance.registry import checks as registered
from jackfield_conformance.support.rollout_experts import mixture_folder
from jackfield_conformance.support.rollout_model import model_folder
from jackfield_kept_process import KeptRolloutProcess
from jackfield_rollout_vllm.config import Config

from .conftest import Kept, install
from .test_vllm import CAPABILITIES, applicable

# the first one waits for vLLM
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.shared_interpreter,
    pytest.mark.needs("vllm"),
    pytest.mark.timeout(400),
]

#: vLLM wants a driver of Triton's for CPUs; with the interpreter there is nothing that it would do.
SITE = """\
import types
from triton.backends import backends
driver = type("Driver", (), {"is_active": staticmethod(lambda: False)})
backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)
"""
EXPERTS = ("ROL-120", "ROL-121")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """vLLM with its second model runner."""
    site = tmp_path_factory.mktemp("second")
    (site / "sitecustomize.py").write_text(SITE)
    KeptRolloutProcess.end_all()
    found = install(site, {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"})
    models = [ModelSpec(path=mixture_folder(), dtype="float32", router_replay=each) for each in (True, False)]
    asyncio.run(found.warm_up(ModelSpec(path=model_folder()), *models))
    yield found
    KeptRolloutProcess.end_all()


def chosen() -> list[Any]:
    """What the plugin has to pass, and the checks of experts."""
    experts = [pytest.param(check, id=check.id) for check in registered("rollout") if check.id in EXPERTS]
    return [*(each for each in applicable() if each.id not in EXPERTS), *experts]


@pytest.mark.parametrize("check", chosen())
def test_the_contract_holds(check: Check, second: Kept, tmp_path: Path) -> None:
    subject = Subject(
        kind="rollout",
        name="vllm_kept",
        cls=lambda _, context: second.server(context),
        config=Config(),
        config_class=Config,
        capabilities={**CAPABILITIES, "router_replay": "full"},
        fixture={"checkpoint_engine": "shared"},
        folder=tmp_path,
    )
    outcome = run_check(check, subject)
    assert "passed" == outcome.status, outcome.message
