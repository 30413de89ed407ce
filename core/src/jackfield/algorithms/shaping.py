"""Reward shaping before advantages are estimated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from attrs.validators import ge, gt

from jackfield.algorithms.divergences import kl
from jackfield.algorithms.options import Epsilon, NotNegative, ascending
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import Groups, clean, masked_mean_std, require_finite, require_shapes
from jackfield.errors import ConfigError
from jackfield.settings import option

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen(kw_only=True)
class Shaping:
    """The settings of reward shaping: first clipping, then normalisation, then the overlong penalty."""

    clip: tuple[float, float] | None = option(None, "bounds of a response's reward; null: off", ascending)
    normalize: bool = option(False, "subtract the batch's mean and divide by the batch's standard deviation")
    overlong_length: int | None = option(
        None, "length in tokens from which the full overlong penalty applies; null: off", gt(0)
    )
    overlong_buffer: int = option(1, "tokens before overlong_length over which the penalty grows from 0", gt(0))
    overlong_factor: float = option(1.0, "full overlong penalty", ge(0.0))
    fill_failed: bool = option(False, "replace a failed score by the mean of the group's other scores")

    @property
    def active(self) -> bool:
        """True if any reward may change."""
        return self.clip is not None or self.normalize or self.overlong_length is not None

    def shape(self, totals: Tensor, lengths: Tensor) -> Tensor:
        """Shape the rewards of whole responses: ``totals`` float ``[B]``, ``lengths`` in tokens, int ``[B]``."""
        if self.clip is not None:
            totals = clip_rewards(totals, low=self.clip[0], high=self.clip[1])
        if self.normalize:
            totals = normalize_rewards(totals)
        if self.overlong_length is not None:
            bounds = {"max_length": self.overlong_length, "buffer": self.overlong_buffer}
            totals = totals + overlong_penalty(lengths, **bounds, factor=self.overlong_factor)
        return totals


@register("shaping", "kl_in_reward", "token")
def kl_in_reward(
    token_rewards: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    *,
    coefficient: float,
    estimator: str = "k1",
) -> tuple[Tensor, Tensor]:
    """r_t - coefficient kl_t on each model token. [InstructGPT, arXiv:2203.02155, equation 2; Ziegler et al.,
    arXiv:1909.08593]

    All tensors are ``[B, T]``; ``log_probs`` are those of the policy that generated (or of pi_old). Rewards of
    observation tokens do not change. ``estimator`` is a name of :func:`jackfield.algorithms.kl`.

    Returns ``(token_rewards, kl)``: ``[B, T]``, and the mean KL per model token, a scalar, to adapt the coefficient.
    Errors are ``algorithm.unknown``, ``algorithm.input`` and ``algorithm.not-finite`` (which names the first row).
    """
    require_shapes({"token_rewards": token_rewards}, response_mask.shape)
    tensors = clean({"log_probs": log_probs.detach(), "ref_log_probs": ref_log_probs.detach()}, response_mask)
    keep = response_mask != 0
    penalty = kl(estimator, **tensors).masked_fill(~keep, 0.0)
    mean = masked_mean_std(penalty, keep)[0].to(penalty.dtype)
    return token_rewards - coefficient * penalty.to(token_rewards.dtype), mean


@register("shaping", "overlong_penalty", "sequence")
def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, factor: NotNegative = 1.0) -> Tensor:
    """factor * clip((max_length - buffer - length) / buffer, -1, 0): to be added to the reward of a response. [DAPO,
    arXiv:2503.14476, equation 13]

    ``lengths`` (int ``[B]``), ``max_length``, from which on the penalty is ``-factor``, and ``buffer``, over which it
    grows from 0, are in tokens. The result is float ``[B]``, never positive. A buffer longer than ``max_length`` is
    refused (``algorithm.input``).
    """
    if not 0 < buffer <= max_length:
        found = f"buffer {buffer}, max_length {max_length}"
        raise ConfigError("overlong_penalty needs 0 < buffer <= max_length", code="algorithm.input", found=found)
    return factor * ((max_length - buffer - lengths.float()) / buffer).clamp(-1.0, 0.0)


@register("shaping", "dynamic_sampling_filter", "group")
def dynamic_sampling_filter(scores: Tensor, group_ids: Tensor, *, min_spread: NotNegative = 0.0) -> Tensor:
    """Keep rows of groups with max(score) - min(score) > min_spread: the others give no group-relative gradient. [DAPO,
    arXiv:2503.14476, equation 11]

    ``scores`` float and ``group_ids`` int ``[B]`` give bool ``[B]``. A group of one is not kept.
    """
    groups, values = Groups(group_ids), scores.double()
    return groups.maxima(values) + groups.maxima(-values) > min_spread


@register("shaping", "normalize_rewards", "batch")
def normalize_rewards(scores: Tensor, *, center: bool = True, eps: Epsilon = 1e-8) -> Tensor:
    """(R - mean_batch(R)) / (std_batch(R) + eps), std over n - 1; ``center=False``: R / (std_batch(R) + eps).

    ``scores`` is float ``[B]``. A batch of one (or of equal rewards) becomes 0, or does not change if uncentred.
    """
    mean, deviation = masked_mean_std(scores, scores == scores)
    if center:
        return ((scores.double() - mean) / (deviation + eps)).to(scores.dtype)
    return (scores / (deviation + eps)).to(scores.dtype) if float(deviation) else scores


@register("shaping", "clip_rewards", "token")
def clip_rewards(rewards: Tensor, *, low: float, high: float) -> Tensor:
    """clip(R, low, high), any shape.

    Bounds that do not ascend are refused (``algorithm.input``).
    """
    if not low < high:
        raise ConfigError("clip_rewards needs low < high", code="algorithm.input", found=f"{low}, {high}")
    return rewards.clamp(low, high)


@register("shaping", "fill_failed", "group")
def fill_failed(scores: Tensor, failed: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """A failed score becomes the mean of its group's other scores: group-relative estimators then give it about 0.
    [verl's async reward agent recipe (post_process_scores)]

    Differs: A group in which all scores failed has no mean: its rows stay failed instead of scoring 0.

    ``scores`` float, ``failed`` bool and ``group_ids`` int are ``[B]``; a failed row may have any score, even NaN.
    Returns the new ``scores`` and ``failed``, ``[B]``. Rows of groups without any score stay failed, with score 0. A
    NaN or infinite score that has not failed is refused (``algorithm.not-finite``), with its row.
    """
    known_scores = scores.masked_fill(failed, 0.0)
    require_finite({"a score that has not failed": known_scores}, None, "report a failure status in its place")
    groups = Groups(group_ids)
    known = groups.sums((~failed).double())
    means = groups.sums(known_scores.double()) / known.clamp(min=1.0)
    return means.to(scores.dtype).where(failed, scores), failed & (known == 0)
