"""Resolve the algorithm of a configuration: its parts, their options, and what they need, by their signatures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from jackfield.algorithms import Algorithm, Part, algorithm, part
from jackfield.algorithms.options import check_values
from jackfield.algorithms.registry import COUNTS
from jackfield.algorithms.resolved import ResolvedAlgorithm
from jackfield.algorithms.settings import CriticSettings, PartSettings
from jackfield.compose.rollout_policy import (
    check_correction,
    check_mismatch,
    check_sampling,
    corrects,
    old_log_probs,
    used_correction,
)
from jackfield.config import RunConfig, WeightsConfig
from jackfield.errors import ConfigError
from jackfield.plugins import Manifest

#: What an estimator can get of every batch, and what a run adds where an estimator needs it.
_ESTIMATOR_INPUTS = frozenset(
    {"token_rewards", "response_mask", "group_ids", "rollout_ids", "step_ids", "anchor_ids", "old_log_probs"}
)
_RUN_INPUTS = frozenset({"values", "reward_dimensions", "baseline_rewards"})
#: Words in a bundle's ``needs`` that a run knows; the estimator's inputs are known, too.
_KNOWN_NEEDS = frozenset(
    {"critic", "reference", "dynamic_sampling", "expert_data", "pairs", "prepare", "rollout_log_probs"}
)


def resolve_algorithm(config: RunConfig, rollout: Manifest) -> ResolvedAlgorithm:
    """Make every choice that the configuration leaves open.

    Args:
        config: of the run.
        rollout: the rollout plugin's manifest: how far its log-probs are from the engine's.

    Raises:
        ConfigError: an algorithm that this run cannot have, or a setting without effect.
    """
    settings = config.algorithm
    chosen = _algorithm(config)
    _check_mode(config, chosen)
    loss = part("loss", chosen.loss)
    estimator = part("advantages", chosen.advantages) if chosen.advantages else None
    wanted = {*chosen.needs, *(estimator.needs if estimator else ())}
    experts = config.data.expert_samples_per_batch if "expert_mask" in loss.needs and config.data.expert else 0
    mixes = experts > 0 or ("expert_mask" in loss.needs and config.mixing.expert is not None)
    corrected = estimator is not None and corrects(config, loss, rollout)
    old = old_log_probs(config, corrected)
    check_correction(config, loss, corrected, old)
    check_mismatch(config, loss, corrected)
    reference = settings.kl.coefficient > 0 or "reference" in wanted or _reads_reference(chosen, loss)
    supplied = _supplied(config, estimator is not None, reference, mixes)
    prepared = _prepared(loss, supplied)
    resolved = ResolvedAlgorithm(
        loss=chosen.loss,
        loss_options=_loss_options(config, chosen),
        loss_columns=_loss_columns(config, loss, supplied, prepared, corrected),
        advantages=chosen.advantages,
        advantages_options=chosen.advantages_options,
        old_log_probs="old_log_probs" if old == "engine" else "rollout_log_probs",
        recompute_old_log_probs=corrected or (old == "engine" and _reads_old(config, loss, estimator)),
        shaping=settings.shaping,
        correction=used_correction(config, old) if corrected else None,
        kl_in_reward=settings.kl.name if settings.kl.in_reward and settings.kl.coefficient > 0 else None,
        prepares=bool(prepared),
        whole_groups=loss.scope_with(chosen.loss_options) in ("group", "batch"),
        critic="critic" in wanted or "values" in wanted,
        reference=reference,
        dynamic_sampling=_dynamic_sampling(config, chosen),
        greedy_baseline="baseline_rewards" in wanted,
        reward_dimensions=settings.reward_dimensions,
        experts=experts,
        mixes=mixes,
        pairs="pair_ids" in (*loss.needs, *loss.accepts),
    )
    _check_supply(config, chosen, resolved, loss, estimator, supplied, prepared)
    _check_effect(config, resolved)
    return resolved


def _algorithm(config: RunConfig) -> Algorithm:
    """The bundle with what the configuration replaces."""
    chosen, settings = algorithm(config.algorithm.name), config.algorithm
    loss, loss_options = _replaced("loss", settings.loss, chosen.loss, chosen.loss_options)
    estimator, options = _replaced("advantages", settings.advantages, chosen.advantages, chosen.advantages_options)
    assert loss is not None, "every bundle has a loss"
    chosen = attrs.evolve(
        chosen, loss=loss, loss_options=loss_options, advantages=estimator, advantages_options=options
    )
    if settings.aggregation is not None:
        chosen = attrs.evolve(chosen, aggregation=settings.aggregation)
    assert chosen.parts  # looks every name up
    return chosen


def _reads_reference(chosen: Algorithm, loss: Part) -> bool:
    return "ref_log_probs" in loss.needs or chosen.loss_options.get("reference") == "ref"


def _replaced(
    kind: str, given: PartSettings | None, name: str | None, options: Mapping[str, Any]
) -> tuple[str | None, Mapping[str, Any]]:
    """Another part has its own defaults; the bundle's own part keeps the bundle's options beside those given."""
    if given is None:
        return name, options
    chosen = name if given.name is None else given.name
    if chosen is None:
        return None, {}
    checked = check_values(part(kind, chosen), given.options, f"algorithm.{kind}.options")
    return chosen, {**(options if chosen == name else {}), **checked}


def _check_mode(config: RunConfig, chosen: Algorithm) -> None:
    if config.mode == "offline" and chosen.advantages is not None:
        raise ConfigError(
            f"algorithm {config.algorithm.name!r} needs rewards, and mode 'offline' has none",
            where="mode",
            expected="mode: online, or an algorithm that learns from the data's own answers (sft, dpo)",
        )
    if config.mode == "online" and chosen.advantages is None:
        raise ConfigError(
            f"algorithm {config.algorithm.name!r} learns from the data's own answers",
            where="mode",
            expected="mode: offline",
            found="mode: online",
        )
    if config.mode == "online":
        check_sampling(config.sampling)


def _supplied(config: RunConfig, estimates: bool, reference: bool, experts: bool) -> frozenset[str]:
    """Inputs of a loss that its data can have. ``rewards`` is for those that cannot do without: an advantage says the
    same after shaping."""
    supplied = {"old_log_probs"}
    if estimates:
        supplied |= {"advantages", "rollout_log_probs"}
    if reference:
        supplied.add("ref_log_probs")
    if experts:
        supplied.add("expert_mask")
    return frozenset(supplied)


def _prepared(loss: Part, supplied: frozenset[str]) -> tuple[str, ...]:
    """The columns of the whole batch that this loss gets."""
    columns = tuple(name for name in loss.whole_batch if name not in COUNTS)
    if not columns or loss.prepare is None:
        return ()
    there = supplied | {"log_probs", "response_mask", "group_ids", "pair_ids"}
    needed = {name for name, required in loss.prepare_inputs.items() if required}
    return columns if needed <= there else ()


def _loss_columns(
    config: RunConfig, loss: Part, supplied: frozenset[str], prepared: tuple[str, ...], corrects: bool
) -> tuple[str, ...]:
    wanted = ({*loss.needs, *loss.accepts} & supplied) | set(prepared)
    if "rewards" in loss.needs:
        wanted.add("rewards")
    if corrects:
        wanted.add("rollout_weights")
    if config.algorithm.kl.coefficient and not config.algorithm.kl.in_reward:
        estimator = part("kl", config.algorithm.kl.name)
        wanted |= {"ref_log_probs"} | ({"old_log_probs"} & {*estimator.needs, *estimator.accepts})
    return tuple(sorted(wanted))


def _reads_old(config: RunConfig, loss: Part, estimator: Part | None) -> bool:
    """Whether anything looks at the policy before the update."""
    parts = [loss, *([estimator] if estimator else [])]
    if config.algorithm.kl.coefficient:
        parts.append(part("kl", config.algorithm.kl.name))
    return config.algorithm.kl.in_reward or any("old_log_probs" in (*one.needs, *one.accepts) for one in parts)


def _loss_options(config: RunConfig, chosen: Algorithm) -> dict[str, Any]:
    settings = config.algorithm
    options = {**chosen.loss_options, "aggregation": chosen.aggregation}
    if settings.kl.coefficient and not settings.kl.in_reward:
        options["kl"] = settings.kl.name
    if settings.entropy_coefficient:
        options["entropy_coefficient"] = settings.entropy_coefficient
    return options


def _dynamic_sampling(config: RunConfig, chosen: Algorithm) -> bool:
    given = config.algorithm.dynamic_sampling
    return "dynamic_sampling" in chosen.needs if given is None else given


def _check_supply(
    config: RunConfig,
    chosen: Algorithm,
    resolved: ResolvedAlgorithm,
    loss: Part,
    estimator: Part | None,
    supplied: frozenset[str],
    prepared: tuple[str, ...],
) -> None:
    """Refuse what cannot be had, by name."""
    inputs = _ESTIMATOR_INPUTS | _RUN_INPUTS
    of_loss = supplied | {*COUNTS, *prepared, "rewards", "log_probs", "response_mask", "pair_ids", "expert_mask"}
    missing = sorted(
        {name for name in chosen.needs if name not in inputs | _KNOWN_NEEDS}
        | {name for name in (estimator.needs if estimator else ()) if name not in inputs}
        | {name for name in loss.needs if name not in of_loss}
    )
    if missing:
        raise ConfigError(
            f"algorithm {config.algorithm.name!r} needs what a run cannot supply: {', '.join(missing)}",
            where="algorithm",
            expected="parts whose inputs a run has; `jackfield algorithms show NAME` tells them",
            fix="choose another estimator or loss",
        )
    if "expert_mask" in loss.needs and not resolved.mixes:
        raise ConfigError(
            f"loss {loss.name} learns from an expert's answers, too, and there are none",
            code="config.missing-key",
            where="data.expert",
            fix="name a JSONL file of tasks with answers as data.expert, and set data.expert_samples_per_batch; "
            "or rows as mixing.expert",
        )
    if estimator is not None and "reward_dimensions" in estimator.needs and not resolved.reward_dimensions:
        raise ConfigError(
            f"advantages {estimator.name} compares several rewards, and none are named",
            code="config.missing-key",
            where="algorithm.reward_dimensions",
            expected="names of the reward's metrics; score is the score itself",
        )
    if resolved.pairs and config.data.format.rejected_key is None:
        raise ConfigError(
            f"loss {loss.name} compares two answers, and the data's format names one",
            code="config.missing-key",
            where="data.format.rejected_key",
            fix="name the fields of the better and of the worse answer: response_key and rejected_key",
        )


def _check_effect(config: RunConfig, resolved: ResolvedAlgorithm) -> None:
    """A setting that does nothing here is an error."""
    settings = config.algorithm
    idle = {
        "critic": (config.critic != CriticSettings() and not resolved.critic, "an estimator with a critic (gae)"),
        "mixing.expert": (config.mixing.expert is not None and not resolved.mixes, "a loss with an expert (mix)"),
        "data.expert": (config.data.expert is not None and not resolved.experts, "a loss with an expert (mix)"),
        "algorithm.reward_dimensions": (
            bool(resolved.reward_dimensions)
            and not (resolved.advantages and _takes(resolved.advantages, "reward_dimensions")),
            "an estimator of several rewards (gdpo)",
        ),
        "algorithm.shaping": (
            resolved.advantages is not None
            and settings.shaping.active
            and _takes(resolved.advantages, "reward_dimensions"),
            "an estimator of one reward",
        ),
        "weights": (
            config.weights.kind == "full" and attrs.evolve(config.weights, dtype=None) != WeightsConfig(),
            "weights.kind: delta, for block_bytes and on_missing_base",
        ),
        "data.format.rejected_key": (
            config.data.format.rejected_key is not None and not resolved.pairs,
            "a loss that compares two answers (dpo)",
        ),
        "algorithm.kl.target": (
            settings.kl.target is not None and not settings.kl.coefficient,
            "algorithm.kl.coefficient above 0, where the controller begins",
        ),
        "algorithm.kl.in_reward": (
            settings.kl.in_reward and resolved.advantages is None,
            "an algorithm with rewards",
        ),
    }
    for where, (useless, expected) in idle.items():
        if useless:
            raise ConfigError(
                f"{where} has no effect on algorithm {settings.name!r}", where=where, expected=expected, fix="remove it"
            )


def _takes(estimator: str, name: str) -> bool:
    chosen = part("advantages", estimator)
    return name in (*chosen.needs, *chosen.accepts)
