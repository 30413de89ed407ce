"""Settings of the plugin; importable without torch."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs.validators import ge

from jackfield.sdk import option
from jackfield_openai import EndpointConfig


@attrs.frozen(kw_only=True)
class Config:
    """Settings of the ``transformers`` rollout server."""

    max_batch_size: int = option(256, "requests decoded together, at most", ge(1))
    batch_invariant: bool = option(
        False,
        "compute one sequence at a time: its tokens and log-probs are then the same, to the last bit, whatever"
        " other requests the server has; slower, and max_batch_size has no effect",
    )
    max_prefill_tokens: int | None = option(
        None,
        "padded prompt tokens of one prefill pass, at most (one prompt may exceed it); null: 512 on a CPU, where"
        " larger passes fall out of its caches, 16384 elsewhere",
        ge(1),
    )
    max_cache_tokens: int | None = option(
        None,
        "tokens that the KV cache may hold (rows x longest row); null: no bound beside batch and model length",
        ge(1),
    )
    attention: Literal["auto", "sdpa", "eager"] = option(
        "auto",
        "the library's attention implementation; auto: sdpa, and eager where the architecture wants it (attention"
        " sinks, a soft cap of attention scores), which is logged",
    )
    cache: Literal["auto", "batch", "rows"] = option(
        "auto",
        "batch: one cache for the whole batch, which computes one token of every request at once; rows: a cache of the"
        " library for each request, computed one after another, which takes every architecture; auto: batch where the"
        " model's layers allow it, else rows, which is logged",
    )
    steps_per_hop: int = option(
        8,
        "decode steps of one visit to the worker thread while nothing else is asked of the server; 1: return"
        " after each",
        ge(1),
    )
    openai: EndpointConfig | None = option(None, "listen at an OpenAI-compatible address; null: no address")

    @property
    def rows(self) -> int:
        """Return the largest number of sequences that share a forward pass."""
        return 1 if self.batch_invariant else self.max_batch_size
