"""Jackfield's meaning of sampling parameters in vLLM's second model runner; see ``sampling`` for the first one's.

That runner is vLLM's choice where Triton works, so on GPUs. It gives logits processors undivided logits, and keeps what
belongs to a request in a slot, which is its own until it ends.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor

from jackfield_rollout_vllm.sampling import Row, filtered, row_of


class Filters(LogitsProcessor):
    """A logits processor: top-k, top-p, min-p, in this order, of logits divided by the temperature."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._rows: dict[int, tuple[Row, float]] = {}  #: with vLLM's temperature, by slot

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Note what a request asks for, in place of the slot's last one."""
        self._rows.pop(req_idx, None)
        row = row_of(sampling_params)
        if row is None:
            return False
        self._rows[req_idx] = (row, sampling_params.temperature)
        return row.filters

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Mask filtered tokens in place; vLLM divides by its temperature afterwards."""
        for index, row, heat in self._of(ctx.expanded_idx_mapping):
            if row.filters:
                divided = logits[index] / (heat * row.divisor)
                logits[index] = filtered(divided, row.top_k, row.top_p, row.min_p) * heat
        return logits

    def raw_rows(self, slots: torch.Tensor) -> list[int]:
        """Return the rows of a batch whose log-probabilities are of the logits at temperature 1."""
        return [index for index, row, _ in self._of(slots) if row.raw]

    def _of(self, slots: torch.Tensor) -> list[tuple[int, Row, float]]:
        if not self._rows:
            return []
        return [(index, *self._rows[slot]) for index, slot in enumerate(slots.tolist()) if slot in self._rows]


def return_raw_log_probs(sampler: Any) -> None:
    """Have a sampler compute raw log-probabilities for requests that ask for them."""
    sample = sampler.sample

    def sample_with_raw(logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, *rest: Any, **more: Any) -> Any:
        sampled, processed = sample(logits, expanded_idx_mapping, *rest, **more)
        filters = [each for each in sampler.logits_processors if isinstance(each, Filters)]
        rows = [row for each in filters for row in each.raw_rows(expanded_idx_mapping)]
        if rows and processed is not logits:
            processed = processed.clone()
            processed[rows] = logits[rows].to(processed.dtype)
        return sampled, processed

    sampler.sample = sample_with_raw
