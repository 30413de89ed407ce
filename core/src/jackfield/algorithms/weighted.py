"""Losses -w log pi whose weight w has no gradient, mixtures with PPO, and losses that compare responses of one group.

r = pi / pi_old on a token, and A is the advantage. log pi(y) is the sum over the model tokens of y. In mirror descent
pi_ref is ``ref_log_probs`` if given, else ``old_log_probs`` (the policy from which the update starts).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from attrs.validators import ge, lt

from jackfield.algorithms.clipped import ppo
from jackfield.algorithms.registry import ClipDual, Inputs, NotNegative, Positive, Share, register
from jackfield.algorithms.tensors import CLAMP, Groups, LossResult, Term, log_ratio, row_log_ratio, row_means
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@register("loss", "gpg", "token", "advantages")
@register("loss", "reinforce", "token", "advantages")
def _policy_gradient(x: Inputs) -> LossResult:
    """-A log pi; GPG and REINFORCE differ only in their advantages. [Williams, 1992; GPG, arXiv:2504.02546]"""
    return -x.advantages * x.log_probs, {}


@register("loss", "opmd", "token", "advantages")
def _opmd(x: Inputs, *, tau: NotNegative = 1.0) -> LossResult:
    """-A log pi / (1 + tau), A = R - mean_group(R). [Trinity-RFT report, arXiv:2505.17826, appendix A.3]"""
    return -x.advantages * x.log_probs / (1.0 + tau), {}


@register("loss", "cispo", "token", "old_log_probs advantages")
def _cispo(x: Inputs, *, clip_low: Share = 1.0, clip_high: NotNegative = 0.28) -> LossResult:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: the weight is clipped, no token loses its gradient.
    [MiniMax-M1, arXiv:2506.13585]

    Differs: The paper sets no lower bound and does not state its upper one: clip_low=1 is no lower bound, and
    clip_high=0.28 is DAPO's value.
    """
    ratio = log_ratio(x.log_probs, x.old_log_probs).exp().detach()
    weights = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weights * x.advantages * x.log_probs, {"policy/clip_fraction": weights != ratio, "policy/ratio": ratio}


@register("loss", "topr", "sequence", "old_log_probs advantages")
def _topr(x: Inputs, *, threshold: float = 0.0, upper: Positive = 1.0) -> LossResult:
    """-w A log pi, w = 1 where A > threshold and sg(min(pi(y) / pi_old(y), upper)) elsewhere: the tapered importance
    weight. [TOPR, arXiv:2503.14286, canonical form]

    Differs: A sequence is positive or negative by the sign of its mean advantage.
    """
    ratio = row_log_ratio(x.log_probs, x.old_log_probs).detach().clamp(max=CLAMP).exp().clamp(max=upper)
    weights = ratio.masked_fill(row_means(x.advantages, x.response_mask) > threshold, 1.0)
    return -weights.unsqueeze(-1) * x.advantages * x.log_probs, {"policy/taper": weights}


@register("loss", "rec", "token", "old_log_probs advantages")
def _rec(
    x: Inputs,
    *,
    clip: Literal["none", "one-side", "two-side", "ring"] = "one-side",
    weight: Literal["none", "importance", "advantage"] = "none",
    clip_low: Share = 0.2,
    clip_high: NotNegative = 0.2,
    ring_low: NotNegative = 0.6,
    ring_high: NotNegative = 2.0,
    temperature: Positive = 1.0,
    regularizer: Literal["none", "k2", "forward_kl"] = "none",
    regularizer_coefficient: NotNegative = 0.0,
) -> LossResult:
    """-M w A log pi + regulariser; M keeps r within bounds, w is 1, r (no gradient) or exp(A / temperature). [Yao et
    al., arXiv:2509.24203 (REC family, RED-Weight, and OPMD's and AsymRE's regularisers)]

    ``clip``: ``two-side`` keeps 1 - clip_low <= r <= 1 + clip_high; ``one-side`` bounds r from above for A >= 0 and
    from below for A <= 0; ``ring`` is two-side and, beyond, r <= 1 - ring_low for A >= 0 and r >= 1 + ring_high for
    A <= 0. ``regularizer``: ``k2`` adds coefficient (log r)^2, ``forward_kl`` adds -coefficient log pi.

    Differs: The estimator, not the loss, drops the rows that RED-Drop excludes.
    """
    gain, ratio = x.advantages, log_ratio(x.log_probs, x.old_log_probs).exp().detach()
    low, high, up, down = ratio >= 1.0 - clip_low, ratio <= 1.0 + clip_high, gain >= 0, gain <= 0
    kept = {
        "none": ratio > 0,
        "two-side": low & high,
        "one-side": (up & high) | (down & low),
        "ring": (low & high) | (up & (ratio <= 1.0 - ring_low)) | (down & (ratio >= 1.0 + ring_high)),
    }[clip]
    if weight == "importance":
        gain = gain * ratio
    elif weight == "advantage":
        gain = gain * (gain / temperature).clamp(max=20.0).exp()
    losses = -(gain * x.log_probs).masked_fill(~kept, 0.0)
    if regularizer == "k2":
        losses = losses + regularizer_coefficient * (x.log_probs - x.old_log_probs).square()
    elif regularizer == "forward_kl":
        losses = losses - regularizer_coefficient * x.log_probs
    return losses, {"policy/clip_fraction": ~kept, "policy/ratio": ratio}


