"""Losses that learn from given answers: likelihood, preferences, and mixtures with reinforcement learning."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from attrs.validators import ge, lt

from jackfield.algorithms.losses.clipped import clipped_surrogate
from jackfield.algorithms.losses.terms import LossResult, Term, row_log_ratio
from jackfield.algorithms.options import ClipDual, NotNegative, Positive, Share
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import Groups
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["chord_mu"]


@register("loss", "sft", "token")
def _sft(log_probs: Tensor) -> LossResult:
    """-log pi: maximum likelihood of the response."""
    return -log_probs, {}


def _pairs(pair_ids: Tensor, rewards: Tensor | None) -> tuple[Tensor, Tensor]:
    """The other row of each row's pair, int64 ``[B]``, and +1 for the chosen, -1 for the rejected row."""
    groups = Groups(pair_ids)
    lonely = groups.sizes != 2
    if bool(lonely.any()):
        row = int(lonely.nonzero()[0, 0])
        raise ConfigError(
            f"a pair of dpo has {int(groups.sizes[row])} rows",
            code="algorithm.input",
            where=f"row {row}, pair_ids {int(pair_ids[row])}",
            expected="2: one chosen, one rejected",
            fix="keep both in one call, or split the batch after jackfield.algorithms.prepare('dpo', …)",
        )
    first, second = groups.index.argsort(stable=True).reshape(-1, 2).unbind(-1)
    partner = first.new_zeros(len(pair_ids))
    partner[first], partner[second] = second, first
    if rewards is None:
        signs = groups.sizes.new_ones(len(pair_ids))
        signs[second] = -1.0
        return partner, signs
    margin = (rewards - rewards[partner]).double()
    if bool((margin == 0).any()):
        row = int((margin == 0).nonzero()[0, 0])
        raise ConfigError(
            "both rows of a pair of dpo have the same reward, so none is preferred",
            code="algorithm.input",
            where=f"row {row}, pair_ids {int(pair_ids[row])}",
            fix="leave such pairs out",
        )
    return partner, margin.sign()


def _dpo_columns(
    log_probs: Tensor, ref_log_probs: Tensor, pair_ids: Tensor, beta: float, rewards: Tensor | None = None
) -> dict[str, Tensor]:
    """Compute z of each row's pair, and +1 for the chosen row, -1 for the rejected, ``[B]``."""
    partner, signs = _pairs(pair_ids, rewards)
    implicit = row_log_ratio(log_probs, ref_log_probs)
    signs = signs.to(implicit.dtype)
    return {"dpo_margins": beta * signs * (implicit - implicit[partner]), "dpo_signs": signs}


@register(
    "loss",
    "dpo",
    "group",
    paper="DPO, arXiv:2305.18290, equation 7; label smoothing: cDPO (Mitchell, 2023)",
    differs="One loss per pair, averaged over the global count of pairs (global_sequences / 2). "
    "Summing log-probabilities over a micro-batch first would make it one pair.",
    whole_batch=("dpo_margins", "dpo_signs"),
    prepare=_dpo_columns,
    per_sequence=True,
)
def _dpo(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    global_sequences: int,
    pair_ids: Tensor | None = None,
    rewards: Tensor | None = None,
    dpo_margins: Tensor | None = None,
    dpo_signs: Tensor | None = None,
    *,
    beta: Positive = 0.1,
    label_smoothing: Annotated[float, ge(0.0), lt(0.5)] = 0.0,
) -> LossResult:
    """-(1 - e) log sigmoid(z) - e log sigmoid(-z) per pair, z = beta (h(chosen) - h(rejected)), h = log pi(y) - log
    pi_ref(y).

    e is ``label_smoothing``. Rows of one ``pair_ids`` are a pair: the one of higher ``rewards`` is chosen, or, without
    rewards, the first. A pair may be split into micro-batches: its rows then carry ``dpo_margins`` (z as the step
    begins) and ``dpo_signs``, and each contributes its half of value and gradient.
    """
    if not 0.0 <= label_smoothing < 0.5:
        raise ConfigError("label_smoothing must be in [0, 0.5)", code="algorithm.input", found=str(label_smoothing))
    implicit = row_log_ratio(log_probs, ref_log_probs)
    if dpo_margins is not None and dpo_signs is not None:
        margin, signs = dpo_margins.to(implicit.dtype), dpo_signs.to(implicit.dtype)
        slope = -(1.0 - label_smoothing) * (-margin).sigmoid() + label_smoothing * margin.sigmoid()
        own = slope * signs * beta * (implicit - implicit.detach())
        halves = 0.5 * _dpo_value(margin, label_smoothing) + own
    else:
        if pair_ids is None:
            raise ConfigError("dpo needs pair_ids, or what prepare makes of them", code="algorithm.input")
        margin = _dpo_columns(log_probs, ref_log_probs, pair_ids, beta, rewards)["dpo_margins"]
        halves = 0.5 * _dpo_value(margin, label_smoothing)
    metrics = {"policy/preference_accuracy": (margin > 0).to(implicit.dtype), "policy/preference_margin": margin}
    return (Term(values=halves, sequences=global_sequences / 2),), metrics


