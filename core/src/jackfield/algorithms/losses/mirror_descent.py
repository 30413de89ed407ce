"""Online policy mirror descent, three forms: the Trinity-RFT report, arXiv:2505.17826, appendix A.

log pi(y) is the sum over the model tokens of y; pi_ref is ``ref_log_probs`` where given, else ``old_log_probs`` (the
policy that the update starts from).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from jackfield.algorithms.losses.terms import LossResult, row_log_ratio
from jackfield.algorithms.options import NotNegative, Positive
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import Groups, row_means
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = []

_REPORT = "Trinity-RFT report, arXiv:2505.17826, appendix "


@register("loss", "opmd", "token", paper=_REPORT + "A.3")
def _opmd(log_probs: Tensor, advantages: Tensor, *, tau: NotNegative = 1.0) -> LossResult:
    """-A log pi / (1 + tau), A = R - mean_group(R)."""
    if tau < 0:
        raise ConfigError("opmd needs tau >= 0", code="algorithm.input", found=str(tau))
    return -advantages * log_probs / (1.0 + tau), {}


def _reference(old_log_probs: Tensor | None, ref_log_probs: Tensor | None, reference: str) -> Tensor:
    chosen = {
        "auto": ref_log_probs if ref_log_probs is not None else old_log_probs,
        "old": old_log_probs,
        "ref": ref_log_probs,
    }
    if reference not in chosen:
        raise ConfigError(
            "opmd has no such reference", code="algorithm.input", expected="auto, old or ref", found=reference
        )
    log_probs = chosen[reference]
    if log_probs is None:
        raise ConfigError("opmd needs old_log_probs or ref_log_probs", code="algorithm.input", found=reference)
    return log_probs


def _log_partitions(rewards: Tensor, group_ids: Tensor, tau: float) -> dict[str, Tensor]:
    """Compute log Z of each row's group, ``[B]``."""
    return {"opmd_log_partition": Groups(group_ids).log_mean_exp(rewards.double() / tau)}


def _kept(rows: Tensor, response_mask: Tensor) -> Tensor:
    """Rows without a model token are no responses."""
    return rows.masked_fill((response_mask == 0).all(-1), 0.0)


@register(
    "loss",
    "opmd_kimi",
    "group",
    paper=_REPORT + "A.1; Kimi k1.5, arXiv:2501.12599, section 2.3.2",
    differs="Divided by the global count of sequences; the report writes a plain sum.",
    whole_batch=("opmd_log_partition",),
    prepare=_log_partitions,
    per_sequence=True,
)
def _opmd_kimi(
    log_probs: Tensor,
    response_mask: Tensor,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    rewards: Tensor | None = None,
    group_ids: Tensor | None = None,
    advantages: Tensor | None = None,
    opmd_log_partition: Tensor | None = None,
    *,
    tau: Positive = 1.0,
    reference: Literal["auto", "old", "ref"] = "auto",
) -> LossResult:
    """(R - tau log Z - tau (log pi(y) - log pi_ref(y)))^2 per sequence, log Z = log(mean_group(exp(R / tau))).

    R - tau log Z comes from ``rewards`` and the group: whole groups by ``group_ids``, or split ones by
    ``opmd_log_partition`` (:func:`jackfield.algorithms.prepare`). Without ``rewards`` it is the row's advantage, by the
    estimator ``opmd`` with ``baseline="log_avg_exp"`` and the same tau.
    """
    if not tau > 0:
        raise ConfigError("opmd_kimi needs tau > 0", code="algorithm.input", found=str(tau))
    if rewards is None:
        if advantages is None:
            raise ConfigError("opmd_kimi needs rewards or advantages", code="algorithm.input")
        target = row_means(advantages, response_mask)
    else:
        if opmd_log_partition is None:
            if group_ids is None:
                raise ConfigError("opmd_kimi needs group_ids or opmd_log_partition", code="algorithm.input")
            opmd_log_partition = _log_partitions(rewards, group_ids, tau)["opmd_log_partition"]
        target = (rewards - tau * opmd_log_partition).to(log_probs.dtype)
    logs = row_log_ratio(log_probs, _reference(old_log_probs, ref_log_probs, reference))
    return _kept((target - tau * logs).square(), response_mask), {"policy/log_ratio": logs}


