"""The reference of rollout servers and its mutants."""

from __future__ import annotations

from mutants import rollout_address, rollout_control, rollout_experts, rollout_images, rollout_tokens
from mutants.harness import Reference, named
from mutants.rollout_server import Config, ReferenceServer

REFERENCE = Reference(
    cls=ReferenceServer,
    config_class=Config,
    capabilities={
        "sleep": "full",
        "stop_strings": "full",
        "weights_adapter": "full",
        "weights_delta": "full",
        "weights_float8": "full",
        "openai": "full",
    },
)

MUTANTS = named(
    *rollout_tokens.MUTANTS,
    *rollout_control.MUTANTS,
    *rollout_address.MUTANTS,
    *rollout_images.MUTANTS,
    *rollout_experts.MUTANTS,
)
