"""The sections ``algorithm`` and ``critic`` of the configuration, and the resolved algorithm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs.validators import ge, gt, le, optional

from jackfield.abc.engine import OptimizerSpec
from jackfield.algorithms.shaping import Correction, Shaping
from jackfield.errors import ConfigError
from jackfield.settings import option


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
    old_log_probs: Literal["auto", "rollout", "engine"] = option(
        "auto",
        "source of the old policy's log-probs, the denominator of ratios: the rollout server (bypass) or the engine, "
        "which recomputes them (decoupled); auto: engine if the correction is on or sampling filters are used",
    )
    correction: Correction = option(factory=Correction, help="off-policy correction")
    shaping: Shaping = option(factory=Shaping, help="reward shaping before advantages are estimated")
    dynamic_sampling: bool | None = option(
        None, "replace groups whose rewards are all equal; null: the bundle's choice"
    )
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
class ResolvedAlgorithm:
    """The algorithm of a run, resolved from configuration, model and data, as plain values for workers."""

    loss: str
    loss_options: Mapping[str, Any] = attrs.field(factory=dict)  #: options of the loss, aggregation, KL and entropy
    loss_columns: tuple[str, ...] = ()  #: columns that the loss reads in addition to the sample
    advantages: str | None = None  #: the estimator; None: the data's own answers are the target
    advantages_options: Mapping[str, Any] = attrs.field(factory=dict)
    #: the column of the policy before the update, which the loss gets as ``old_log_probs``
    old_log_probs: Literal["old_log_probs", "rollout_log_probs"] = "rollout_log_probs"
    recompute_old_log_probs: bool = False
    shaping: Shaping = attrs.field(factory=Shaping)
    correction: Correction | None = None  #: None: off
    kl_in_reward: str | None = None  #: estimator of the KL penalty in the reward; None: off
    prepares: bool = False  #: the loss needs columns of the whole batch
    whole_groups: bool = False  #: mini-batches do not split groups
    critic: bool = False
    reference: bool = False  #: there is a column ``ref_log_probs``
    dynamic_sampling: bool = False
    greedy_baseline: bool = False
    reward_dimensions: tuple[str, ...] = ()
    experts: int = 0  #: samples of an expert in each batch, from the data
    mixes: bool = False  #: samples of an expert are among the others: there is a column ``expert_mask``
    pairs: bool = False

    @property
    def renamed(self) -> Mapping[str, str]:
        """The columns by the names that the loss uses."""
        return {"old_log_probs": self.old_log_probs} if self.bypasses else {}

    @property
    def bypasses(self) -> bool:
        """Return whether the rollout server's log-probs are used for the policy before the update."""
        return self.advantages is not None and self.old_log_probs == "rollout_log_probs"

    def as_plain(self) -> dict[str, Any]:
        """Return the choices as plain values, as ``jackfield config validate --json`` prints them."""
        needs = ("critic", "reference", "prepares", "dynamic_sampling", "greedy_baseline", "pairs", "whole_groups")
        return {
            "loss": {"name": self.loss, "options": dict(self.loss_options)},
            "advantages": self.advantages and {"name": self.advantages, "options": dict(self.advantages_options)},
            "columns": list(self.loss_columns),
            "needs": [name for name in needs if getattr(self, name)],
            "old_log_probs": "rollout" if self.bypasses else "engine",
            "recomputes_old_log_probs": self.recompute_old_log_probs,
            "corrects": self.correction is not None,
        }
