"""Resolution of a configuration's algorithm: its components, options and inputs."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import attrs

from jackfield.algorithms import Algorithm, Part, algorithm, part
from jackfield.algorithms.registry import COUNTS
from jackfield.algorithms.settings import CriticSettings, ResolvedAlgorithm
from jackfield.algorithms.shaping import Correction
from jackfield.compose.schedules import check_schedule
from jackfield.config.data import paths_of
from jackfield.config.sections import RunConfig, WeightsConfig
from jackfield.data.formats import AUTO
from jackfield.data.tokens import HuggingFaceChatTokenizer
from jackfield.plugins import Manifest, Registry
from jackfield.queue.sample_files import holds_samples

#: Inputs that an estimator can get from every batch, and those that a run adds if an estimator needs them.
_ESTIMATOR_INPUTS = {"token_rewards", "response_mask", "group_ids", "rollout_ids", "step_ids", "anchor_ids"}
_ESTIMATOR_INPUTS |= {"old_log_probs", "values", "reward_dimensions", "baseline_rewards"}


def load_tokenizer(config: RunConfig) -> HuggingFaceChatTokenizer:
    """Load the tokenizer of the model, with the configured chat template; pictures are in the folders of the data."""
    template, trusted, data = config.data.chat_template, config.model.trust_remote_code, config.data
    found = HuggingFaceChatTokenizer.load(config.model.path, chat_template=template, trust_remote_code=trusted)
    given = (data.train, data.eval, data.expert, *(one.file for one in config.evaluation.sets.values()))
    files = [path for each in given for path in paths_of(each)]
    if data.tools or data.template_options:
        found = found.with_template(data.tools, data.template_options)
    found.image_folders = tuple(dict.fromkeys(Path(file).parent for file in files))
    return found


def has_arrays(config: RunConfig, registry: Registry) -> bool:
    """Return whether samples have the column ``multi_modal_inputs``: images, or the experts of each token."""
    return config.model.router_replay or has_images(config, registry)


def has_images(config: RunConfig, registry: Registry) -> bool:
    """Return whether the agent has the capability ``multi_modal``."""
    return agent_has(config, registry, "multi_modal")


def agent_has(config: RunConfig, registry: Registry, capability: str) -> bool:
    """Return whether the agent declares a capability."""
    level = registry.resolve(config.agent.name, "agent").usable().capabilities.get(capability)
    return level is not None and level != "unsupported"


def resolve_algorithm(config: RunConfig, rollout: Manifest) -> ResolvedAlgorithm:
    """Return the algorithm with every choice made that the configuration leaves open, or refuse the configuration.

    The manifest of the rollout plugin says whether its log-probs are exactly the engine's.
    """
    settings, chosen = config.algorithm, _algorithm(config)
    loss = part("loss", chosen.loss)
    estimator = part("advantages", chosen.advantages) if chosen.advantages else None
    named = part("kl", settings.kl.name)  # an unknown name is refused where it has no effect, too
    kl = named if settings.kl.coefficient or settings.kl.measure else None
    correction, from_engine = _correction(config, loss, rollout, sampled=estimator is not None)
    needs, learns = chosen.needs, "expert_mask" in loss.needs
    experts = config.data.expert_samples_per_batch if learns and config.data.expert else 0
    mixes = experts > 0 or (learns and (config.mixing.expert or config.mixing.made) is not None)
    reads_old = settings.kl.in_reward or any("old_log_probs" in one.inputs for one in (loss, estimator, kl) if one)
    options, read = {**chosen.loss_options, "aggregation": chosen.aggregation}, {*loss.inputs, "rollout_weights"}
    reference = kl is not None or "reference" in needs or options.get("reference") == "ref"
    if kl is not None and not settings.kl.in_reward:
        options["kl"], read = kl.name, read.union(kl.inputs)
    if settings.entropy_coefficient:
        options["entropy_coefficient"] = settings.entropy_coefficient
    sampled, preparation, prepared = estimator is not None, loss.preparation, dict[str, str]()
    there = {"old_log_probs": "rollout_log_probs" if sampled and not from_engine else "old_log_probs"}
    given = {"advantages": sampled, "rollout_log_probs": sampled, "ref_log_probs": reference, "expert_mask": mixes}
    there |= {name: name for name, known in given.items() if known}
    offered = dict.fromkeys({*there, *loss.options, "log_probs", "response_mask", "group_ids", "pair_ids"}, True)
    if preparation is not None and not preparation.missing(offered):
        prepared = {name: there[name] for name in there.keys() & preparation.inputs.keys()} | {"log_probs": "log_probs"}
        there |= {name: name for name in loss.whole_batch}
    # only losses that require rewards get them; others use advantages, which include shaping
    given = {"rewards": "rewards" in loss.needs, "rollout_weights": correction is not None}
    there |= {name: name for name, known in given.items() if known}
    resolved = ResolvedAlgorithm(
        **{**attrs.asdict(chosen, recurse=False), "loss_options": options},
        loss_columns={name: there[name] for name in sorted(there.keys() & read)},
        prepared_columns=prepared,
        old_log_probs=there["old_log_probs"],
        recompute_old_log_probs=correction is not None or (from_engine and reads_old),
        shaping=settings.shaping,
        correction=correction,
        kl_in_reward=settings.kl.name if settings.kl.in_reward and kl else None,
        whole_groups=loss.scope_with(chosen.loss_options) in ("group", "batch"),
        critic="critic" in needs,
        reference=reference,
        greedy_baseline="baseline_rewards" in needs,
        experts=experts,
        sequence_weight=settings.sequence_weight,
        pairs=preparation is not None and "pair_ids" in preparation.inputs,
    )
    _check(config, resolved, there.keys())
    check_schedule(config, resolved)
    return resolved


def _algorithm(config: RunConfig) -> Algorithm:
    """Return the bundle with the components and options that the configuration replaces.

    A replaced component has its own default options. The bundle's component keeps the bundle's other options. Refuse
    an algorithm for the other mode, and sampling that cannot be trained on.
    """
    settings, chosen, online = config.algorithm, algorithm(config.algorithm.name), config.mode != "offline"
    changed: dict[str, Any] = {"aggregation": settings.aggregation or chosen.aggregation}
    changed |= {} if settings.dynamic_sampling is None else {"dynamic_sampling": settings.dynamic_sampling}
    changed |= {"dynamic_sampling": False} if config.mode == "train" else {}  # no explorer generates groups again
    for kind in ("loss", "advantages"):
        given, own = getattr(settings, kind), getattr(chosen, kind)
        name = own if given is None or given.name is None else given.name
        if given is not None and name is not None:
            options = getattr(chosen, f"{kind}_options") if name == own else {}
            checked = part(kind, name).checked(given.options, f"algorithm.{kind}.options")
            changed |= {kind: name, f"{kind}_options": {**options, **checked}}
    chosen = attrs.evolve(chosen, **changed)
    assert chosen.parts  # looks up every name
    if chosen.advantages is not None and not online:
        expected = "online, or an algorithm that learns from the data's own answers (sft, dpo)"
        raise config.refusal("mode", f"algorithm {settings.name!r} needs rewards; mode 'offline' has none", expected)
    if chosen.advantages is None and online:
        raise config.refusal("mode", f"algorithm {settings.name!r} learns from the data's own answers", "offline")
    if online and config.sampling.temperature == 0:
        what = "greedy responses cannot be trained on: all rollouts of a task are equal"
        raise config.refusal("sampling.temperature", what, "more than 0 (evaluation.sampling may be greedy)")
    if online and config.sampling.log_probs == "raw":
        what = "raw log-probs are not those of the distribution that training responses are drawn from"
        raise config.refusal("sampling.log_probs", what, "processed (evaluation.sampling may have raw ones)")
    return chosen


def _check(config: RunConfig, resolved: ResolvedAlgorithm, there: Set[str]) -> None:
    """Refuse inputs that the run cannot provide, and settings that have no effect on this algorithm."""
    loss, kl, weights = part("loss", resolved.loss), config.algorithm.kl, config.weights
    dimensions, missing_key = config.algorithm.reward_dimensions, "config.missing-key"
    estimator = part("advantages", resolved.advantages) if resolved.advantages else None
    needs, mixes = {*estimator.needs} if estimator else set(), "expert_mask" in resolved.loss_columns
    of_loss = there | {*COUNTS, "rewards", "log_probs", "response_mask", "pair_ids", "expert_mask"}
    if missing := (needs - _ESTIMATOR_INPUTS) | ({*loss.needs} - of_loss):
        what = f"algorithm {config.algorithm.name!r} needs what a run cannot supply: {', '.join(sorted(missing))}"
        expected = "parts whose inputs a run has; `jackfield algorithms show NAME` tells them"
        raise config.refusal("algorithm", what, expected)
    if "expert_mask" in loss.needs and not mixes:
        what = f"loss {loss.name} learns from an expert's answers, too, and there are none"
        expected = "a JSONL file of tasks with answers, and data.expert_samples_per_batch; or rows as mixing.expert"
        raise config.refusal("data.expert", what, expected, code=missing_key)
    if "reward_dimensions" in needs and not dimensions:
        what = f"advantages {resolved.advantages} compares several rewards, and none are named"
        expected = "names of the reward's metrics; score is the score itself"
        raise config.refusal("algorithm.reward_dimensions", what, expected, code=missing_key)
    form, archived = config.data.format, any(holds_samples(Path(path)) for path in paths_of(config.data.train))
    if resolved.pairs and form.is_given and form.rejected_key in (None, AUTO) and not archived:
        what = f"loss {loss.name} compares two answers, and the data's format names one"
        expected = "the field of the worse answer, beside response_key, that of the better one"
        raise config.refusal("data.format.rejected_key", what, expected, code=missing_key)
    compares = estimator is not None and "group_ids" in estimator.inputs and "anchor_ids" not in estimator.inputs
    if compares and config.data.rollouts_per_group < 2:
        what = f"advantages {resolved.advantages} compares the rollouts of a task: with one they are all 0"
        raise config.refusal("data.rollouts_per_group", what, "2 or more, or an estimator without groups (reinforce)")
    if config.agent_service.extra_rollouts and resolved.greedy_baseline:
        what = f"algorithm {config.algorithm.name!r} has a greedy rollout in each group, which is not exchangeable"
        raise config.refusal("agent_service.extra_rollouts", what, "0")
    if config.data.minimum_rows and (resolved.greedy_baseline or resolved.pairs):
        what = f"algorithm {config.algorithm.name!r} needs each sample of a group"
        raise config.refusal("data.minimum_rows", what, "null")
    several, full = estimator is not None and "reward_dimensions" in estimator.inputs, weights.kind == "full"
    by_rollout = config.algorithm.sequence_weight == "rollout"
    of_full = WeightsConfig(dtype=weights.dtype, in_turns=weights.in_turns)
    for idle, where, expected in (
        (config.critic != CriticSettings() and not resolved.critic, "critic", "an estimator with a critic (gae)"),
        (config.mixing.expert and not mixes, "mixing.expert", "a loss with an expert (mix)"),
        (config.mixing.made and not mixes, "mixing.made", "a loss with an expert (mix)"),
        (config.mixing.made and not config.data.pipeline.experiences, "mixing.made", "data.pipeline.experiences"),
        (config.data.expert and not resolved.experts, "data.expert", "a loss with an expert (mix)"),
        (dimensions and not several, "algorithm.reward_dimensions", "an estimator of them (gdpo)"),
        (config.algorithm.shaping.active and several, "algorithm.shaping", "an estimator of one reward"),
        (full and weights != of_full, "weights", "kind: delta, for what a delta has"),
        (
            form.rejected_key not in (None, AUTO) and not resolved.pairs,
            "data.format.rejected_key",
            "a loss of pairs (dpo)",
        ),
        (kl.target and not kl.coefficient, "algorithm.kl.target", "algorithm.kl.coefficient above 0, where it begins"),
        (kl.measure and (kl.coefficient or kl.in_reward), "algorithm.kl.measure", "coefficient: 0, in_reward: false"),
        (kl.in_reward and estimator is None, "algorithm.kl.in_reward", "an algorithm with rewards"),
        (by_rollout and estimator is None, "algorithm.sequence_weight", "an algorithm with rewards"),
    ):
        if idle:
            what = f"{where} has no effect on algorithm {config.algorithm.name!r}"
            raise config.refusal(where, what, expected, fix=f"leave out {where}, or use {expected}")


def _correction(config: RunConfig, loss: Part, rollout: Manifest, *, sampled: bool) -> tuple[Correction | None, bool]:
    """Return the correction, and whether the old log-probs come from the engine.

    It is on by default if numerics differ or the schedule is asynchronous, and the loss takes token weights but does
    not weight itself. If the old log-probs are the rollout server's, the loss's ratio already weights, and the
    correction only rejects. Sampling filters change the server's log-probs: ratios to them would not start at 1.
    """
    settings, given, active = config.algorithm.correction, config.algorithm.old_log_probs, config.sampling_filters
    mismatch, weighs_itself = config.log_prob_check.on_mismatch == "correct", "rollout_log_probs" in loss.inputs
    exact = rollout.capabilities.get("engine_log_probs") == "full" and not config.rounds and not active
    differs = mismatch or not exact or config.schedule.mode == "async"
    fits = differs and not loss.per_sequence and not weighs_itself
    corrects = sampled and (fits if settings.enabled is None else settings.enabled)
    around_old = weighs_itself and "old_log_probs" in loss.inputs  # decoupled PPO: it weights by old over rollout
    from_engine = given == "engine" or (given == "auto" and bool(corrects or active or around_old))
    if given == "rollout" and active:
        what = "the rollout server's log-probs are of what the sampling filters leave, not of the policy"
        expected = f"engine or auto, or no {', '.join(f'sampling.{name}' for name in active)}"
        raise config.refusal("algorithm.old_log_probs", what, expected)
    where = "algorithm.correction"
    if corrects and loss.per_sequence:
        what = f"loss {loss.name} has one value per sequence, which weights of tokens cannot correct"
        raise config.refusal(where, what, f"{where}.enabled: false")
    if corrects and not from_engine and settings.reject == "none":
        what = "around the rollout server's log-probs the loss's own ratio corrects: only to reject is left to do"
        expected = "algorithm.old_log_probs: engine (weights), or a reject (whole tokens or responses are left out)"
        raise config.refusal(where, what, expected)
    if mismatch and not corrects and not weighs_itself:
        what = "the run does not correct for other log-probs than the engine's"
        expected = f"stop or warn, or a loss that importance weights can correct, without {where}.enabled: false"
        raise config.refusal("log_prob_check.on_mismatch", what, expected)
    default = attrs.asdict(Correction(enabled=settings.enabled))
    idle = [name for name, value in attrs.asdict(settings).items() if value != default[name] and not corrects]
    if idle:
        raise config.refusal(f"{where}.{idle[0]}", "nothing is corrected in this run", "the default, or enabled: true")
    used = settings if from_engine else attrs.evolve(settings, bound="none", batch_normalize=False)
    return used if corrects else None, from_engine