def _regularised(
    log_probs: Tensor,
    response_mask: Tensor,
    reference: Tensor,
    rewards: Tensor | None,
    advantages: Tensor | None,
    tau: float,
) -> Tensor:
    """a = R - tau (log pi(y) - log pi_ref(y)), ``[B]``, up to a constant of the group."""
    if rewards is None:
        if advantages is None:
            raise ConfigError("opmd_pairwise needs rewards or advantages", code="algorithm.input")
        rewards = row_means(advantages, response_mask)
    return rewards.to(log_probs.dtype) - tau * row_log_ratio(log_probs, reference)


def _group_means(a: Tensor, group_ids: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    """Mean and size of each row's group, over rows that have a model token."""
    groups, real = Groups(group_ids), (response_mask != 0).any(-1)
    sizes = groups.sums(real.double())
    means = groups.sums(a.detach().double().masked_fill(~real, 0.0)) / sizes.clamp(min=1.0)
    return {"opmd_group_means": means.to(a.dtype), "opmd_group_sizes": sizes.to(a.dtype)}


def _group_columns(
    log_probs: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    tau: float,
    reference: str,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    rewards: Tensor | None = None,
    advantages: Tensor | None = None,
) -> dict[str, Tensor]:
    """Compute the mean of a and the number of responses of each row's group, ``[B]``."""
    anchor = _reference(old_log_probs, ref_log_probs, reference)
    a = _regularised(log_probs, response_mask, anchor, rewards, advantages, tau)
    return _group_means(a, group_ids, response_mask)


@register(
    "loss",
    "opmd_pairwise",
    "group",
    paper=_REPORT + "A.2; two responses: Flet-Berliac et al., arXiv:2406.19185",
    differs="Trinity-RFT needs a group's rows in one micro-batch; here a split group gives the same loss and gradient. "
    "Divided by the global count of sequences.",
    whole_batch=("opmd_group_means", "opmd_group_sizes"),
    prepare=_group_columns,
    per_sequence=True,
)
def _opmd_pairwise(
    log_probs: Tensor,
    response_mask: Tensor,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    group_ids: Tensor | None = None,
    opmd_group_means: Tensor | None = None,
    opmd_group_sizes: Tensor | None = None,
    *,
    tau: Positive = 1.0,
    reference: Literal["auto", "old", "ref"] = "auto",
) -> LossResult:
    """sum_{i<j}((a_i - a_j)^2) over each group, a = R - tau (log pi(y) - log pi_ref(y)).

    Computed as K sum_i((a_i - mean(a))^2), whose gradient, too, is that with mean(a) held fixed: so each row needs no
    more of its group than size and mean. Whole groups come by ``group_ids``, split ones with ``opmd_group_means`` and
    ``opmd_group_sizes`` (:func:`jackfield.algorithms.prepare`). Any baseline of the group cancels: without ``rewards``
    the row's advantage will do.
    """
    anchor = _reference(old_log_probs, ref_log_probs, reference)
    a = _regularised(log_probs, response_mask, anchor, rewards, advantages, tau)
    if opmd_group_means is None or opmd_group_sizes is None:
        if group_ids is None:
            raise ConfigError("opmd_pairwise needs group_ids, or what prepare makes of them", code="algorithm.input")
        columns = _group_means(a, group_ids, response_mask)
        opmd_group_means, opmd_group_sizes = columns["opmd_group_means"], columns["opmd_group_sizes"]
    return _kept(opmd_group_sizes * (a - opmd_group_means).square(), response_mask), {}
