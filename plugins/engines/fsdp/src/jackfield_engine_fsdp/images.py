"""The images of a rank's rows: read from their column, and checked against the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from jackfield.errors import EngineError
from jackfield.sdk.arrays import Arrays, unpack
from jackfield.sdk.jagged import rows as rows_of
from jackfield_huggingface.images import ImageInputs, Images

COLUMN, EXPERTS = "multi_modal_inputs", "routed_experts"


def read_arrays(data: TensorDict) -> list[Arrays]:
    """Return what each row has beside tokens."""
    return [unpack(content) for content in _contents(data.get(COLUMN))]


def images_of(
    rows: Sequence[Arrays], token_ids: Sequence[torch.Tensor], takes: ImageInputs | None
) -> list[Images | None]:
    """Return the images of each row, as tensors by name; None for a row without images.

    ``token_ids`` are int64 ``[length]``, prompt and response: later turns have images, too. Inputs that the model does
    not take are refused (``engine.failed``).
    """
    found: list[Images | None] = []
    for row, (given, ids) in enumerate(zip(rows, token_ids, strict=True)):
        arrays = {name: array for name, array in given.items() if name != EXPERTS}
        if arrays and takes is None:
            expected = "a model that takes images, such as LLaVA, InternVL or Qwen-VL"
            raise EngineError("the model takes no such images", where=COLUMN, expected=expected, found=sorted(arrays))
        problem = takes.problem(arrays, ids.tolist()) if takes is not None else None
        if problem is not None:
            expected, there = problem
            raise EngineError(f"images do not fit the model, row {row}", where=COLUMN, expected=expected, found=there)
        found.append({name: torch.from_numpy(array.copy()) for name, array in arrays.items()} or None)
    return found


def _contents(column: Any) -> list[bytes]:
    if isinstance(column, torch.Tensor):
        return [row.numpy().tobytes() for row in rows_of(column.cpu())]
    return list(column.tolist())