@register("loss", "dro", "sequence", "old_log_probs advantages", per_sequence=True)
def _dro(x: Inputs, *, beta: Positive = 1.0, level: Literal["sequence", "token"] = "sequence") -> LossResult:
    """-A log pi(y) + beta / 2 (log pi(y) - log pi_old(y))^2, per sequence, or per token with ``level="token"``. [DRO,
    arXiv:2405.19107 (its policy objective, the value as baseline in A)]

    Differs: level=token is the form that Tinker documents. The paper learns the value; here A includes any baseline.
    """
    gain, logs = x.advantages * x.log_probs, log_ratio(x.log_probs, x.old_log_probs)
    if level == "sequence":
        gain, logs = gain.sum(-1), row_log_ratio(x.log_probs, x.old_log_probs)
    return -gain + 0.5 * beta * logs.square(), {"policy/log_ratio": logs}


@register("loss", "sft", "token", "")
def _sft(x: Inputs) -> LossResult:
    """-log pi: maximum likelihood of the response."""
    return -x.log_probs, {}


_MIX_COUNTS = ("global_usual_tokens", "global_expert_tokens")
_MIX = "old_log_probs advantages expert_mask " + " ".join(
    f"global_{rows}_{what}?" for what in ("tokens", "sequences") for rows in ("usual", "expert")
)


def _mixture(x: Inputs, imitation: Tensor, mu: float, **clips: Any) -> LossResult:
    """Return PPO's loss of the usual rows and ``imitation`` of the expert's, each with its own counts."""
    if (x.global_usual_tokens is None) != (x.global_expert_tokens is None):
        message = "give both global_usual_tokens and global_expert_tokens, or none: then this call is the whole batch"
        raise ConfigError(message, code="algorithm.input")
    surrogate, metrics = ppo(x, **clips)
    expert = x.expert_mask != 0

    def term(values: Tensor, weight: float, rows: Tensor, tokens: int | None, sequences: int | None) -> Term:
        mask = (x.response_mask != 0) & rows.unsqueeze(-1)
        if tokens is None:
            tokens, sequences = int(mask.sum()), int(rows.sum()) if sequences is None else sequences
        counts = {"global_tokens": tokens} | ({} if sequences is None else {"global_sequences": sequences})
        return Term(values=values, weight=weight, mask=mask, counts=counts)

    terms = (
        term(surrogate, 1.0 - mu, ~expert, x.global_usual_tokens, x.global_usual_sequences),
        term(imitation, mu, expert, x.global_expert_tokens, x.global_expert_sequences),
    )
    return terms, {key: value.masked_fill(expert.unsqueeze(-1), 0.0) for key, value in metrics.items()}


@register("loss", "mix_chord", "token", _MIX, whole_batch=_MIX_COUNTS)
def _mix_chord(
    x: Inputs,
    *,
    mu: Share = 0.1,
    phi: bool = True,
    clip_low: Share = 0.2,
    clip_high: NotNegative = 0.2,
    clip_dual: ClipDual | None = 3.0,
) -> LossResult:
    """(1 - mu) PPO(usual rows) + mu (-phi log pi)(expert rows), phi = sg(pi (1 - pi)) (``phi=False``: 1). [CHORD,
    arXiv:2508.11408]

    It needs the same counts as ``mix``.

    Differs: mu is an option; the paper's decay schedule is jackfield.algorithms.weighted.chord_mu.
    """
    probability = x.log_probs.detach().exp()
    imitation = -x.log_probs * (probability * (1.0 - probability) if phi else 1.0)
    return _mixture(x, imitation, mu, clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual)


