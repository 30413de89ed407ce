"""Losses -w log pi whose weight w has no gradient, their regularisers, and mixtures with PPO.

r = pi / pi_old on a token, and A is the advantage.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any, Literal

from jackfield.algorithms.losses.clipped import ppo
from jackfield.algorithms.options import ClipDual, NotNegative, Positive, Share
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import CLAMP, LossResult, Term, log_ratio, row_log_ratio, row_means
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@register("loss", "reinforce", "token")
def _reinforce(log_probs: Tensor, advantages: Tensor) -> LossResult:
    """-A log pi. [Williams, 1992]"""
    return -advantages * log_probs, {}


@register("loss", "gpg", "token")
def _gpg(log_probs: Tensor, advantages: Tensor) -> LossResult:
    """-A log pi: GPG differs only in its advantages. [GPG, arXiv:2504.02546]"""
    return -advantages * log_probs, {}


@register("loss", "opmd", "token")
def _opmd(log_probs: Tensor, advantages: Tensor, *, tau: NotNegative = 1.0) -> LossResult:
    """-A log pi / (1 + tau), A = R - mean_group(R). [Trinity-RFT report, arXiv:2505.17826, appendix A.3]"""
    return -advantages * log_probs / (1.0 + tau), {}


@register("loss", "cispo", "token")
def _cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: Share = 1.0,
    clip_high: NotNegative = 0.28,
) -> LossResult:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: the weight is clipped, no token loses its gradient.
    [MiniMax-M1, arXiv:2506.13585]

    Differs: The paper sets no lower bound and does not state its upper one: clip_low=1 is no lower bound, and
    clip_high=0.28 is DAPO's value.
    """
    ratio = log_ratio(log_probs, old_log_probs).exp().detach()
    weights = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weights * advantages * log_probs, {"policy/clip_fraction": weights != ratio, "policy/ratio": ratio}


@register("loss", "topr", "sequence")
def _topr(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    threshold: float = 0.0,
    upper: Positive = 1.0,
) -> LossResult:
    """-w A log pi, w = 1 where A > threshold and sg(min(pi(y) / pi_old(y), upper)) elsewhere: the tapered importance
    weight. [TOPR, arXiv:2503.14286, canonical form]

    Differs: A sequence is positive or negative by the sign of its mean advantage.
    """
    ratio = row_log_ratio(log_probs, old_log_probs).detach().clamp(max=CLAMP).exp().clamp(max=upper)
    weights = ratio.masked_fill(row_means(advantages, response_mask) > threshold, 1.0)
    return -weights.unsqueeze(-1) * advantages * log_probs, {"policy/taper": weights}


@register("loss", "rec", "token")
def _rec(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
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
    ratio = log_ratio(log_probs, old_log_probs).exp().detach()
    low, high = ratio >= 1.0 - clip_low, ratio <= 1.0 + clip_high
    up, down = advantages >= 0, advantages <= 0
    kept = {
        "none": ratio > 0,
        "two-side": low & high,
        "one-side": (up & high) | (down & low),
        "ring": (low & high) | (up & (ratio <= 1.0 - ring_low)) | (down & (ratio >= 1.0 + ring_high)),
    }[clip]
    gain = advantages
    if weight == "importance":
        gain = advantages * ratio
    elif weight == "advantage":
        gain = advantages * (advantages / temperature).clamp(max=20.0).exp()
    losses = -(gain * log_probs).masked_fill(~kept, 0.0)
    if regularizer == "k2":
        losses = losses + regularizer_coefficient * (log_probs - old_log_probs).square()
    elif regularizer == "forward_kl":
        losses = losses - regularizer_coefficient * log_probs
    return losses, {"policy/clip_fraction": ~kept, "policy/ratio": ratio}


@register("loss", "dro", "sequence", per_sequence=True)
def _dro(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    beta: Positive = 1.0,
    level: Literal["sequence", "token"] = "sequence",
) -> LossResult:
    """-A log pi(y) + beta / 2 (log pi(y) - log pi_old(y))^2, per sequence, or per token with ``level="token"``. [DRO,
    arXiv:2405.19107 (its policy objective, the value as baseline in A)]

    Differs: level=token is the form that Tinker documents. The paper learns the value; here A includes any baseline.
    """
    gain, logs = advantages * log_probs, log_ratio(log_probs, old_log_probs)
    if level == "sequence":
        gain, logs = gain.sum(-1), row_log_ratio(log_probs, old_log_probs)
    return -gain + 0.5 * beta * logs.square(), {"policy/log_ratio": logs}


@register("loss", "sft", "token")
def _sft(log_probs: Tensor) -> LossResult:
    """-log pi: maximum likelihood of the response."""
    return -log_probs, {}


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

    It needs the same counts as ``mix``.

    Differs: mu is an option; the paper's decay schedule is jackfield.algorithms.chord_mu.
    """
    if (global_usual_tokens is None) != (global_expert_tokens is None):
        message = "give both global_usual_tokens and global_expert_tokens, or none: then this call is the whole batch"
        raise ConfigError(message, code="algorithm.input")
    probability = log_probs.detach().exp()
    imitation = -log_probs * (probability * (1.0 - probability) if phi else 1.0)
    clips: dict[str, Any] = {"clip_low": clip_low, "clip_high": clip_high, "clip_dual": clip_dual}
    surrogate, metrics = ppo(log_probs, old_log_probs, advantages, **clips)
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


def _mix(**given: Any) -> LossResult:
    """(1 - mu) PPO(usual rows) + mu SFT(expert rows), each normalised by its own global count. [MIX, Trinity-RFT
    report, arXiv:2505.17826, section 3.2]

    ``expert_mask`` is bool ``[B]``. Token counts are ``global_usual_tokens`` and ``global_expert_tokens``; without
    them, these rows are the whole batch. Means over sequences use ``global_usual_sequences`` and
    ``global_expert_sequences`` or, if only token counts are given, all sequences of the batch.

    Differs: Each term is a mean over its own tokens (or sequences) of the whole batch; Trinity-RFT scales means of
    micro-batches.
    """
    return _mix_chord(**given, phi=False)


# mix has the inputs of mix_chord, and its options without phi
_taken = [one for name, one in inspect.signature(_mix_chord).parameters.items() if name != "phi"]
_mix.__signature__ = inspect.Signature(_taken)  # type: ignore[attr-defined]
register("loss", "mix", "token", whole_batch=_MIX_COUNTS)(_mix)


def chord_mu(step: int, *, warmup_steps: int, decay_steps: int, peak: float = 0.9, valley: float = 0.05) -> float:
    """Return CHORD's weight of the expert data at ``step``.

    It rises linearly to ``peak``, then falls as a half cosine to ``valley``. The form is Trinity-RFT's for
    arXiv:2508.11408; the defaults of peak and valley are that paper's example, to be set per task.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    done = min((step - warmup_steps) / decay_steps, 1.0) if decay_steps else 1.0
    return valley + (peak - valley) * 0.5 * (1.0 + math.cos(math.pi * done))
