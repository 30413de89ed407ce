"""Settings of the engine. Importable without torch."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs.validators import ge, gt

from jackfield.sdk import option


@attrs.frozen(kw_only=True)
class Config:
    """How the model is parallelised. The engine's context says what is trained, and how."""

    tensor_parallel: int = option(1, "Ranks that share each layer's matrices (TP).", ge(1))
    pipeline_parallel: int = option(1, "Stages of consecutive layers (PP), in the schedule 1F1B.", ge(1))
    virtual_pipeline_stages: int = option(
        1, "Pieces of layers that each pipeline stage has (virtual stages), in the schedule interleaved 1F1B.", ge(1)
    )
    context_parallel: int = option(
        1, "Ranks that share the positions of each row (CP); keys and values are gathered for attention.", ge(1)
    )
    expert_parallel: int = option(
        1, "Ranks that share the experts of a layer (EP); a matrix of an expert is not split further.", ge(1)
    )
    sequence_parallel: bool = option(
        False, "Share the positions of norms and residuals over the tensor-parallel ranks, too."
    )
    distributed_optimizer: bool = option(
        False, "Share optimizer state and float32 weights over the data-parallel ranks (Megatron's own optimizer)."
    )
    recompute: Literal["none", "selective", "full"] = option(
        "none",
        "What the backward pass computes again to save memory. selective: attention; full: whole layers, as "
        "model.gradient_checkpointing does.",
    )
    vocabulary_multiple: int = option(
        128,
        "Embeddings are padded to this multiple of rows, times tensor_parallel; the padding is not published.",
        gt(0),
    )
    logits_chunk: int = option(
        1 << 27,
        "Log-probabilities are computed over at most this many logits at once on a rank (float32 numbers); the "
        "backward pass computes them again, piece by piece.",
        gt(0),
    )
    collective_timeout: float = option(
        600.0, "Seconds that ranks wait for each other in a collective operation before they fail.", gt(0)
    )
