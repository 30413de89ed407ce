"""How the policy that generates differs from the one that is trained, and what a run does about it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from jackfield.abc.rollout import SamplingParams
from jackfield.algorithms import Correction, Part
from jackfield.config import RunConfig
from jackfield.errors import ConfigError
from jackfield.plugins import Manifest

#: How far a replica's log-probs may be from the engine's on average, in nats, where none is configured.
_EXACT_BOUND, _ROUNDED_BOUND, _FLOAT8_BOUND = 0.01, 0.25, 0.5
#: The same for two passes of the engine with the same weights.
_EXACT_ENGINE_BOUND, _ROUNDED_ENGINE_BOUND = 0.001, 0.1


def check_sampling(sampling: SamplingParams) -> None:
    """Training responses are drawn, and their log-probs are of the distribution that they were drawn from."""
    if sampling.temperature == 0:
        raise ConfigError(
            "greedy responses cannot be trained on: all rollouts of a task are equal",
            where="sampling.temperature",
            expected="more than 0 (evaluation.sampling may be greedy)",
            found=sampling.temperature,
        )
    if sampling.log_probs == "raw":
        raise ConfigError(
            "raw log-probs are not those of the distribution that training responses are drawn from",
            where="sampling.log_probs",
            expected="processed (evaluation.sampling may have raw ones)",
            found="raw",
            fix="remove the setting",
        )


def filters(config: RunConfig) -> dict[str, float]:
    """The sampling filters of training responses that leave tokens out, by name."""
    sampling = config.sampling
    active = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    return {name: getattr(sampling, name) for name, found in active.items() if found and config.mode == "online"}


def old_log_probs(config: RunConfig, corrects: bool) -> Literal["rollout", "engine"]:
    """Whose log-probs are those of the policy before the update.

    The rollout server's are of the filtered distribution where there is a filter, and ratios to them do not begin at 1.
    """
    chosen, active = config.algorithm.old_log_probs, filters(config)
    if chosen == "auto":
        return "engine" if corrects or active else "rollout"
    if chosen == "rollout" and active:
        raise ConfigError(
            "the rollout server's log-probs are of the distribution that the sampling filters leave, not of the policy",
            where="algorithm.old_log_probs",
            expected="engine or auto",
            found=f"rollout with {', '.join(f'sampling.{name}: {value}' for name, value in active.items())}",
            fix="remove algorithm.old_log_probs, or the filters",
        )
    return chosen


def corrects(config: RunConfig, loss: Part, rollout: Manifest) -> bool:
    """On by default where numerics differ, and the loss can be weighed and does not weigh itself."""
    enabled = config.algorithm.correction.enabled
    if enabled is not None:
        return enabled
    differs = config.log_prob_check.on_mismatch == "correct" or _numerics_differ(config, rollout)
    return differs and not loss.per_sequence and not _weighs_itself(loss)


def _weighs_itself(loss: Part) -> bool:
    return "rollout_log_probs" in (*loss.needs, *loss.accepts)


def _numerics_differ(config: RunConfig, rollout: Manifest) -> bool:
    """Whether the server's log-probs are more than rounding away from the engine's."""
    return rollout.capabilities.get("engine_log_probs") != "full" or _rounds(config) or bool(filters(config))


def _rounds(config: RunConfig) -> bool:
    """Whether anything is computed with fewer bits than float32 has."""
    return _engine_rounds(config) or config.weights.dtype not in (None, "float32")


def _engine_rounds(config: RunConfig) -> bool:
    mixed = config.engine.settings.get("mixed_precision", "none") not in (None, "none")
    return mixed or config.model.dtype != "float32"


def rollout_bound(config: RunConfig) -> float:
    """Return how far the log-probs of replicas may be from the engine's on average, in nats."""
    if config.log_prob_check.bound is not None:
        return config.log_prob_check.bound
    if config.weights.dtype == "float8_e4m3fn":
        return _FLOAT8_BOUND
    return _ROUNDED_BOUND if _rounds(config) else _EXACT_BOUND


def log_prob_check_options(config: RunConfig) -> dict[str, Any]:
    """Return the bounds of :class:`~jackfield.trainer.LogProbCheck`."""
    settings, lora = config.log_prob_check, config.model.lora
    engine = _ROUNDED_ENGINE_BOUND if _engine_rounds(config) else _EXACT_ENGINE_BOUND
    return {
        "every": settings.every,
        "bound": rollout_bound(config),
        "train_mode_bound": settings.bound or engine,
        "rollout": config.mode == "online",
        "stops": settings.on_mismatch != "warn",
        "corrects": settings.on_mismatch == "correct",
        "slack": _slack(filters(config)),
        "dropout": config.model.dropout > 0 or (lora is not None and lora.dropout > 0),
    }


def _slack(active: Mapping[str, float]) -> float:
    """How far, in nats, log-probs of the tokens that filters leave may be above the policy's.

    A top-p keeps at least that share of the probability; of the others only the batch knows.
    """
    if not active:
        return 0.0
    return -math.log(active["top_p"]) if active.keys() == {"top_p"} else math.inf


def check_mismatch(config: RunConfig, loss: Part, corrects: bool) -> None:
    """Refuse ``on_mismatch: correct`` where nothing corrects."""
    if config.log_prob_check.on_mismatch == "correct" and not corrects and not _weighs_itself(loss):
        raise ConfigError(
            "the run does not correct for other log-probs than the engine's",
            where="log_prob_check.on_mismatch",
            expected="stop or warn, or an algorithm whose loss importance weights can correct",
            found="correct",
            fix="set log_prob_check.on_mismatch: stop, or remove algorithm.correction.enabled: false",
        )


def check_correction(config: RunConfig, loss: Part, corrects: bool, old: str) -> None:
    """Refuse a correction that this loss, or these old log-probs, leave nothing to do."""
    where = "algorithm.correction"
    if corrects and loss.per_sequence:
        raise ConfigError(
            f"loss {loss.name} has one value per sequence, which weights of tokens cannot correct",
            where=where,
            fix=f"set {where}.enabled: false",
        )
    if corrects and old == "rollout" and config.algorithm.correction.reject == "none":
        raise ConfigError(
            "around the rollout server's log-probs the loss's own ratio corrects: nothing is left to do but to reject",
            where=where,
            expected="old_log_probs: engine (weights), or a reject (whole tokens or responses are left out)",
            fix=f"set algorithm.old_log_probs: engine, or {where}.reject",
        )


def used_correction(config: RunConfig, old: str) -> Correction:
    """Around the rollout's own log-probs, the loss's ratio weighs and the correction only rejects."""
    given = config.algorithm.correction
    return given if old == "engine" else attrs.evolve(given, bound="none", batch_normalize=False)
