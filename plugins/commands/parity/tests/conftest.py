"""An engine that is wrong in a chosen way, installed for a test."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_ENGINE = '''
import os

import attrs
import torch

from jackfield.sdk import option
from jackfield_engine_fsdp.engine import FSDPEngine
from parity_mutant.config import Config


class Mutant(FSDPEngine):
    """An engine that is right but for one thing."""

    def __init__(self, config, context):
        super().__init__(config, context)
        self._wrong = config.wrong

    def initialize(self):
        if self._wrong == "dies":
            os._exit(9)
        super().initialize()

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        def halved(output, rows):
            loss, metrics = loss_function(output, rows)
            return loss * (0.999 if self._wrong == "loss" else 1.0), metrics

        output = super().forward_backward_batch(data, halved if loss_function else None, forward_only)
        if self._wrong == "log_probs":
            values = output.log_probs.values()
            values[len(values) // 2] += 0.001
        return output

    def get_per_tensor_grad(self):
        for name, tensor in super().get_per_tensor_grad():
            yield name, tensor * (1.01 if self._wrong == "gradients" and "layers.1.mlp.down" in name else 1.0)

    def get_per_tensor_param(self):
        generator, config = super().get_per_tensor_param()

        def changed():
            for name, tensor in generator:
                rounded = tensor.bfloat16().float() if self._wrong == "weights" else tensor
                yield name.replace("gate", "door") if self._wrong == "names" else name, rounded

        return changed(), config

    def optimizer_step(self):
        norm = super().optimizer_step()
        if self._wrong == "parameters":
            with torch.no_grad():
                for name, parameter in self._optimizing().parameters.items():
                    if name.endswith("norm.weight"):
                        parameter.mul_(1.0001)
        return norm * (1.1 if self._wrong == "grad_norm" else 1.0)
'''
_CONFIG = '''
import attrs

from jackfield.sdk import option
from jackfield_engine_fsdp.config import Config as Right


@attrs.frozen(kw_only=True)
class Config(Right):
    """What is wrong."""

    wrong: str = option("nothing", "what is wrong")
'''
_MANIFEST = """
name = "mutant"
kind = "engine"
abi = "1.1"
object = "parity_mutant.engine:Mutant"
config = "parity_mutant.config:Config"
"""


@pytest.fixture
def mutant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the engine ``mutant``, for this process and those that it starts."""
    files = {
        "parity_mutant/__init__.py": "",
        "parity_mutant/engine.py": _ENGINE,
        "parity_mutant/config.py": _CONFIG,
        "parity_mutant/plugin.toml": _MANIFEST,
        "parity_mutant-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: parity-mutant\nVersion: 1.0\n",
        "parity_mutant-1.0.dist-info/entry_points.txt": "[jackfield.engines]\nmutant = parity_mutant:plugin.toml\n",
    }
    place = tmp_path / "site"
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(textwrap.dedent(content))
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONPATH", str(place))


@pytest.fixture
def parity() -> Callable[..., Any]:
    """``parity(*arguments)``: the result of the command; an unexpected exception fails the test."""
    from click.testing import CliRunner

    from jackfield.cli import main

    def do(*arguments: object) -> Any:
        result = CliRunner().invoke(main, ["parity", *map(str, arguments)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return do
