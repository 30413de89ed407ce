"""Losses that learn from given answers: likelihood, preferences, and mixtures."""

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


@register("loss", "sft", "token")
def _sft(log_probs: Tensor) -> LossResult:
    """-log pi: maximum likelihood of the response."""
    return -log_probs, {}


def _require_pairs(wrong: Tensor, pair_ids: Tensor, message: str, fix: str) -> None:
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        where = f"row {row}, pair_ids {int(pair_ids[row])}"
        raise ConfigError(
            f"{message}; a pair of dpo is one chosen and one rejected row", code="algorithm.input", where=where, fix=fix
        )


def _dpo_columns(
    log_probs: Tensor, ref_log_probs: Tensor, pair_ids: Tensor, beta: float, rewards: Tensor | None = None
) -> dict[str, Tensor]:
    """Compute z of each row's pair, and +1 for the chosen row, -1 for the rejected, ``[B]``."""
    pairs = Groups(pair_ids)
    fix = "keep both in one call, or split the batch after jackfield.algorithms.prepare('dpo', …)"
    _require_pairs(pairs.sizes != 2, pair_ids, "a row has no partner, or several", fix)
    implicit = row_log_ratio(log_probs, ref_log_probs)
    signs = 1.0 - 2.0 * pairs.positions()
    if rewards is not None:
        signs = (2.0 * rewards.double() - pairs.sums(rewards.double())).sign()
        _require_pairs(signs == 0, pair_ids, "both rows have the same reward", "leave such pairs out")
    signs = signs.to(implicit.dtype)
    return {"dpo_margins": beta * signs * (2.0 * implicit - pairs.sums(implicit)), "dpo_signs": signs}


@register("loss", "dpo", "group", whole_batch=("dpo_margins", "dpo_signs"), prepare=_dpo_columns, per_sequence=True)
def _dpo(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    global_sequences: int,
    dpo_margins: Tensor,
    dpo_signs: Tensor,
    pair_ids: Tensor | None = None,
    rewards: Tensor | None = None,
    *,
    beta: Positive = 0.1,
    label_smoothing: Annotated[float, ge(0.0), lt(0.5)] = 0.0,
) -> LossResult:
    """-(1 - e) log sigmoid(z) - e log sigmoid(-z) per pair, z = beta (h(chosen) - h(rejected)), h = log pi(y) - log
    pi_ref(y). [DPO, arXiv:2305.18290, equation 7; label smoothing: cDPO (Mitchell, 2023)]

    e is ``label_smoothing``. Rows of one ``pair_ids`` are a pair: the one of higher ``rewards`` is chosen, or, without
    rewards, the first. A pair may be split into micro-batches: each of its rows carries ``dpo_margins`` (z as the step
    begins) and ``dpo_signs``, and contributes its half of value and gradient.

    Differs: One loss per pair, averaged over the global count of pairs (global_sequences / 2). Summing
    log-probabilities over a micro-batch first would make it one pair.
    """
    implicit = row_log_ratio(log_probs, ref_log_probs)
    margin, zero = dpo_margins.to(implicit.dtype), implicit.new_zeros(())
    own = dpo_signs.to(implicit.dtype) * beta * (implicit - implicit.detach())  # 0, with a gradient
    slope = label_smoothing * margin.sigmoid() - (1.0 - label_smoothing) * (-margin).sigmoid()
    # log sigmoid(z) = -log(e^0 + e^-z) for any z
    value = (1.0 - label_smoothing) * zero.logaddexp(-margin) + label_smoothing * zero.logaddexp(margin)
    metrics = {"policy/preference_accuracy": margin > 0, "policy/preference_margin": margin}
    return (Term(values=0.5 * value + slope * own, counts={"global_sequences": global_sequences / 2}),), metrics


_MIX_COUNTS = ("global_usual_tokens", "global_expert_tokens")


@register("loss", "mix_chord", "token", whole_batch=_MIX_COUNTS)
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
    """(1 - mu) PPO(usual rows) + mu (-phi log pi)(expert rows), phi = sg(pi (1 - pi)) (``phi=False``: 1). [CHORD,
    arXiv:2508.11408]

    Counts are those of ``mix``.

    Differs: mu is an option; the schedule that the paper decays it by is jackfield.algorithms.chord_mu.
    """
    if (global_usual_tokens is None) != (global_expert_tokens is None):
        raise ConfigError(
            "give both global_usual_tokens and global_expert_tokens, or none: then this call is the whole batch",
            code="algorithm.input",
        )
    probability = log_probs.detach().exp()
    imitation = -log_probs * (probability * (1.0 - probability) if phi else 1.0)
    surrogate, metrics = clipped_surrogate(
        log_probs, old_log_probs, advantages, clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual
    )
    expert = expert_mask != 0

    def term(values: Tensor, weight: float, rows: Tensor, tokens: int | None, sequences: int | None) -> Term:
        mask = (response_mask != 0) & rows.unsqueeze(-1)
        if tokens is None:
            tokens, sequences = int(mask.sum()), int(rows.sum()) if sequences is None else sequences
        counts = {"global_tokens": tokens} | ({} if sequences is None else {"global_sequences": sequences})
        return Term(values=values, weight=weight, mask=mask, counts=counts)

    terms = (
        term(surrogate, 1.0 - mu, ~expert, global_usual_tokens, global_usual_sequences),
        term(imitation, mu, expert, global_expert_tokens, global_expert_sequences),
    )
    return terms, {key: value.masked_fill(expert.unsqueeze(-1), 0.0) for key, value in metrics.items()}


@register("loss", "mix", "token", whole_batch=_MIX_COUNTS)
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
    """(1 - mu) PPO(usual rows) + mu SFT(expert rows), each normalised by its own global count. [MIX, Trinity-RFT
    report, arXiv:2505.17826, section 3.2]

    ``expert_mask`` is bool ``[B]``. Tokens are counted by ``global_usual_tokens`` and ``global_expert_tokens``; unset,
    this call is the whole batch. Means over sequences use ``global_usual_sequences`` and ``global_expert_sequences``
    or, where only the tokens are counted, all sequences of the batch.

    Differs: Each part is a mean over its own tokens (or sequences) of the whole batch; Trinity-RFT scales means of
    micro-batches.
    """
    rows = (log_probs, old_log_probs, advantages, response_mask, expert_mask)
    counts = (global_usual_tokens, global_expert_tokens, global_usual_sequences, global_expert_sequences)
    return _mix_chord(*rows, *counts, mu=mu, phi=False, clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual)


def chord_mu(step: int, *, warmup_steps: int, decay_steps: int, peak: float = 0.9, valley: float = 0.05) -> float:
    """Return CHORD's weight of the expert data at ``step``.

    It is linear up to ``peak``, then a half cosine down to ``valley``. The form is Trinity-RFT's for arXiv:2508.11408;
    peak and valley are that paper's example, to be set per task.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    done = min((step - warmup_steps) / decay_steps, 1.0) if decay_steps else 1.0
    return valley + (peak - valley) * 0.5 * (1.0 + math.cos(math.pi * done))
