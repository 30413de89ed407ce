"""Settings of the engine. Importable without torch."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs.validators import ge, gt, optional

from jackfield.sdk import option


@attrs.frozen(kw_only=True)
class Config:
    """How the model is sharded and computed. The engine's context says what is trained, and how."""

    sequence_parallel: int = option(
        1,
        "Ulysses sequence parallelism: ranks that share the tokens of a row. The rest of the ranks are data-parallel.",
        ge(1),
    )
    expert_parallel: int = option(1, "Ranks that share the experts of a layer; divides shard_size.", ge(1))
    shard_size: int | None = option(
        None,
        "Data-parallel ranks that share one copy of the model; there are more copies where it is below their number "
        "(HSDP). null: one copy.",
        optional(gt(0)),
    )
    mixed_precision: Literal["none", "bfloat16"] = option(
        "none",
        "Arithmetic of forward and backward passes of a float32 model. bfloat16: parameters are gathered in bfloat16 "
        "and gradients reduced in float32.",
    )
    attention: Literal["sdpa", "flash_attention_2", "flash_attention_3"] = option(
        "sdpa", "Attention kernel. sdpa runs everywhere, the others need their own packages and a GPU."
    )
    expert_kernel: Literal["eager", "fused_triton"] = option(
        "eager",
        "Kernel of the experts. eager runs everywhere; fused_triton is VeOmni's, and needs a GPU and bfloat16.",
    )
    reshard_after_forward: bool = option(
        True, "Free a layer's gathered weights after its forward pass and gather them again for its backward pass."
    )
    logits_chunk: int = option(
        1 << 24,
        "Log-probabilities are computed over at most this many logits at once (float32 numbers); the backward pass "
        "computes them again.",
        gt(0),
    )
    collective_timeout: float = option(
        600.0, "Seconds that ranks wait for each other in a collective operation before they fail.", gt(0)
    )
