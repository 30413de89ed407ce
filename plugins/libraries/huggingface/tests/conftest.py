"""The example's tiny vision-language model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "vision" / "make_task.py"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the example's model: pictures of 16 pixels in four pieces."""
    spec = importlib.util.spec_from_file_location("jackfield_example_vision", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("model")
    module.make_model(folder, 0)
    return folder