@register("loss", "mix", "token", _MIX, whole_batch=_MIX_COUNTS)
def _mix(
    x: Inputs, *, mu: Share = 0.1, clip_low: Share = 0.2, clip_high: NotNegative = 0.2, clip_dual: ClipDual | None = 3.0
) -> LossResult:
    """(1 - mu) PPO(usual rows) + mu SFT(expert rows), each normalised by its own global count. [MIX, Trinity-RFT
    report, arXiv:2505.17826, section 3.2]

    ``expert_mask`` is bool ``[B]``. Token counts are ``global_usual_tokens`` and ``global_expert_tokens``; without
    them, these rows are the whole batch. Means over sequences use ``global_usual_sequences`` and
    ``global_expert_sequences`` or, if only token counts are given, all sequences of the batch.

    Differs: Each term is a mean over its own tokens (or sequences) of the whole batch; Trinity-RFT scales means of
    micro-batches.
    """
    return _mixture(x, -x.log_probs, mu, clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual)


def chord_mu(step: int, *, warmup_steps: int, decay_steps: int, peak: float = 0.9, valley: float = 0.05) -> float:
    """Return CHORD's weight of the expert data at ``step``.

    It rises linearly to ``peak``, then falls as a half cosine to ``valley``. The form is Trinity-RFT's for
    arXiv:2508.11408; the defaults of peak and valley are that paper's example, to be set per task.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    done = min((step - warmup_steps) / decay_steps, 1.0) if decay_steps else 1.0
    return valley + (peak - valley) * 0.5 * (1.0 + math.cos(math.pi * done))


def _given(**candidates: Tensor | None) -> Tensor:
    """Return the first candidate that is not None."""
    for value in candidates.values():
        if value is not None:
            return value
    raise ConfigError(f"this form of mirror descent needs {' or '.join(candidates)}", code="algorithm.input")


def _regularised(x: Inputs, tau: float, reference: str) -> tuple[Tensor, Tensor]:
    """Return a = R - tau (log pi(y) - log pi_ref(y)), up to a group constant, and the log-ratio; both ``[B]``."""
    advantages = None if x.advantages is None else row_means(x.advantages, x.response_mask)
    gains = _given(rewards=x.rewards, advantages=advantages)
    candidates = {"ref_log_probs": x.ref_log_probs, "old_log_probs": x.old_log_probs}
    wanted = {name: value for name, value in candidates.items() if reference in ("auto", name[:3])}
    logs = row_log_ratio(x.log_probs, _given(**wanted))
    return gains.to(x.log_probs.dtype) - tau * logs, logs


def _kept(rows: Tensor, response_mask: Tensor) -> Tensor:
    """Return ``rows`` with 0 for rows without a model token, which are not responses."""
    return rows.masked_fill((response_mask == 0).all(-1), 0.0)


_OPMD = "old_log_probs? ref_log_probs? advantages? rewards?"
_PARTITION, _GROUP = ("opmd_log_partition",), ("opmd_group_means", "opmd_group_sizes")


@register("preparation", "opmd_kimi", "group", "rewards group_ids tau")
def _log_partitions(x: Inputs) -> dict[str, Tensor]:
    """Compute log Z of each row's group, ``[B]``."""
    return {"opmd_log_partition": x.groups.log_mean_exp(x.rewards.double() / x.tau)}


@register("loss", "opmd_kimi", "group", f"{_OPMD} opmd_log_partition?", whole_batch=_PARTITION, per_sequence=True)
def _opmd_kimi(x: Inputs, *, tau: Positive = 1.0, reference: Literal["auto", "old", "ref"] = "auto") -> LossResult:
    """(R - tau log Z - tau (log pi(y) - log pi_ref(y)))^2 per sequence, log Z = log(mean_group(exp(R / tau))).
    [Trinity-RFT report, arXiv:2505.17826, appendix A.1; Kimi k1.5, arXiv:2501.12599, section 2.3.2]

    Without ``rewards``, R - tau log Z is the row's advantage from the estimator ``opmd`` with
    ``baseline="log_avg_exp"`` and the same tau.

    Differs: We divide by the global count of sequences; the report has a plain sum.
    """
    a, logs = _regularised(x, tau, reference)
    if x.rewards is not None:
        a = a - tau * _given(opmd_log_partition=x.opmd_log_partition).to(a.dtype)
    return _kept(a.square(), x.response_mask), {"policy/log_ratio": logs}


@register("preparation", "opmd_pairwise", "group", f"{_OPMD} group_ids tau reference")
def _group_columns(x: Inputs) -> dict[str, Tensor]:
    """Compute the mean of a and the number of responses of each row's group, ``[B]``."""
    a, _ = _regularised(x, x.tau, x.reference)
    groups, real = x.groups, (x.response_mask != 0).any(-1)
    sizes = groups.sums(real.double())
    means = groups.sums(a.double().masked_fill(~real, 0.0)) / sizes.clamp(min=1.0)
    return {"opmd_group_means": means.to(a.dtype), "opmd_group_sizes": sizes.to(a.dtype)}


