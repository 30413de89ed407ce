"""The suite of training engines: the invariants of ``jackfield.abc.engine``, on a running engine.

Every engine gets the same tiny Qwen3 and the same seven rows. The fixture may have ``settings`` and the engine's
``device`` (default ``cpu``).
"""

from __future__ import annotations

from jackfield_conformance.registry import Capability
from jackfield_conformance.suites.engine import adapters

CAPABILITIES: dict[str, Capability] = {
    "checkpoint": Capability(what="native and Hugging Face checkpoints"),
    "dropout": Capability(what="dropout in training passes: `ModelSpec.dropout`"),
    "entropy": Capability(what="the entropy of each prediction, for losses that need it"),
    "gpu": Capability(what="runs on a GPU"),
    "gradient_checkpointing": Capability(what="recomputes activations in the backward pass"),
    "lora": Capability(what="trains a low-rank adapter", detect=adapters.has_lora),
    "mixed_precision": Capability(what="computes passes in another precision than the weights'"),
    "multi_rank": Capability(what="several ranks, each in its own process"),
    "offload": Capability(what="moves weights, gradients and optimizer state off the device to make room"),
    "value_head": Capability(what="a scalar head on the last hidden state", detect=adapters.has_value_head),
}
