"""Algorithms as named bundles of parts, and the loss function that an engine runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from jackfield.abc.engine import LossFunction, LossSpec, TokenOutput
from jackfield.algorithms.aggregation import aggregate
from jackfield.algorithms.kl import kl
from jackfield.algorithms.losses import COUNTS, ROW_INPUTS, TOKEN_INPUTS, policy_loss, value_loss
from jackfield.algorithms.registry import Part, Scope, check_options, part, register, signature
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

__all__ = ["VALUE_LOSS", "Algorithm", "algorithm", "require_streamable", "resolve_loss"]

VALUE_LOSS = "value"  #: the name of a critic's loss in a LossSpec

_SCOPES: tuple[Scope, ...] = ("token", "sequence", "group", "batch")


@attrs.frozen(kw_only=True)
class Algorithm:
    """An advantage estimator, a policy loss and how they are put together."""

    loss: str
    advantages: str | None  #: None: the data's own answers are the target
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
    """A bundle by name: ``grpo``, ``ppo``, ``sft`` and so on; ``jackfield algorithms list --kind algorithm``.

    Raises:
        ConfigError: ``algorithm.unknown``.
    """
    bundle: Algorithm = part("algorithm", name).function()
    return bundle


def _bundle(name: str, text: str, bundle: Algorithm, paper: str = "", differs: str = "") -> None:
    def make() -> Algorithm:
        return bundle

    make.__doc__ = text
    maker: Callable[[], Algorithm] = make
    register("algorithm", name, bundle.scope, paper=paper, differs=differs)(maker)


def require_streamable(chosen: Algorithm) -> None:
    """Refuse an algorithm that has to see a whole batch, for a schedule that updates on its mini-batches as they come.

    Raises:
        ConfigError: ``algorithm.input``, naming the parts.
    """
    options = {"advantages": chosen.advantages_options, "loss": chosen.loss_options}
    wide = [one for one in chosen.parts if one.scope_with(options.get(one.kind, {})) == "batch"]
    if wide:
        named = ", ".join(f"{one.kind} {one.name}" for one in wide)
        raise ConfigError(
            f"a schedule that streams mini-batches cannot have parts that see the whole batch: {named}",
            code="algorithm.input",
            where="algorithm",
            expected="parts of scope token, sequence or group",
            found=named,
            fix="choose other parts (`jackfield algorithms show NAME` tells their scope), or stream no mini-batches",
        )


_bundle("grpo", "group-relative advantages, PPO's loss.", Algorithm(loss="ppo", advantages="grpo"), "arXiv:2402.03300")
_bundle("sft", "likelihood of given answers.", Algorithm(loss="sft", advantages=None))
_bundle(
    "ppo",
    "GAE with a critic, PPO's loss.",
    Algorithm(loss="ppo", advantages="gae", needs=("critic",)),
    "arXiv:1707.06347",
)
_bundle(
    "dr_grpo",
    "rewards less the group's mean; sums over tokens, so that length has no bias.",
    Algorithm(loss="ppo", advantages="dr_grpo", aggregation="seq-mean-token-sum", loss_options={"clip_dual": None}),
    "arXiv:2503.20783",
    "The paper also divides by a constant, a factor of the learning rate: aggregation seq-mean-token-sum-norm with "
    "the loss option length_norm.",
)
_bundle(
    "dapo",
    "GRPO with a higher upper clip, a token mean and groups of mixed results only.",
    Algorithm(
        loss="ppo",
        advantages="grpo",
        loss_options={"clip_low": 0.2, "clip_high": 0.28, "clip_dual": None},
        needs=("dynamic_sampling",),
    ),
    "arXiv:2503.14476",
    "The overlong penalty is a reward shaping of its own (overlong_penalty).",
)
_bundle(
    "rloo",
    "leave-one-out baseline, policy gradient of whole responses.",
    Algorithm(loss="reinforce", advantages="rloo", aggregation="seq-mean-token-sum"),
    "arXiv:2402.14740",
)
_bundle(
    "opo",
    "length-weighted baseline, policy gradient of whole responses.",
    Algorithm(loss="reinforce", advantages="opo", aggregation="seq-mean-token-sum"),
    "arXiv:2505.23585",
)
_bundle(
    "reinforce_plus_plus",
    "reward to go, normalised over the batch, PPO's loss.",
    Algorithm(loss="ppo", advantages="reinforce_plus_plus"),
    "arXiv:2501.03262",
)
_bundle(
    "reinforce_plus_plus_baseline",
    "rewards less the group's mean, normalised over the batch, PPO's loss.",
    Algorithm(loss="ppo", advantages="reinforce_plus_plus_baseline"),
    "arXiv:2501.03262",
)
_bundle(
    "remax",
    "the greedy response's reward as baseline, policy gradient of whole responses.",
    Algorithm(loss="reinforce", advantages="remax", aggregation="seq-mean-token-sum", needs=("baseline_rewards",)),
    "arXiv:2310.10505",
)
_bundle("gpg", "group policy gradient.", Algorithm(loss="gpg", advantages="gpg"), "arXiv:2504.02546")
_bundle(
    "gdpo",
    "several rewards, each normalised in the group, PPO's loss.",
    Algorithm(loss="ppo", advantages="gdpo", needs=("reward_dimensions",)),
    "arXiv:2601.05242",
)
_bundle(
    "gspo",
    "group-relative advantages, a clipped ratio per sequence.",
    Algorithm(loss="gspo", advantages="grpo", aggregation="seq-mean-token-mean"),
    "arXiv:2507.18071",
)
_bundle(
    "gmpo",
    "group-relative advantages, the geometric mean of clipped ratios.",
    Algorithm(loss="gmpo", advantages="grpo", aggregation="seq-mean-token-mean"),
    "arXiv:2507.20673",
)
_bundle(
    "cispo",
    "group-relative advantages, clipped weights.",
    Algorithm(loss="cispo", advantages="grpo"),
    "arXiv:2506.13585",
)
_bundle(
    "sapo",
    "group-relative advantages, a soft gate.",
    Algorithm(loss="sapo", advantages="grpo", aggregation="seq-mean-token-mean"),
    "arXiv:2511.20347",
)
_bundle(
    "m2po",
    "group-relative advantages, a second-moment trust region for stale data.",
    Algorithm(loss="m2po", advantages="grpo", needs=("prepare",)),
    "arXiv:2510.01161",
)
_bundle(
    "decoupled_ppo",
    "group-relative advantages, PPO's loss around pi_old, weighted for the policy that generated.",
    Algorithm(loss="decoupled_ppo", advantages="grpo", needs=("rollout_log_probs",)),
    "arXiv:2110.00641",
)
_bundle(
    "topr",
    "rewards as they are, tapered importance weights.",
    Algorithm(loss="topr", advantages="topr", aggregation="seq-mean-token-sum"),
    "arXiv:2503.14286",
)
_bundle(
    "asymre",
    "a baseline below the group's mean, policy gradient of whole responses.",
    Algorithm(loss="reinforce", advantages="asymre", aggregation="seq-mean-token-sum"),
    "arXiv:2506.20520",
)
_bundle(
    "opmd",
    "online policy mirror descent, the simple form.",
    Algorithm(loss="opmd", advantages="opmd"),
    "arXiv:2505.17826, appendix A.3",
)
_bundle(
    "opmd_kimi",
    "online policy mirror descent, Kimi's squared form.",
    Algorithm(
        loss="opmd_kimi",
        advantages="opmd",
        aggregation="seq-mean-token-sum",
        advantages_options={"baseline": "log_avg_exp"},
        loss_options={"reference": "old"},
    ),
    "arXiv:2505.17826, appendix A.1",
)
_bundle(
    "opmd_pairwise",
    "online policy mirror descent, pairs of responses.",
    Algorithm(
        loss="opmd_pairwise",
        advantages="opmd",
        aggregation="seq-mean-token-sum",
        loss_options={"reference": "old"},
        needs=("prepare",),
    ),
    "arXiv:2505.17826, appendix A.2",
)
_bundle(
    "mix",
    "GRPO on the run's own samples and likelihood of an expert's.",
    Algorithm(loss="mix", advantages="grpo", needs=("expert_data",)),
    "arXiv:2505.17826, section 3.2",
)
_bundle(
    "mix_chord",
    "mix with CHORD's weights per token.",
    Algorithm(loss="mix_chord", advantages="grpo", needs=("expert_data",)),
    "arXiv:2508.11408",
)
_bundle(
    "dpo",
    "preferences between two answers.",
    Algorithm(loss="dpo", advantages=None, aggregation="seq-mean-token-sum", needs=("pairs", "reference", "prepare")),
    "arXiv:2305.18290",
)
_bundle(
    "step_wise_grpo",
    "runs of several steps compared by their result.",
    Algorithm(loss="ppo", advantages="step_wise_grpo", needs=("run_ids",)),
)
_bundle(
    "gigpo",
    "runs compared by their result, and steps by what followed from the same state.",
    Algorithm(loss="ppo", advantages="gigpo", needs=("run_ids", "anchor_ids")),
    "arXiv:2505.10978",
)


def resolve_loss(spec: LossSpec) -> LossFunction:
    """The loss function of a spec, to be run on micro-batches.

    Options of the spec are the loss's own, and ``aggregation``, ``length_norm``, ``kl`` (an estimator's name),
    ``kl_coefficient``, ``entropy_coefficient`` and ``correction`` (see :func:`jackfield.algorithms.policy_loss`). The
    function reads ``response_mask`` and those of the loss's inputs that its data hold: ``old_log_probs``,
    ``advantages``, ``ref_log_probs``, ``rollout_weights``, what :func:`jackfield.algorithms.prepare` made, and so on.
    Micro-batches may split groups and pairs, so ``group_ids`` and ``pair_ids`` are not looked at. KL and entropy are
    those of rows that the policy itself generated: a loss that takes an ``expert_mask`` leaves its rows out there. A
    column ``row`` (int ``[B]``) says which rows of the whole batch these are, for errors.

    The name :data:`VALUE_LOSS` is the critic's: :func:`jackfield.algorithms.value_loss` of the model's values, with
    ``returns`` and, as those before the update, ``values`` of the data.

    Raises:
        ConfigError: ``algorithm.unknown`` or ``algorithm.input``: an option that the loss does not have.
    """
    return _ValueLoss(spec) if spec.name == VALUE_LOSS else _ComposedLoss(spec)


@contextmanager
def _naming_rows(data: TensorDict) -> Iterator[None]:
    """A micro-batch has an order of its own: an error names the row of the whole batch, by the column ``row``."""
    try:
        yield
    except ConfigError as error:
        number, comma, rest = str(error.where).removeprefix("row ").partition(",")
        rows = data.get("row")
        if error.code == "algorithm.not-finite" and number.isdigit() and rows is not None:
            error.where = f"row {int(rows[int(number)])}{comma}{rest}"
        raise


class _ValueLoss:
    """The critic's loss on one micro-batch."""

    def __init__(self, spec: LossSpec) -> None:
        self._options: dict[str, Any] = dict(spec.options)
        self._counts = {name: int(spec.global_counts[name]) for name in ("global_tokens", "global_sequences")}

    def __call__(self, output: TokenOutput, data: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        assert output.values is not None, "the model of a critic has a value head"
        with _naming_rows(data):
            loss, metrics = value_loss(
                values=output.values,
                returns=data["returns"],
                response_mask=data["response_mask"],
                old_values=data.get("values"),
                global_tokens=self._counts["global_tokens"],
                global_sequences=self._counts["global_sequences"],
                **self._options,
            )
        return loss, {**metrics, "value/loss": loss.detach()}


class _ComposedLoss:
    """policy loss + kl_coefficient * KL(pi, reference) - entropy_coefficient * entropy."""

    def __init__(self, spec: LossSpec) -> None:
        options = dict(spec.options)
        self._part = part("loss", spec.name)
        self._counts = {name: int(spec.global_counts[name]) for name in ("global_tokens", "global_sequences")}
        self._own_counts = {name: int(value) for name, value in spec.global_counts.items() if name in COUNTS}
        self._aggregation = options.pop("aggregation", "token-mean")
        self._length_norm = options.pop("length_norm", None)
        self._kl = options.pop("kl", "k3")
        self._kl_coefficient = options.pop("kl_coefficient", 0.0)
        self._entropy_coefficient = options.pop("entropy_coefficient", 0.0)
        self._correction = options.pop("correction", None)
        check_options(self._part, options)
        part("aggregation", self._aggregation)
        if self._kl_coefficient:
            part("kl", self._kl)
        if self._aggregation == "seq-mean-token-sum-norm" and self._length_norm is None:
            raise ConfigError(
                "seq-mean-token-sum-norm needs length_norm: micro-batches are padded to different widths",
                code="algorithm.input",
                where=f"algorithm: loss {spec.name}",
                fix="set the loss option length_norm to the longest response that may be generated",
            )
        self._options = options
        self.needs_entropy = self._entropy_coefficient != 0.0

    def __call__(self, output: TokenOutput, data: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        mask = data["response_mask"]
        with _naming_rows(data):
            loss, metrics = policy_loss(
                self._part.name,
                log_probs=output.log_probs,
                response_mask=mask,
                aggregation=self._aggregation,
                length_norm=self._length_norm,
                correction=self._correction,
                rollout_weights=data.get("rollout_weights"),
                global_tokens=self._counts["global_tokens"],
                global_sequences=self._counts["global_sequences"],
                **self._inputs(data),
                **self._options,
            )
        metrics["policy/loss"] = loss.detach()
        mask = self._own(mask, data)
        if self._kl_coefficient:
            divergence = self._divergence(output.log_probs, data, mask)
            penalty = aggregate(divergence, mask, self._aggregation, length_norm=self._length_norm, **self._counts)
            loss = loss + self._kl_coefficient * penalty
            metrics["policy/kl"] = aggregate(divergence.detach(), mask, "token-mean", **self._counts)
        if output.entropy is not None:
            entropy = aggregate(output.entropy, mask, self._aggregation, length_norm=self._length_norm, **self._counts)
            loss = loss - self._entropy_coefficient * entropy
            metrics["policy/entropy"] = aggregate(output.entropy.detach(), mask, "token-mean", **self._counts)
        return loss, metrics

    def _own(self, mask: Tensor, data: TensorDict) -> Tensor:
        """The mask without the rows that an expert wrote, where the loss tells them apart."""
        expert = data.get("expert_mask") if "expert_mask" in signature(self._part.function).inputs else None
        return mask if expert is None else mask.masked_fill((expert != 0).unsqueeze(-1), 0)

    def _inputs(self, data: TensorDict) -> dict[str, Any]:
        """What the loss takes and the data hold; what it would need of the whole batch has to be there."""
        known = signature(self._part.function)
        wanted = {name for name in (*TOKEN_INPUTS, *ROW_INPUTS) if known.open or name in known.inputs}
        if self._correction is not None:
            wanted |= {"old_log_probs", "rollout_log_probs"}
        grouping = wanted & {"group_ids", "pair_ids"}
        found = {name: data.get(name) for name in sorted(wanted - grouping)}
        inputs = {name: value for name, value in found.items() if value is not None}
        inputs |= {name: value for name, value in self._own_counts.items() if known.open or name in known.inputs}
        missing = [name for name in self._part.whole_batch if name not in inputs]
        if missing and not grouping:  # a loss that groups rows says itself that it got no groups
            raise ConfigError(
                f"{self._part.name} depends on the whole batch and got no {' and '.join(missing)}",
                code="algorithm.input",
                where=f"algorithm: loss {self._part.name}",
                fix=f"counts come with the loss's global counts, columns from prepare({self._part.name!r}, …)",
            )
        return inputs

    def _divergence(self, log_probs: Tensor, data: TensorDict, mask: Tensor) -> Tensor:
        """The KL per token. Positions that do not count are emptied first, so that no NaN reaches a gradient."""
        outside = mask == 0
        old = data.get("old_log_probs")
        return kl(
            self._kl,
            log_probs.masked_fill(outside, 0.0),
            data["ref_log_probs"].masked_fill(outside, 0.0),
            old_log_probs=None if old is None else old.masked_fill(outside, 0.0),
        )
