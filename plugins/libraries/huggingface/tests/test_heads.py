"""Scalar heads of model folders, whoever wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from jackfield_huggingface.heads import read_scalar_head
from jackfield_testing import refused

WEIGHT, BIAS = torch.tensor([[1.0, -2.0, 3.0]]), torch.tensor([0.5])


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("value_head.safetensors", ("weight", "bias")),
        ("model.safetensors", ("score.weight",)),
        ("model-00002-of-00002.safetensors", ("v_head.summary.weight", "v_head.summary.bias")),
    ],
)
def test_the_head_of_a_folder(tmp_path: Path, file: str, names: tuple[str, ...]) -> None:
    """Of Jackfield, of a sequence classifier, of TRL."""
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file(dict(zip(names, (WEIGHT, BIAS), strict=False)), tmp_path / file)
    found = read_scalar_head(tmp_path, 3)
    assert found is not None
    assert torch.equal(WEIGHT, found["weight"])
    assert len(names) == len(found)


def test_a_folder_without_a_head(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    assert read_scalar_head(tmp_path, 3) is None


@pytest.mark.parametrize("wrong", [torch.ones(2, 3), torch.ones(1, 4)])
def test_a_head_of_another_shape_is_refused(tmp_path: Path, wrong: torch.Tensor) -> None:
    """A classifier of two labels, and a head of another model."""
    save_file({"score.weight": wrong}, tmp_path / "model.safetensors")
    with refused("engine.model", tmp_path, f"{list(wrong.shape)}"):
        read_scalar_head(tmp_path, 3)
