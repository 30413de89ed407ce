"""The reference of training engines and its mutants."""

from __future__ import annotations

from mutants import engine_features, engine_passes, engine_training
from mutants.harness import Reference, named
from mutants.plain_engine import PlainConfig, PlainEngine

REFERENCE = Reference(
    cls=PlainEngine,
    config_class=PlainConfig,
    capabilities={"dropout": "full", "lora": "full", "value_head": "full", "gradient_checkpointing": "full"},
)
MUTANTS = named(*engine_features.MUTANTS, *engine_passes.MUTANTS, *engine_training.MUTANTS)
