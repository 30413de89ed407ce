"""Settings of the engine. Importable without torch."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs.validators import ge, gt

from jackfield.sdk import option


@attrs.frozen(kw_only=True)
class Config:
    """How the model is sharded and computed. The engine's context says what is trained, and how."""

    mixed_precision: Literal["none", "bfloat16"] = option(
        "none",
        "Arithmetic of forward and backward passes. bfloat16: parameters are gathered in bfloat16 and gradients "
        "reduced in float32, while the sharded weights and the optimizer keep the model's dtype.",
    )
    master_weights: bool = option(
        True,
        "Where a model in bfloat16 or float16 is trained, keep its weights, gradients and optimizer state in "
        "float32; passes run in the model's dtype, and published weights are cast to it. false: half the memory, and "
        "updates that are smaller than the spacing of a weight's neighbours are lost (the log says how many).",
    )
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"] = option(
        "sdpa", "Attention kernel of transformers. sdpa and eager run everywhere, the others need their own packages."
    )
    wrap: Literal["auto", "layers", "root"] = option(
        "auto",
        "What is gathered at once. layers: one decoder layer after the other, the least memory; root: the whole "
        "model, the fewest collectives; auto: layers where a layer has wrap_min_parameters.",
    )
    wrap_min_parameters: int = option(
        1_000_000, "With wrap auto: parameters of a decoder layer that is gathered alone.", gt(0)
    )
    reshard_after_forward: bool = option(
        True, "Free a layer's gathered weights after its forward pass and gather them again for its backward pass."
    )
    gradient_accumulation: Literal["auto", "sharded", "unsharded"] = option(
        "auto",
        "Where gradients of several micro-batches add up. sharded: reduced after each one; unsharded: reduced "
        "once, after the last (a whole gradient per rank in memory); auto: unsharded where several ranks train at "
        "most unsharded_max_parameters.",
    )
    unsharded_max_parameters: int = option(
        100_000_000, "With gradient_accumulation auto: parameters of a model, at most.", gt(0)
    )
    cpu_offload: bool = option(
        False,
        "Keep weights, gradients and optimizer state in the host's memory and stream them to the accelerator. "
        "No effect when the device is the CPU.",
    )
    logits_chunk: int = option(
        1 << 27,
        "Log-probabilities are computed over at most this many logits at once (float32 numbers); larger "
        "micro-batches go in pieces that the backward pass computes again.",
        gt(0),
    )
    extra_threads: int = option(
        0,
        "On a CPU, threads that a pass uses beyond cluster.threads while no replica in this process generates. "
        "The last bits of results then depend on when replicas were idle.",
        ge(0),
    )
    collective_timeout: float = option(
        600.0, "Seconds that ranks wait for each other in a collective operation before they fail.", gt(0)
    )