@register("loss", "opmd_pairwise", "group", _OPMD, whole_batch=_GROUP, per_sequence=True)
def _opmd_pairwise(x: Inputs, *, tau: Positive = 1.0, reference: Literal["auto", "old", "ref"] = "auto") -> LossResult:
    """sum_{i<j}((a_i - a_j)^2) over each group, a = R - tau (log pi(y) - log pi_ref(y)). [Trinity-RFT report,
    arXiv:2505.17826, appendix A.2; two responses: Flet-Berliac et al., arXiv:2406.19185]

    It is computed as K sum_i((a_i - mean(a))^2), whose gradient does not change if mean(a) is held fixed: each row only
    needs the size and mean of its group. A baseline of the group cancels, so that the row's advantage is used without
    ``rewards``.

    Differs: Trinity-RFT needs a group's rows in one micro-batch; here a split group gives the same loss and gradient.
    We divide by the global count of sequences.
    """
    a, _ = _regularised(x, tau, reference)
    return _kept(x.opmd_group_sizes * (a - x.opmd_group_means).square(), x.response_mask), {}


def _require_pairs(wrong: Tensor, pair_ids: Tensor, message: str, fix: str) -> None:
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        where = f"row {row}, pair_ids {int(pair_ids[row])}"
        message += "; a pair of dpo is one chosen and one rejected row"
        raise ConfigError(message, code="algorithm.input", where=where, fix=fix)


@register("preparation", "dpo", "group", "ref_log_probs pair_ids rewards? beta")
def _dpo_columns(x: Inputs) -> dict[str, Tensor]:
    """Compute z of each row's pair, and +1 for the chosen row, -1 for the rejected, ``[B]``."""
    pairs = Groups(x.pair_ids)
    fix = "keep both in one call, or split the batch after jackfield.algorithms.prepare('dpo', …)"
    _require_pairs(pairs.sizes != 2, x.pair_ids, "a row has no partner, or several", fix)
    implicit = row_log_ratio(x.log_probs, x.ref_log_probs)
    signs = 1.0 - 2.0 * pairs.positions()
    if x.rewards is not None:
        signs = (2.0 * x.rewards.double() - pairs.sums(x.rewards.double())).sign()
        _require_pairs(signs == 0, x.pair_ids, "both rows have the same reward", "leave such pairs out")
    signs = signs.to(implicit.dtype)
    return {"dpo_margins": x.beta * signs * (2.0 * implicit - pairs.sums(implicit)), "dpo_signs": signs}


_PAIR = ("dpo_margins", "dpo_signs")


@register("loss", "dpo", "group", "ref_log_probs global_sequences", whole_batch=_PAIR, per_sequence=True)
def _dpo(x: Inputs, *, beta: Positive = 0.1, label_smoothing: Annotated[float, ge(0.0), lt(0.5)] = 0.0) -> LossResult:
    """-(1 - e) log sigmoid(z) - e log sigmoid(-z) per pair, z = beta (h(chosen) - h(rejected)), h = log pi(y) - log
    pi_ref(y). [DPO, arXiv:2305.18290, equation 7; label smoothing: cDPO (Mitchell, 2023)]

    e is ``label_smoothing``. Two rows with equal ``pair_ids`` are a pair: the one with the higher ``rewards`` is chosen
    or, without rewards, the first. A pair may be split into micro-batches: each of its rows has ``dpo_margins`` (z at
    the start of the step) and ``dpo_signs``, and contributes half of the value and of the gradient.

    Differs: The loss has one value per pair, averaged over the global count of pairs (global_sequences / 2). Summing
    log-probabilities over a micro-batch first would make it one pair.
    """
    implicit = row_log_ratio(x.log_probs, x.ref_log_probs)
    margin, zero = x.dpo_margins.to(implicit.dtype), implicit.new_zeros(())
    own = x.dpo_signs.to(implicit.dtype) * beta * (implicit - implicit.detach())  # value 0, with a gradient
    slope = label_smoothing * margin.sigmoid() - (1.0 - label_smoothing) * (-margin).sigmoid()
    # log sigmoid(z) = -log(e^0 + e^-z) for any z
    value = (1.0 - label_smoothing) * zero.logaddexp(-margin) + label_smoothing * zero.logaddexp(margin)
    metrics = {"policy/preference_accuracy": margin > 0, "policy/preference_margin": margin}
    return (Term(values=0.5 * value + slope * own, counts={"global_sequences": x.global_sequences / 2}),), metrics
