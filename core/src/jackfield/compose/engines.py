"""What the engines of a run are made with, and whether that fits, before a model is read."""

from __future__ import annotations

import re
from math import inf
from typing import Any

import attrs

from jackfield.abc.engine import EngineContext, OptimizerSpec
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.config import RunConfig, plugin_settings
from jackfield.plugins import Registry
from jackfield.trainer.role import Role, RoleName


def engine_context(config: RunConfig, role: str, **place: Any) -> EngineContext:
    """Return the context of an engine's rank; ``place`` has what depends on its process."""
    model = config.model
    if role != "actor":  # only actors have adapters, and critics have value heads
        path = (config.critic.path if role == "critic" else None) or model.path
        model = attrs.evolve(model, lora=None, value_head=role == "critic", path=path)
    return EngineContext(
        role=role,  # type: ignore[arg-type]
        model=model,
        optimizer={"actor": config.optimizer, "critic": config.critic.optimizer}.get(role),
        seed=config.seed,
        temperature=config.engine_temperature,
        micro_batch_tokens=config.cluster.micro_batch_tokens,
        **place,
    )


def check_engines(config: RunConfig, registry: Registry, role: RoleName, algorithm: ResolvedAlgorithm) -> None:
    """Refuse optimizers and models that cannot be, and what the engine's settings refuse (their method ``check``)."""
    if config.model.value_head:
        what = "no algorithm reads values of the policy: a critic has a head of its own"
        raise config.refusal("model.value_head", what, "false")
    check = getattr(plugin_settings(config, registry)["engine"], "check", None)
    ranks = config.cluster.ray.engine_ranks if config.cluster.name == "ray" else 1
    for each in Role.engines_of(config, algorithm, role):
        context = engine_context(config, each, world_size=ranks, device=config.cluster.device)
        if context.optimizer is not None:
            _check_optimizer(config, context.optimizer, "optimizer" if each == "actor" else f"{each}.optimizer")
        if check is not None:
            check(context)
    for pattern in config.model.freeze:
        _check_pattern(config, "model.freeze", pattern)


def _check_optimizer(config: RunConfig, spec: OptimizerSpec, where: str) -> None:
    decays, length = spec.scheduler != "constant", "the number of optimizer steps of the whole run"
    ends = spec.total_steps or inf
    for setting, wrong, what, expected in (
        ("total_steps", decays and ends == inf, f"the {spec.scheduler} schedule has no length", length),
        ("total_steps", decays and ends <= spec.warmup_steps, "the rate decays before its warm-up ends", "more steps"),
        ("ema_decay", spec.ema_decay and where != "optimizer", "only the policy's average is exported", "null"),
        ("no_decay", spec.no_decay and not spec.weight_decay, "weight_decay is 0 for all", "[], or a weight_decay"),
    ):
        if wrong:
            raise config.refusal(f"{where}.{setting}", what, expected)
    for pattern, factor in spec.lr_factors.items():
        _check_pattern(config, f"{where}.lr_factors", pattern)
        if not 0.0 <= factor <= 1e6:
            raise config.refusal(f"{where}.lr_factors", f"the factor of {pattern!r} is out of range", "0 to 1e6")


def _check_pattern(config: RunConfig, where: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        what = f"{pattern!r} is not a regular expression: {error}"
        raise config.refusal(where, what, "regular expressions") from error
