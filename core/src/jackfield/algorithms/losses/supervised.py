"""Losses that learn from given answers: likelihood, and mixtures of it with PPO."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

from jackfield.algorithms.losses.clipped import ppo
from jackfield.algorithms.options import ClipDual, NotNegative, Share
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import LossResult, Term
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


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

    Counts are those of ``mix``.

    Differs: mu is an option; the schedule that the paper decays it by is jackfield.algorithms.chord_mu.
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

    ``expert_mask`` is bool ``[B]``. Tokens are counted by ``global_usual_tokens`` and ``global_expert_tokens``; unset,
    this call is the whole batch. Means over sequences use ``global_usual_sequences`` and ``global_expert_sequences``
    or, where only the tokens are counted, all sequences of the batch.

    Differs: Each part is a mean over its own tokens (or sequences) of the whole batch; Trinity-RFT scales means of
    micro-batches.
    """
    return _mix_chord(**given, phi=False)


_signature = inspect.signature(_mix_chord)  # mix has the inputs of mix_chord, and its options without phi
_mix.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[one for name, one in _signature.parameters.items() if name != "phi"]
)
register("loss", "mix", "token", whole_batch=_MIX_COUNTS)(_mix)


def chord_mu(step: int, *, warmup_steps: int, decay_steps: int, peak: float = 0.9, valley: float = 0.05) -> float:
    """Return CHORD's weight of the expert data at ``step``.

    It is linear up to ``peak``, then a half cosine down to ``valley``. The form is Trinity-RFT's for arXiv:2508.11408;
    peak and valley are that paper's example, to be set per task.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    done = min((step - warmup_steps) / decay_steps, 1.0) if decay_steps else 1.0
    return valley + (peak - valley) * 0.5 * (1.0 + math.cos(math.pi * done))
