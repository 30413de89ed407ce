"""Jackfield's meaning of sampling parameters inside vLLM's workers.

vLLM filters by min-p before top-k and top-p, while Jackfield does so after them, and has one kind of log-probabilities
for all requests. So a logits processor applies the filters here, and the sampler returns raw log-probabilities for the
requests that ask for them. Both find a request's parameters in ``extra_args``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.sample.sampler import Sampler

ARGUMENT = "jackfield"  #: the key in ``extra_args``


@attrs.frozen
class Row:
    """A request's parameters that vLLM does not apply itself."""

    top_k: int
    top_p: float
    min_p: float
    raw: bool
    divisor: float = 1.0  #: of logits, in addition to vLLM's temperature

    @property
    def filters(self) -> bool:
        """Return whether the logits change."""
        return self.divisor != 1 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Filters(LogitsProcessor):
    """A logits processor: top-k, top-p, min-p, in this order, on logits divided by the temperature."""

    latest: Filters | None = None  #: of this process, for :class:`RawLogProbs`

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, Row] = {}
        Filters.latest = self

    def is_argmax_invariant(self) -> bool:
        """Return True: the likeliest token always stays, so greedy rows need no filter."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests through the batch."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self._rows.pop(index, None)
            row = row_of(params)
            if row is not None:
                self._rows[index] = row
        for source, target, direction in batch_update.moved:
            first, second = self._rows.pop(source, None), self._rows.pop(target, None)
            if first is not None:
                self._rows[target] = first
            if second is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = second

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask filtered tokens in place."""
        for index, row in self._rows.items():
            if row.filters and index < logits.shape[0]:
                logits[index] = filtered(logits[index] / row.divisor, row.top_k, row.top_p, row.min_p)
        return logits

    def raw_rows(self, count: int) -> list[int]:
        """Return the rows whose log-probabilities are of the logits at temperature 1."""
        return sorted(index for index, row in self._rows.items() if row.raw and index < count)


def filtered(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Return logits ``[V]`` with -inf for filtered tokens; the likeliest token always stays."""
    ordered, order = logits.sort(stable=True, descending=True)
    ranks = torch.arange(len(ordered), device=logits.device)
    if top_k > 0:
        ordered = ordered.masked_fill(ranks >= top_k, -math.inf)
    probabilities = ordered.softmax(-1, dtype=torch.float64)
    dropped = probabilities < 0  # none
    if top_p < 1:
        dropped |= probabilities.cumsum(-1) - probabilities >= top_p
    if min_p > 0:
        dropped |= ordered < ordered[0] + math.log(min_p)
    dropped[0] = False
    return torch.empty_like(logits).scatter_(0, order, ordered.masked_fill(dropped, -math.inf))


class RawLogProbs(Sampler):
    """vLLM's sampler, with raw log-probabilities for requests that ask for them."""

    _raw: tuple[list[int], torch.Tensor] | None = None

    def forward(self, logits: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        """Compute raw log-probabilities before the logits are changed."""
        rows = [] if Filters.latest is None else Filters.latest.raw_rows(logits.shape[0])
        self._raw = (rows, self.compute_logprobs(logits[rows])) if rows else None
        try:
            return super().forward(logits, *arguments, **keywords)
        finally:
            self._raw = None

    def gather_logprobs(self, logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        """Gather the log-probs of the drawn tokens."""
        if self._raw is not None:
            rows, raw = self._raw
            logprobs = logprobs.clone()
            logprobs[rows] = raw
        return super().gather_logprobs(logprobs, num_logprobs, token_ids)


def row_of(params: SamplingParams) -> Row | None:
    """Return what a request asks for; None: nothing that vLLM does not do."""
    chosen: Mapping[str, Any] | None = (params.extra_args or {}).get(ARGUMENT)
    if chosen is None:
        return None
    row = Row(**chosen)
    return row if row.filters or row.raw else None
