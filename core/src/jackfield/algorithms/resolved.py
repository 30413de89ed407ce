"""An algorithm with every choice made: what trainer, ranks and the advantage worker read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from jackfield.algorithms.correction import Correction
from jackfield.algorithms.shaping import Shaping


@attrs.frozen(kw_only=True)
class ResolvedAlgorithm:
    """The algorithm of a run as its configuration, model and data leave it. Plain values, which travel to workers."""

    loss: str
    loss_options: Mapping[str, Any] = attrs.field(factory=dict)  #: the loss's own, and aggregation, KL, entropy
    loss_columns: tuple[str, ...] = ()  #: what the loss reads beside the sample
    advantages: str | None = None  #: the estimator; None: the data's own answers are the target
    advantages_options: Mapping[str, Any] = attrs.field(factory=dict)
    #: the column of the policy before the update, which the loss knows as ``old_log_probs``
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
        """Columns by the names that the loss knows them under."""
        return {"old_log_probs": self.old_log_probs} if self.bypasses else {}

    @property
    def bypasses(self) -> bool:
        """Return whether the rollout server's log-probs are those of the policy before the update."""
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
