"""The suite of training engines: the invariants of ``jackfield.abc.engine``, on a running engine.

Every engine gets the same tiny Qwen3 and the same seven rows. The fixture may have ``settings`` and the engine's
``device`` (default ``cpu``).
"""

from __future__ import annotations

from jackfield_conformance.registry import Capability
from jackfield_conformance.suites.engine import adapters

CAPABILITIES: dict[str, Capability] = {
    "checkpoint": Capability(what="native and Hugging Face checkpoints"),
    "checkpoint_background": Capability(what="writes native checkpoints while training goes on"),
    "dropout": Capability(what="dropout in training passes: `ModelSpec.dropout`"),
    "entropy": Capability(what="the entropy of each prediction, for losses that need it"),
    "freeze": Capability(what="leaves chosen parameters as they are: `ModelSpec.freeze`"),
    "gpu": Capability(what="runs on a GPU"),
    "gradient_checkpointing": Capability(what="recomputes activations in the backward pass"),
    "lora": Capability(what="trains a low-rank adapter", detect=adapters.has_lora),
    "lora_merged": Capability(what="publishes the model with its adapter merged"),
    "lora_variants": Capability(what="DoRA and rsLoRA"),
    "mixed_precision": Capability(what="computes passes in another precision than the weights'"),
    "multi_modal": Capability(what="images and other inputs beside tokens"),
    "multi_rank": Capability(what="several ranks, each in its own process"),
    "offload": Capability(what="moves weights, gradients and optimizer state off the device to make room"),
    "optimizers": Capability(what="optimizers by name, decay exclusions, rates by group, averaged weights"),
    "router_aux_loss": Capability(what="the load-balancing loss of mixtures of experts"),
    "router_replay": Capability(what="trains on the experts that generated each token"),
    "value_head": Capability(what="a scalar head on the last hidden state", detect=adapters.has_value_head),
}
