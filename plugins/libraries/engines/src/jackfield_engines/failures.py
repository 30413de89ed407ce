"""Failures of a pass or a step that name the samples: results that are not finite, and too little memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from tensordict import TensorDict

from jackfield.abc.engine import EngineContext, EngineOutput
from jackfield.errors import EngineError
from jackfield.sdk.jagged import rows as rows_of
from jackfield.sdk.samples import sample_name

_SHOWN = 8  #: samples in a message


class Ranks(Protocol):
    """All ranks of an engine."""

    rank: int
    size: int
    device: torch.device

    def maximum(self, value: int) -> int:
        """Return the largest value of all ranks."""

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks, in place."""


class Watch:
    """What the passes since the last step computed, to name the samples of a gradient that is not finite."""

    def __init__(self) -> None:
        self._passes: list[tuple[TensorDict, EngineOutput, list[str]]] = []

    def add(self, data: TensorDict, output: EngineOutput) -> None:
        """Remember a pass over ``data``; its tensors are not copied."""
        names = [sample_name(row) for row in range(int(data.batch_size[0]))]
        self._passes.append((data, output, names))

    def clear(self) -> None:
        """Forget the passes."""
        self._passes.clear()

    def names(self) -> list[str]:
        """Return the samples with a result or a float column that is not finite."""
        found: list[str] = []
        for data, output, names in self._passes:
            tensors = [output.log_probs, output.entropy, output.values, *data.values()]
            bad = {row for tensor in tensors for row in _not_finite(tensor)}
            found += [names[row] for row in sorted(bad)]
        return list(dict.fromkeys(found))


def _not_finite(tensor: object) -> list[int]:
    """Return the rows of a jagged or dense tensor that have a NaN or an infinity."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        return []
    rows = rows_of(tensor) if tensor.is_nested else list(tensor)
    return [index for index, row in enumerate(rows) if not bool(row.isfinite().all())]


def report_not_finite(norm: float, watch: Watch, context: EngineContext, ranks: Ranks) -> None:
    """Name the samples of a gradient norm that is not finite, on every rank; warn, or raise ``engine.not-finite``.

    A collective operation.
    """
    assert context.optimizer is not None, "it has taken a step"
    names = [name for text in gather_texts("\n".join(watch.names()), ranks) for name in text.split("\n") if name]
    names = list(dict.fromkeys(names))
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    where = shown or "no sample: log-probs and columns of all are finite, so the gradients overflowed"
    if context.optimizer.on_nonfinite == "skip":
        if ranks.rank == 0:
            logging.getLogger("jackfield").warning(
                "the gradient norm of the %s is %s, so this step is skipped: %s", context.role, norm, where
            )
        return
    raise EngineError(
        "the gradients are not finite",
        code="engine.not-finite",
        where=where,
        expected="a finite gradient norm",
        found=f"{norm}; {len(names)} samples with values that are not finite",
        fix="look at these samples, lower optimizer.lr, or set optimizer.on_nonfinite: skip",
    )


def gather_texts(text: str, ranks: Ranks) -> list[str]:
    """Return the text of each rank, on every rank. A collective operation."""
    data = list(text.encode())
    length = ranks.maximum(len(data))
    table = torch.zeros((ranks.size, length), dtype=torch.int32, device=ranks.device)
    table[ranks.rank, : len(data)] = torch.tensor(data, dtype=torch.int32, device=ranks.device)
    return [bytes(row).rstrip(b"\0").decode() for row in ranks.sum(table).tolist()]


def out_of_memory(
    error: torch.OutOfMemoryError, context: EngineContext, place: str, rows: Sequence[int], lengths: Sequence[int]
) -> EngineError:
    """Return the error for a micro-batch that does not fit: its samples and tokens, and the setting to change.

    ``place`` is the micro-batch's, such as ``micro-batch 2 of 5``; ``lengths`` are the tokens of each of its ``rows``.
    """
    names = [sample_name(row) for row in rows]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    longest, count = max(lengths, default=0), len(lengths)
    limit = context.micro_batch_tokens
    fixes = []
    if count > 1:
        lower = max(longest, min(limit, longest * count) // 2)
        fixes.append(f"set cluster.micro_batch_tokens to {lower} or less (now {limit})")
    if not context.model.gradient_checkpointing:
        fixes.append("set model.gradient_checkpointing: true")
    fixes.append("give the engine more ranks, or generate shorter responses (sampling.max_new_tokens)")
    return EngineError(
        f"the device's memory is too small for {place} of the {context.role}",
        code="engine.out-of-memory",
        where=f"{place}: {shown}",
        expected="memory for the pass",
        found=f"{count} rows of {sum(lengths)} tokens, the longest {longest}; {_first_sentence(error)}",
        fix="; ".join(fixes),
    )


def _first_sentence(error: BaseException) -> str:
    return str(error).split(". ")[0].strip() or type(error).__name__
