"""The sections ``algorithm`` and ``critic`` of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs.validators import ge, gt, le, optional

from jackfield.abc.engine import OptimizerSpec
from jackfield.algorithms.correction import Correction
from jackfield.algorithms.kl import KLController
from jackfield.algorithms.shaping import Shaping
from jackfield.settings import option


@attrs.frozen(kw_only=True)
class PartSettings:
    """A registered part by name, with its options."""

    name: str | None = option(None, help="null: the bundle's own part")
    options: Mapping[str, Any] = option(
        factory=dict, help="the part's own settings, beside those of the bundle where it is the bundle's part"
    )


@attrs.frozen(kw_only=True)
class KLSettings:
    """A KL penalty to the reference policy, in the loss or in the reward."""

    name: str = option(
        "k3",
        help="the estimator: k1, k2, k3, abs, low_var_kl, k3_corrected, or the value of one with k2's gradient: k1+, "
        "k3+, abs+, low_var_kl+",
    )
    coefficient: float = option(0.0, help="0: off, no reference model is loaded for it", validator=ge(0.0))
    in_reward: bool = option(False, help="take the penalty off the reward of each token, not into the loss")
    target: float | None = option(
        None,
        help="KL per token that an adaptive controller steers the coefficient to; null: constant",
        validator=optional(gt(0.0)),
    )
    horizon: float = option(10000.0, help="samples over which the controller corrects", validator=gt(0.0))

    def controller(self) -> KLController:
        """Return a controller of the coefficient, at its beginning."""
        return KLController(coefficient=self.coefficient, target=self.target, horizon=self.horizon)


@attrs.frozen(kw_only=True)
class AlgorithmSettings:
    """A named bundle of parts, any of which can be replaced."""

    name: str = option("grpo", help="the bundle; `jackfield algorithms list --kind algorithm` shows them")
    advantages: PartSettings | None = option(None, help="advantage estimator in the place of the bundle's")
    loss: PartSettings | None = option(None, help="policy loss in the place of the bundle's")
    aggregation: str | None = option(None, help="how token losses are averaged, in the place of the bundle's")
    kl: KLSettings = option(factory=KLSettings, help="KL penalty to the reference policy")
    entropy_coefficient: float = option(
        0.0, help="weight of the entropy bonus; below 0 entropy is held down", validator=[ge(-100.0), le(100.0)]
    )
    mini_batches: int = option(1, help="optimizer steps that one batch is split into", validator=gt(0))
    epochs: int = option(1, help="passes over one batch", validator=gt(0))
    old_log_probs: Literal["auto", "rollout", "engine"] = option(
        "auto",
        help="the policy before the update, which ratios are taken to: log-probs of the rollout server (bypass), or "
        "recomputed by the engine (decoupled); auto: engine where the correction is on, and with sampling filters",
    )
    correction: Correction = option(factory=Correction, help="off-policy correction")
    shaping: Shaping = option(factory=Shaping, help="what happens to rewards before the advantages")
    dynamic_sampling: bool | None = option(
        None, help="replace groups whose rewards are all equal; null: as the bundle has it"
    )
    reward_dimensions: tuple[str, ...] = option(
        (), help="metrics of the reward that are rewards of their own (gdpo); score is the score itself"
    )


@attrs.frozen(kw_only=True)
class CriticSettings:
    """The critic of algorithms that have one (ppo): a model with a value head, trained beside the policy."""

    path: str | None = option(None, help="its Hugging Face folder; null: the policy's")
    optimizer: OptimizerSpec = option(factory=OptimizerSpec, help="AdamW and its learning-rate schedule")
    clip: float | None = option(
        0.2,
        help="how far from the values before the update a prediction may get better; null: off",
        validator=optional(gt(0.0)),
    )
    warmup_steps: int = option(0, help="first steps in which the critic is trained alone", validator=ge(0))
