"""The reference of training engines and its mutants."""

from __future__ import annotations

from mutants import engine_experts, engine_features, engine_images, engine_passes, engine_training, engine_tuning
from mutants.harness import Reference, named
from mutants.plain_engine import PlainConfig
from mutants.tuned_engine import TunedEngine

REFERENCE = Reference(
    cls=TunedEngine,
    config_class=PlainConfig,
    capabilities=dict.fromkeys(
        (
            *("dropout", "lora", "value_head", "gradient_checkpointing", "freeze", "optimizers", "lora_variants"),
            *("lora_merged", "checkpoint_background"),
        ),
        "full",
    ),
)
_MODULES = (engine_features, engine_passes, engine_training, engine_images, engine_experts, engine_tuning)
MUTANTS = named(*(each for module in _MODULES for each in module.MUTANTS))
