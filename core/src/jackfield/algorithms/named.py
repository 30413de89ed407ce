"""The named algorithms: an advantage estimator, a policy loss, an aggregation, and what they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from jackfield.algorithms.advantages import advantages
from jackfield.algorithms.aggregation import aggregate
from jackfield.algorithms.losses import policy_loss
from jackfield.algorithms.registry import Part, Scope, part, register

__all__ = ["Algorithm", "algorithm"]

_PARTS = (advantages, aggregate, policy_loss)  # imported for their registrations
_SCOPES: tuple[Scope, ...] = ("token", "sequence", "group", "batch")


@attrs.frozen(kw_only=True)
class Algorithm:
    """An advantage estimator, a policy loss and how they are put together."""

    loss: str
    advantages: str | None = None  #: None: the data's own answers are the target
    aggregation: str = "token-mean"
    advantages_options: Mapping[str, Any] = attrs.field(factory=dict)
    loss_options: Mapping[str, Any] = attrs.field(factory=dict)
    #: What it cannot do without, beside rewards, groups and old log-probs: ``critic``, ``reference``, ``expert_data``,
    #: ``pairs``, ``dynamic_sampling``, ``rollout_log_probs``, ``prepare`` (columns of
    #: :func:`jackfield.algorithms.prepare`), or inputs of its estimator. A program that has not got it must refuse.
    needs: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """The registered parts."""
        chosen = [part("loss", self.loss), part("aggregation", self.aggregation)]
        return (*chosen, part("advantages", self.advantages)) if self.advantages else tuple(chosen)

    @property
    def scope(self) -> Scope:
        """How much of a batch it has to see at once: the widest scope of its parts, under their options."""
        options = {"advantages": self.advantages_options, "loss": self.loss_options}
        return max((one.scope_with(options.get(one.kind, {})) for one in self.parts), key=_SCOPES.index)


def algorithm(name: str) -> Algorithm:
    """Return the algorithm of this name; ``jackfield algorithms list --kind algorithm`` shows them all.

    Raises:
        ConfigError: ``algorithm.unknown``.
    """
    found: Algorithm = part("algorithm", name).function()
    return found


_SUM, _MEAN = "seq-mean-token-sum", "seq-mean-token-mean"


def _named(
    name: str, text: str, paper: str, loss: str, advantages: str | None, aggregation: str = "token-mean", **fields: Any
) -> None:
    """Register an algorithm under its name; ``fields`` are further ones of :class:`Algorithm`."""
    differs = fields.pop("differs", "")
    chosen = Algorithm(loss=loss, advantages=advantages, aggregation=aggregation, **fields)

    def make() -> Algorithm:
        return chosen

    make.__doc__ = f"{text}\n\nPaper: {paper}\nDiffers: {differs}"
    register("algorithm", name, chosen.scope)(make)


_named("grpo", "group-relative advantages, PPO's loss.", "arXiv:2402.03300", "ppo", "grpo")
_named("sft", "likelihood of given answers.", "", "sft", None)
_named("ppo", "GAE with a critic, PPO's loss.", "arXiv:1707.06347", "ppo", "gae", needs=("critic",))
_named(
    "dr_grpo",
    "rewards less the group's mean; sums over tokens, so that length has no bias.",
    "arXiv:2503.20783",
    "ppo",
    "dr_grpo",
    _SUM,
    loss_options={"clip_dual": None},
    differs="The paper also divides by a constant, a factor of the learning rate: aggregation seq-mean-token-sum-norm "
    "with the loss option length_norm.",
)
_named(
    "dapo",
    "GRPO with a higher upper clip, a token mean and groups of mixed results only.",
    "arXiv:2503.14476",
    "ppo",
    "grpo",
    loss_options={"clip_low": 0.2, "clip_high": 0.28, "clip_dual": None},
    needs=("dynamic_sampling",),
    differs="The overlong penalty is a reward shaping of its own (overlong_penalty).",
)
_named(
    "rloo", "leave-one-out baseline, policy gradient of whole responses.", "arXiv:2402.14740", "reinforce", "rloo", _SUM
)
_named(
    "opo", "length-weighted baseline, policy gradient of whole responses.", "arXiv:2505.23585", "reinforce", "opo", _SUM
)
_named(
    "reinforce_plus_plus",
    "reward to go, normalised over the batch, PPO's loss.",
    "arXiv:2501.03262",
    "ppo",
    "reinforce_plus_plus",
)
_named(
    "reinforce_plus_plus_baseline",
    "rewards less the group's mean, normalised over the batch, PPO's loss.",
    "arXiv:2501.03262",
    "ppo",
    "reinforce_plus_plus_baseline",
)
_named(
    "remax",
    "the greedy response's reward as baseline, policy gradient of whole responses.",
    "arXiv:2310.10505",
    "reinforce",
    "remax",
    _SUM,
    needs=("baseline_rewards",),
)
_named("gpg", "group policy gradient.", "arXiv:2504.02546", "gpg", "gpg")
_named(
    "gdpo",
    "several rewards, each normalised in the group, PPO's loss.",
    "arXiv:2601.05242",
    "ppo",
    "gdpo",
    needs=("reward_dimensions",),
)
_named("gspo", "group-relative advantages, a clipped ratio per sequence.", "arXiv:2507.18071", "gspo", "grpo", _MEAN)
_named(
    "gmpo",
    "group-relative advantages, the geometric mean of clipped ratios.",
    "arXiv:2507.20673",
    "gmpo",
    "grpo",
    _MEAN,
)
_named("cispo", "group-relative advantages, clipped weights.", "arXiv:2506.13585", "cispo", "grpo")
_named("sapo", "group-relative advantages, a soft gate.", "arXiv:2511.20347", "sapo", "grpo", _MEAN)
_named(
    "m2po",
    "group-relative advantages, a second-moment trust region for stale data.",
    "arXiv:2510.01161",
    "m2po",
    "grpo",
    needs=("prepare",),
)
_named(
    "decoupled_ppo",
    "group-relative advantages, PPO's loss around pi_old, weighted for the policy that generated.",
    "arXiv:2110.00641",
    "decoupled_ppo",
    "grpo",
    needs=("rollout_log_probs",),
)
_named("topr", "rewards as they are, tapered importance weights.", "arXiv:2503.14286", "topr", "topr", _SUM)
_named(
    "asymre",
    "a baseline below the group's mean, policy gradient of whole responses.",
    "arXiv:2506.20520",
    "reinforce",
    "asymre",
    _SUM,
)
_named("opmd", "online policy mirror descent, the simple form.", "arXiv:2505.17826, appendix A.3", "opmd", "opmd")
_named(
    "opmd_kimi",
    "online policy mirror descent, Kimi's squared form.",
    "arXiv:2505.17826, appendix A.1",
    "opmd_kimi",
    "opmd",
    _SUM,
    advantages_options={"baseline": "log_avg_exp"},
    loss_options={"reference": "old"},
)
_named(
    "opmd_pairwise",
    "online policy mirror descent, pairs of responses.",
    "arXiv:2505.17826, appendix A.2",
    "opmd_pairwise",
    "opmd",
    _SUM,
    loss_options={"reference": "old"},
    needs=("prepare",),
)
_named(
    "mix",
    "GRPO on the run's own samples and likelihood of an expert's.",
    "arXiv:2505.17826, section 3.2",
    "mix",
    "grpo",
    needs=("expert_data",),
)
_named(
    "mix_chord", "mix with CHORD's weights per token.", "arXiv:2508.11408", "mix_chord", "grpo", needs=("expert_data",)
)
_named(
    "dpo",
    "preferences between two answers.",
    "arXiv:2305.18290",
    "dpo",
    None,
    _SUM,
    needs=("pairs", "reference", "prepare"),
)
_named(
    "step_wise_grpo",
    "runs of several steps compared by their result.",
    "",
    "ppo",
    "step_wise_grpo",
    needs=("rollout_ids",),
)
_named(
    "gigpo",
    "runs compared by their result, and steps by what followed from the same state.",
    "arXiv:2505.10978",
    "ppo",
    "gigpo",
    needs=("rollout_ids", "anchor_ids"),
)
