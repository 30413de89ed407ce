"""Scalar heads in model folders: of saved critics, of sequence classifiers, and of TRL's value models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jackfield.errors import EngineError

if TYPE_CHECKING:
    import torch

HEAD_FILE = "value_head.safetensors"  #: with ``weight`` and ``bias``

#: Names without ``.weight`` and ``.bias``: of transformers' sequence classifiers and of TRL's value models.
_NAMES = ("score", "v_head.summary")


def read_scalar_head(folder: Path, hidden_size: int) -> dict[str, torch.Tensor] | None:
    """Return ``weight``, ``[1, hidden_size]``, and maybe ``bias``, ``[1]``, of a folder's head; None without one.

    Raises:
        EngineError: ``engine.model`` if the head has another shape, such as a classifier of several labels.
    """
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    own = folder / HEAD_FILE
    for file in [own] if own.is_file() else sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, it is not a mapping
                layer, _, leaf = name.rpartition(".")
                if file == own or layer in _NAMES:
                    found[leaf or name] = tensors.get_tensor(name)
    if not found:
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    expected = {"weight": (1, hidden_size), "bias": (1,)}
    if "weight" not in shapes or any(expected.get(name) != shape for name, shape in shapes.items()):
        raise EngineError(
            f"the head in {str(folder)!r} does not give one number",
            code="engine.model",
            where=str(folder),
            expected=f"weight {[1, hidden_size]}, and maybe bias [1]",
            found=", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items())),
            fix="give a folder with a scalar head (one label), or one without a head, which gets a random one",
        )
    return found
