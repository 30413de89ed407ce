"""A tiny Qwen3 in a folder, rows, and a reference that shares nothing with the engine but the numbers."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from jackfield_testing import TORCHAO

sys.path.append(str(TORCHAO))  # after transformers, which loads it where it finds it

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Declare this folder's marker."""
    config.addinivalue_line("markers", "multiprocess: starts processes of its own")


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"jackfield_engine_fsdp_tests_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """The functions of ``worker.py``."""
    return _load("worker")


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The functions of ``reference.py``."""
    return _load("reference")


def save_model(folder: Path, **changes: Any) -> Path:
    """A Qwen3 of 2 layers and hidden size 32 in float32; what it would be too regular for is made random."""
    settings = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = Qwen3ForCausalLM(Qwen3Config(**(settings | changes)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.15 + (1.0 if parameter.ndim == 1 else 0.0))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings."""
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output layer of its own."""
    return save_model(tmp_path_factory.mktemp("model") / "untied", tie_word_embeddings=False)


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Matrices of enough numbers for optimizer state of 8 bits, on each of two ranks."""
    return save_model(tmp_path_factory.mktemp("model") / "wide", hidden_size=64, intermediate_size=128)


@pytest.fixture(scope="session")
def rows(kit: ModuleType) -> list[dict[str, list[Any]]]:
    """Eight rows of very different lengths; one response is empty."""
    return kit.make_rows([(3, 5), (7, 1), (1, 9), (12, 4), (5, 0), (2, 13), (9, 7), (4, 4)])


@pytest.fixture
def build(kit: ModuleType, model_folder: Path) -> Iterator[Callable[..., Any]]:
    """``build(**options)``: an initialized engine on the tied model, closed at the end."""
    engines = []

    def make(config: Any = None, folder: Path | None = None, **options: Any) -> Any:
        engines.append(kit.make_engine(folder or model_folder, config, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
