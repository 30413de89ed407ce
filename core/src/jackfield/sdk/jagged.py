"""Rows of different lengths: jagged tensors, which keep them in one ``torch.nested`` tensor, and limits of lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jackfield.errors import DataError

if TYPE_CHECKING:
    import torch


def jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return rows ``[length, ...]`` of one dtype as a nested tensor ``[B, j, ...]``; gradients flow through.

    If there are no rows, or dtypes or trailing shapes differ, raise ``DataError``.
    """
    import torch

    if not rows:
        raise DataError("a jagged tensor needs one row at least", expected="rows [length, ...]", found="none")
    for index, row in enumerate(rows):
        if row.dim() == 0 or row.dtype != rows[0].dtype or row.shape[1:] != rows[0].shape[1:]:
            expected = f"{rows[0].dtype}, [length, *{list(rows[0].shape[1:])}]"
            raise DataError(f"row {index} does not fit", expected=expected, found=f"{row.dtype}, {list(row.shape)}")
    sizes = torch.tensor([row.shape[0] for row in rows], device=rows[0].device)
    return torch.nested.nested_tensor_from_jagged(torch.cat(list(rows)), lengths=sizes)


def rows(nested: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows of a nested tensor ``[B, j, ...]``, as views; another tensor raises ``DataError``."""
    import torch

    if not nested.is_nested or nested.layout != torch.jagged:
        raise DataError("not a nested tensor of layout torch.jagged", expected="[B, j, ...]", found=list(nested.shape))
    return list(nested.unbind())


def lengths(nested: torch.Tensor) -> torch.Tensor:
    """Return the lengths of the rows, int64 ``[B]``."""
    import torch

    return torch.tensor([len(row) for row in rows(nested)], dtype=torch.int64, device=nested.device)


def to_padded(nested: torch.Tensor, padding: float = 0, length: int | None = None) -> torch.Tensor:
    """Return ``[B, j, ...]`` as ``[B, T, ...]`` with ``padding`` on the right.

    T is ``length``, or without it the length of the longest row. A row that is longer raises ``DataError``.
    """
    return padded_rows(rows(nested), padding, length)


def padded_rows(rows: Sequence[torch.Tensor], padding: float = 0, length: int | None = None) -> torch.Tensor:
    """Return rows ``[length, ...]`` as :func:`to_padded` does."""
    import torch

    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=padding)
    extra = 0 if length is None else length - padded.shape[1]
    if extra < 0:
        raise DataError("a row is longer than the padded length", expected=f"at most {length}", found=padded.shape[1])
    return torch.cat([padded, padded.new_full((len(padded), extra, *padded.shape[2:]), padding)], dim=1)


def from_padded(dense: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return ``[B, T, ...]`` as ``[B, j, ...]`` without the values after a row's length (int64 ``[B]``).

    If the shapes do not match, raise ``DataError``.
    """
    import torch

    fits = dense.dim() >= 2 and lengths.shape == dense.shape[:1]
    if not fits or (len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= dense.shape[1]):
        found = f"{list(dense.shape)} and {lengths.tolist()[:8]}"
        expected = "[B, T, ...] and B lengths from 0 to T"
        raise DataError("lengths do not fit the padded tensor", expected=expected, found=found)
    sizes = lengths.to(dense.device, torch.int64)
    return torch.nested.nested_tensor_from_jagged(
        dense[torch.arange(dense.shape[1], device=dense.device) < sizes[:, None]], lengths=sizes
    )


def length_limits(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the lengths, in tokens, above which a Hugging Face model uses other frequencies, by kind.

    A pass computes frequencies for its longest row, so rows below and above a limit must not share a pass. With
    ``longrope`` there are two sets of frequencies; with ``dynamic`` each length above the limit has its own. A
    sequence that crosses a limit during generation keeps keys with the frequencies that it began with, and no pass
    over the whole sequence gives the same result. ``config`` is the content of ``config.json``.
    The lowest limit counts; the result is empty if frequencies never depend on the length.
    """
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    limits: dict[str, int] = {}
    for each in (rotary, *(value for value in rotary.values() if isinstance(value, Mapping))):  # one per layer type
        kind = str(each.get("rope_type", each.get("type")))
        if kind in ("longrope", "su"):
            kind, limit = "longrope", each.get("original_max_position_embeddings")
            limit = limit or config.get("original_max_position_embeddings")
        elif "dynamic" in kind:
            kind, limit = "dynamic", None
        else:
            continue
        limit = limit or config.get("max_position_embeddings")
        if limit is not None:
            limits[kind] = min(int(limit), limits.get(kind, int(limit)))
    return limits
