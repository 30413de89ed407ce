"""Settings of the plugin; importable without torch."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs import validators

__all__ = ["Config"]


@attrs.frozen(kw_only=True)
class Config:
    """Settings of the ``transformers`` rollout server."""

    max_batch_size: int = attrs.field(default=256, validator=validators.ge(1))  #: requests decoded together
    #: padded prompt tokens of one prefill pass, at most (one prompt may exceed it); None: 2048 on a CPU, where larger
    #: passes fall out of its caches, 16384 elsewhere
    max_prefill_tokens: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(1)))
    #: tokens that the KV cache may hold (rows x longest row); None: no bound beside the batch and the model length
    max_cache_tokens: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(1)))
    #: the library's attention implementation; both take the masks that this server prepares
    attention: Literal["sdpa", "eager"] = "sdpa"
    #: decode steps of one visit to the worker thread while nothing else is asked of the server; 1: return after each
    steps_per_hop: int = attrs.field(default=8, validator=validators.ge(1))
