"""The reference of training engines and its mutants."""

from __future__ import annotations

from mutants import engine_features, engine_passes, engine_training
from mutants.engine_register import MUTANTS
from mutants.harness import Reference
from mutants.plain_engine import PlainConfig, PlainEngine

__all__ = ["MUTANTS", "REFERENCE", "engine_features", "engine_passes", "engine_training"]

REFERENCE = Reference(
    cls=PlainEngine,
    config_class=PlainConfig,
    capabilities={"dropout": "full", "lora": "full", "value_head": "full", "gradient_checkpointing": "full"},
)