def _dpo_value(margin: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - e) log sigmoid(z) - e log sigmoid(-z), with log sigmoid(z) = -log(e^0 + e^-z) for any z."""
    zero = margin.new_zeros(())
    return (1.0 - label_smoothing) * zero.logaddexp(-margin) + label_smoothing * zero.logaddexp(margin)


_MIX_COUNTS = ("global_usual_tokens", "global_expert_tokens")


def _mixture(
    imitation: Tensor,
    surrogate: tuple[Tensor, dict[str, Tensor]],
    response_mask: Tensor,
    expert_mask: Tensor,
    tokens: tuple[int | None, int | None],
    sequences: tuple[int | None, int | None],
    mu: float,
) -> LossResult:
    """(1 - mu) surrogate of usual rows + mu imitation of expert rows, each normalised by its own counts."""
    if not 0.0 <= mu <= 1.0:
        raise ConfigError("mu must be in [0, 1]", code="algorithm.input", found=str(mu))
    if (tokens[0] is None) != (tokens[1] is None):
        raise ConfigError(
            "give both global_usual_tokens and global_expert_tokens, or none: then this call is the whole batch",
            code="algorithm.input",
        )
    expert = expert_mask != 0

    def term(values: Tensor, weight: float, rows: Tensor, tokens: int | None, sequences: int | None) -> Term:
        mask = (response_mask != 0) & rows.unsqueeze(-1)
        if tokens is None:
            tokens, sequences = int(mask.sum()), int(rows.sum()) if sequences is None else sequences
        return Term(values=values, weight=weight, mask=mask, tokens=tokens, sequences=sequences)

    usual, metrics = surrogate
    own = {key: value.masked_fill(expert.unsqueeze(-1), 0.0) for key, value in metrics.items()}
    terms = (
        term(usual, 1.0 - mu, ~expert, tokens[0], sequences[0]),
        term(imitation, mu, expert, tokens[1], sequences[1]),
    )
    return terms, own


@register(
    "loss",
    "mix",
    "token",
    paper="MIX, Trinity-RFT report, arXiv:2505.17826, section 3.2",
    differs="Each part is a mean over its own tokens (or sequences) of the whole batch; Trinity-RFT scales means of "
    "micro-batches.",
    whole_batch=_MIX_COUNTS,
)
def _mix(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    expert_mask: Tensor,
    global_usual_tokens: int | None = None,
    global_expert_tokens: int | None = None,
    global_usual_sequences: int | None = None,
    global_expert_sequences: int | None = None,
    *,
    mu: Share = 0.1,
    clip_low: Share = 0.2,
    clip_high: NotNegative = 0.2,
    clip_dual: ClipDual | None = 3.0,
) -> LossResult:
    """(1 - mu) PPO(usual rows) + mu SFT(expert rows), each normalised by its own global count.

    ``expert_mask`` is bool ``[B]``. Tokens are counted by ``global_usual_tokens`` and ``global_expert_tokens``; unset,
    this call is the whole batch. Means over sequences use ``global_usual_sequences`` and ``global_expert_sequences``
    or, where only the tokens are counted, all sequences of the batch.
    """
    surrogate = clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high, clip_dual)
    tokens = (global_usual_tokens, global_expert_tokens)
    sequences = (global_usual_sequences, global_expert_sequences)
    return _mixture(-log_probs, surrogate, response_mask, expert_mask, tokens, sequences, mu)


@register(
    "loss",
    "mix_chord",
    "token",
    paper="CHORD, arXiv:2508.11408",
    differs="mu is an option; the schedule that the paper decays it by is jackfield.algorithms.chord_mu.",
    whole_batch=_MIX_COUNTS,
)
def _mix_chord(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    expert_mask: Tensor,
    global_usual_tokens: int | None = None,
    global_expert_tokens: int | None = None,
    global_usual_sequences: int | None = None,
    global_expert_sequences: int | None = None,
    *,
    mu: Share = 0.1,
    phi: bool = True,
    clip_low: Share = 0.2,
    clip_high: NotNegative = 0.2,
    clip_dual: ClipDual | None = 3.0,
) -> LossResult:
    """(1 - mu) PPO(usual rows) + mu (-phi log pi)(expert rows), phi = sg(pi (1 - pi)) (``phi=False``: 1).

    Counts are those of ``mix``.
    """
    expert = -log_probs
    if phi:
        probability = log_probs.detach().exp()
        expert = probability * (1.0 - probability) * expert
    surrogate = clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high, clip_dual)
    tokens = (global_usual_tokens, global_expert_tokens)
    sequences = (global_usual_sequences, global_expert_sequences)
    return _mixture(expert, surrogate, response_mask, expert_mask, tokens, sequences, mu)


def chord_mu(step: int, *, warmup_steps: int, decay_steps: int, peak: float = 0.9, valley: float = 0.05) -> float:
    """CHORD's weight of the expert data at ``step``: linear to ``peak``, then a half cosine down to ``valley``.

    The form is Trinity-RFT's for arXiv:2508.11408; peak and valley are that paper's example, to be set per task.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    done = step - warmup_steps
    if done >= decay_steps:
        return valley
    return valley + (peak - valley) * 0.5 * (1.0 + math.cos(math.pi * done / decay_steps))
