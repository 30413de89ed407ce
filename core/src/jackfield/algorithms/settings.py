"""The sections ``algorithm`` and ``critic`` of the configuration, and the algorithms that they name.

The package imports the modules of the parts before this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import attrs
from attrs.validators import ge, gt, le, optional

from jackfield.abc.engine import OptimizerSpec
from jackfield.algorithms.registry import Part, Scope, part, register
from jackfield.algorithms.shaping import Correction, Shaping
from jackfield.errors import ConfigError
from jackfield.settings import option

#: Inputs that the trainer always has.
_ALWAYS = frozenset(
    {"global_sequences", "global_tokens", "kept", "length_norm", "log_probs", "mask", "response_mask", "token_rewards"}
)
_SAMPLED = {"advantages", "group_ids", "old_log_probs", "rewards"}  #: inputs that it has of samples with rewards
_WORDS = {"values": "critic", "expert_mask": "expert_data", "pair_ids": "pairs", "ref_log_probs": "reference"}


@attrs.frozen(kw_only=True)
class PartSettings:
    """A registered part by name, with its options."""

    name: str | None = option(None, "name of the part; null: the bundle's part")
    options: Mapping[str, Any] = option(
        factory=dict, help="the part's settings; for the bundle's part they are added to the bundle's settings"
    )


@attrs.frozen(kw_only=True)
class KLSettings:
    """A KL penalty to the reference policy, in the loss or in the reward."""

    name: str = option(
        "k3",
        "the estimator: k1, k2, k3, abs, low_var_kl, k3_corrected, or the value of one with k2's gradient: k1+, "
        "k3+, abs+, low_var_kl+",
    )
    coefficient: float = option(0.0, "weight of the penalty; 0: off, and no reference model is loaded for it", ge(0.0))
    in_reward: bool = option(False, "subtract the penalty from each token's reward instead of adding it to the loss")
    measure: bool = option(
        False,
        "report the KL to the initial model also where it is no penalty: one more forward pass per batch, without LoRA "
        "of a second model",
    )
    initial_responses: int = option(
        8,
        "responses of the initial model on which every step reports how far the policy has moved from it "
        "(policy/initial_kl); 0: none",
        ge(0),
    )
    target: float | None = option(
        None, "KL per token that an adaptive controller steers the coefficient to; null: constant", gt(0.0)
    )
    horizon: float = option(10000.0, "number of samples over which the controller corrects", gt(0.0))

    def adapted(self, coefficient: float, current: float, samples: int) -> float:
        """Return the coefficient after ``samples`` samples with KL ``current`` per token; constant without a target.

        It is multiplied by 1 + clip(current / target - 1, -0.2, 0.2) * samples / horizon (Ziegler et al.,
        arXiv:1909.08593, section 2.2). A KL that is not finite is refused (``algorithm.not-finite``).
        """
        if self.target is None:
            return coefficient
        if not math.isfinite(current):
            raise ConfigError(f"the KL is {current}", code="algorithm.not-finite", where="algorithm.kl.target")
        error = min(max(current / self.target - 1.0, -0.2), 0.2)
        return coefficient * (1.0 + error * samples / self.horizon)


@attrs.frozen(kw_only=True)
class AlgorithmSettings:
    """A named bundle of parts, any of which can be replaced."""

    name: str = option("grpo", "the bundle; `jackfield algorithms list --kind algorithm` shows them")
    advantages: PartSettings | None = option(None, "advantage estimator that replaces the bundle's")
    loss: PartSettings | None = option(None, "policy loss that replaces the bundle's")
    aggregation: str | None = option(None, "aggregation of token losses that replaces the bundle's")
    kl: KLSettings = option(factory=KLSettings, help="KL penalty to the reference policy")
    entropy_coefficient: float = option(
        0.0, "weight of the entropy bonus; negative values penalise entropy", [ge(-100.0), le(100.0)]
    )
    mini_batches: int = option(1, "optimizer steps that one batch is split into", gt(0))
    epochs: int = option(1, "passes over one batch", gt(0))
    scope: Literal["batch", "mini_batch"] = option(
        "batch",
        "what estimators that compare a whole batch (reinforce_plus_plus, gpg, whitening) compare; mini_batch: the "
        "mini-batch, for schedule.stream_mini_batches",
    )
    old_log_probs: Literal["auto", "rollout", "engine"] = option(
        "auto",
        "source of the old policy's log-probs, the denominator of ratios: the rollout server (bypass) or the engine, "
        "which recomputes them (decoupled); auto: engine with the correction, decoupled_ppo or sampling filters",
    )
    correction: Correction = option(factory=Correction, help="off-policy correction")
    shaping: Shaping = option(factory=Shaping, help="reward shaping before advantages are estimated")
    sequence_weight: Literal["sequence", "rollout"] = option(
        "sequence",
        "weight of a sample if its rollout has several (agents with branches, sub-agents, steps); sequence: 1 each; "
        "rollout: 1 divided by their number",
    )
    dynamic_sampling: bool | None = option(None, "replace groups whose rewards are equal; null: the bundle's choice")
    reward_dimensions: tuple[str, ...] = option(
        (), "metrics of the reward that are separate rewards (gdpo); score is the score itself"
    )


@attrs.frozen(kw_only=True)
class CriticSettings:
    """The critic of algorithms that have one (ppo): a model with a value head, trained beside the policy."""

    path: str | None = option(None, "Hugging Face folder of the critic; null: the policy's")
    optimizer: OptimizerSpec = option(factory=OptimizerSpec, help="AdamW and its learning-rate schedule")
    clip: float | None = option(
        0.2, "clip range of predictions around the values before the update; null: off", optional(gt(0.0))
    )
    warmup_steps: int = option(0, "number of first steps in which only the critic is trained", ge(0))


@attrs.frozen(kw_only=True)
class Algorithm:
    """A combination of an advantage estimator, a policy loss and an aggregation."""

    advantages: str | None = None  #: None: the data's own answers are the target
    advantages_options: Mapping[str, Any] = attrs.field(factory=dict)
    loss: str
    loss_options: Mapping[str, Any] = attrs.field(factory=dict)
    aggregation: str = "token-mean"
    dynamic_sampling: bool = False  #: groups whose rewards are all equal are replaced

    @property
    def parts(self) -> tuple[Part, ...]:
        """The registered parts."""
        chosen = {"loss": self.loss, "aggregation": self.aggregation, "advantages": self.advantages}
        return tuple(part(kind, name) for kind, name in chosen.items() if name)

    @property
    def scope(self) -> Scope:
        """The widest scope of its parts, under their options."""
        scopes: tuple[Scope, ...] = get_args(Scope)
        return max((one.scope_with(getattr(self, f"{one.kind}_options", {})) for one in self.parts), key=scopes.index)

    @property
    def needs(self) -> tuple[str, ...]:
        """The requirements beside rewards, groups and old log-probs; a program that lacks one must refuse.

        They are ``critic``, ``reference``, ``expert_data``, ``pairs``, ``dynamic_sampling``, ``prepare`` (columns of
        :func:`jackfield.algorithms.prepare`), or the name of another input.
        """
        found = ["dynamic_sampling"] if self.dynamic_sampling else []
        for one in self.parts:
            prepares = one.preparation is not None and any(one.inputs[name] for name in one.whole_batch)
            inputs = (*one.needs, *(one.preparation.needs if one.preparation and prepares else ()))
            found += [_WORDS.get(name, name) for name in inputs if name not in _ALWAYS.union(_SAMPLED, one.options)]
            found += ["prepare"] if prepares else []
        return tuple(dict.fromkeys(found))


@attrs.frozen(kw_only=True)
class ResolvedAlgorithm(Algorithm):
    """The algorithm of a run with every choice made, as plain values for workers.

    ``loss_options`` include ``aggregation``, ``kl`` and ``entropy_coefficient``.
    """

    #: columns that the loss reads in addition to the sample, by its names
    loss_columns: Mapping[str, str] = attrs.field(factory=dict)
    prepared_columns: Mapping[str, str] = attrs.field(factory=dict)  #: those of its preparation; empty: it has none
    old_log_probs: str = "rollout_log_probs"  #: the column of the policy before the update
    recompute_old_log_probs: bool = False
    shaping: Shaping = attrs.field(factory=Shaping)
    correction: Correction | None = None  #: None: off
    kl_in_reward: str | None = None  #: estimator of the KL penalty in the reward; None: off
    whole_groups: bool = False  #: mini-batches do not split groups
    critic: bool = False
    reference: bool = False  #: there is a column ``ref_log_probs``
    greedy_baseline: bool = False
    experts: int = 0  #: samples of an expert in each batch, from the data
    pairs: bool = False
    sequence_weight: str = "sequence"  #: what has weight 1: a sequence, or a rollout with all its sequences

    @property
    def prepares(self) -> bool:
        """True if the loss needs columns of the whole batch."""
        return bool(self.prepared_columns)

    def as_plain(self) -> dict[str, Any]:
        """Return the choices as plain values, as ``jackfield config validate --json`` prints them."""
        needs = ("critic", "reference", "prepares", "dynamic_sampling", "greedy_baseline", "pairs", "whole_groups")
        return {
            "loss": {"name": self.loss, "options": dict(self.loss_options)},
            "advantages": self.advantages and {"name": self.advantages, "options": dict(self.advantages_options)},
            "columns": list(self.loss_columns),
            "needs": [name for name in needs if getattr(self, name)],
            "old_log_probs": "rollout" if self.old_log_probs == "rollout_log_probs" else "engine",
            "recomputes_old_log_probs": self.recompute_old_log_probs,
            "corrects": self.correction is not None,
        }


def algorithm(name: str) -> Algorithm:
    """Return the algorithm with this name, or raise ``algorithm.unknown``."""
    found: Algorithm = part("algorithm", name).function()
    return found


def describe(chosen: Part) -> dict[str, Any]:
    """Return equation, paper, options, needs and scope of a part as plain values."""
    equation, paper, differs = chosen.text
    fields: dict[str, Any] = {"kind": chosen.kind, "name": chosen.name, "equation": equation, "paper": paper}
    fields |= {"scope": chosen.scope, "batch_options": dict(chosen.batch_options)}
    fields["origin"] = chosen.origin or chosen.function.__module__.partition(".")[0]
    if chosen.kind == "algorithm":
        made: Algorithm = chosen.function()
        return {**fields, **attrs.asdict(made), "needs": list(made.needs), "differs": differs}
    prepared = {} if chosen.preparation is None else chosen.preparation.inputs
    hidden = _ALWAYS.union(chosen.needs, chosen.options)
    of_steps = "rollouts, whose sequences are their steps" if "rollout_ids" in chosen.inputs else "sequences"
    return {
        **fields,
        **({"compares": of_steps} if "group_ids" in chosen.inputs and chosen.kind == "advantages" else {}),
        "needs": [name for name in chosen.needs if name not in _ALWAYS],
        "optional": [name for name in {**chosen.inputs, **prepared} if name not in hidden],
        "options": {name: None if repr(value).startswith("<") else value for name, value in chosen.options.items()},
        "ranges": dict(chosen.ranges),
        "precomputed": list(chosen.whole_batch),
        "differs": differs,
    }


_SUM, _MEAN = "seq-mean-token-sum", "seq-mean-token-mean"


def _named(
    name: str, loss: str, advantages: str | None, aggregation: str = "token-mean", **fields: Any
) -> Callable[..., None]:
    """Register an algorithm; return a function that takes its description, paper and difference."""
    chosen = Algorithm(loss=loss, advantages=advantages, aggregation=aggregation, **fields)

    def describe(text: str, paper: str = "", differs: str = "") -> None:
        make = lambda: chosen  # noqa: E731 (its docstring is set)
        make.__doc__ = f"{text} [{paper}]\n\nDiffers: {differs}"
        register("algorithm", name, chosen.scope)(make)

    return describe


_named("grpo", "ppo", "grpo")("group-relative advantages, PPO's loss.", "arXiv:2402.03300")
_named("sft", "sft", None)("likelihood of given answers.")
_named("ppo", "ppo", "gae")("GAE with a critic, PPO's loss.", "arXiv:1707.06347")
_named("dr_grpo", "ppo", "dr_grpo", _SUM, loss_options={"clip_dual": None})(
    "rewards less the group's mean; sums over tokens, so that length has no bias.",
    "arXiv:2503.20783",
    "The paper also divides by a constant, a factor of the learning rate: aggregation seq-mean-token-sum-norm with "
    "the loss option length_norm.",
)
_DAPO = {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": None}
_named("dapo", "ppo", "grpo", loss_options=_DAPO, dynamic_sampling=True)(
    "GRPO with a higher upper clip, a token mean and groups of mixed results only.",
    "arXiv:2503.14476",
    "The overlong penalty is a reward shaping of its own (overlong_penalty).",
)
_named("rloo", "reinforce", "rloo", _SUM)("leave-one-out baseline, policy gradient per response.", "arXiv:2402.14740")
_named("opo", "reinforce", "opo", _SUM)("length-weighted baseline, policy gradient per response.", "arXiv:2505.23585")
_named("reinforce_plus_plus", "ppo", "reinforce_plus_plus")(
    "reward to go, normalised over the batch, PPO's loss.", "arXiv:2501.03262"
)
_named("reinforce_plus_plus_baseline", "ppo", "reinforce_plus_plus_baseline")(
    "rewards less the group's mean, normalised over the batch, PPO's loss.", "arXiv:2501.03262"
)
_named("remax", "reinforce", "remax", _SUM)(
    "the greedy response's reward as baseline, policy gradient per response.", "arXiv:2310.10505"
)
_named("gpg", "gpg", "gpg")("group policy gradient.", "arXiv:2504.02546")
_named("gdpo", "ppo", "gdpo")("several rewards, each normalised in the group, PPO's loss.", "arXiv:2601.05242")
_named("gspo", "gspo", "grpo", _MEAN)("group-relative advantages, a clipped ratio per sequence.", "arXiv:2507.18071")
_named("gmpo", "gmpo", "grpo", _MEAN)("group-relative advantages, geometric mean of ratios.", "arXiv:2507.20673")
_named("cispo", "cispo", "grpo")("group-relative advantages, clipped weights.", "arXiv:2506.13585")
_named("sapo", "sapo", "grpo", _MEAN)("group-relative advantages, a soft gate.", "arXiv:2511.20347")
_named("m2po", "m2po", "grpo")("group-relative, with a second-moment trust region for stale data.", "arXiv:2510.01161")
_named("decoupled_ppo", "decoupled_ppo", "grpo")(
    "group-relative advantages, PPO's loss around pi_old, weighted for the policy that generated.", "arXiv:2110.00641"
)
_named("topr", "topr", "topr", _SUM)("rewards as they are, tapered importance weights.", "arXiv:2503.14286")
_named("asymre", "reinforce", "asymre", _SUM)(
    "a baseline below the group's mean, policy gradient per response.", "arXiv:2506.20520"
)
_named("opmd", "opmd", "opmd")("online policy mirror descent, the simple form.", "arXiv:2505.17826, appendix A.3")
_OLD, _LOG = {"reference": "old"}, {"baseline": "log_avg_exp"}
_named("opmd_kimi", "opmd_kimi", "opmd", _SUM, advantages_options=_LOG, loss_options=_OLD)(
    "online policy mirror descent, Kimi's squared form.", "arXiv:2505.17826, appendix A.1"
)
_named("opmd_pairwise", "opmd_pairwise", "opmd", _SUM, loss_options=_OLD)(
    "online policy mirror descent, pairs of responses.", "arXiv:2505.17826, appendix A.2"
)
_named("mix", "mix", "grpo")("GRPO on own samples, likelihood of an expert's.", "arXiv:2505.17826, section 3.2")
_named("mix_chord", "mix_chord", "grpo")("mix with CHORD's weights per token.", "arXiv:2508.11408")
_named("dpo", "dpo", None, _SUM)("preferences between two answers.", "arXiv:2305.18290")
_named("step_wise_grpo", "ppo", "step_wise_grpo")("runs of several steps compared by their result.")
_named("gigpo", "ppo", "gigpo")(
    "runs compared by their result, and steps by what followed from the same state.", "arXiv:2505.10978"
)
