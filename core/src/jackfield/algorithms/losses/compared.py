"""Losses that compare responses of one group: online policy mirror descent and preferences.

log pi(y) is the sum over the model tokens of y; pi_ref is ``ref_log_probs`` if given, else ``old_log_probs`` (the
policy from which the update starts).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from attrs.validators import ge, lt

from jackfield.algorithms.options import Positive
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import Groups, LossResult, Term, row_log_ratio, row_means
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def _given(**candidates: Tensor | None) -> Tensor:
    """Return the first candidate that is not None."""
    for value in candidates.values():
        if value is not None:
            return value
    raise ConfigError(f"this form of mirror descent needs {' or '.join(candidates)}", code="algorithm.input")


def _regularised(
    log_probs: Tensor,
    response_mask: Tensor,
    old_log_probs: Tensor | None,
    ref_log_probs: Tensor | None,
    rewards: Tensor | None,
    advantages: Tensor | None,
    tau: float,
    reference: str,
) -> tuple[Tensor, Tensor]:
    """Return a = R - tau (log pi(y) - log pi_ref(y)), up to a group constant, and the log-ratio; both ``[B]``."""
    gains = _given(rewards=rewards, advantages=None if advantages is None else row_means(advantages, response_mask))
    candidates = {"ref_log_probs": ref_log_probs, "old_log_probs": old_log_probs}
    wanted = {name: value for name, value in candidates.items() if reference in ("auto", name[:3])}
    logs = row_log_ratio(log_probs, _given(**wanted))
    return gains.to(log_probs.dtype) - tau * logs, logs


def _log_partitions(rewards: Tensor, group_ids: Tensor, tau: float) -> dict[str, Tensor]:
    """Compute log Z of each row's group, ``[B]``."""
    return {"opmd_log_partition": Groups(group_ids).log_mean_exp(rewards.double() / tau)}


def _kept(rows: Tensor, response_mask: Tensor) -> Tensor:
    """Return ``rows`` with 0 for rows without a model token, which are not responses."""
    return rows.masked_fill((response_mask == 0).all(-1), 0.0)


@register("loss", "opmd_kimi", "group", whole_batch=("opmd_log_partition",), prepare=_log_partitions, per_sequence=True)
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
    [Trinity-RFT report, arXiv:2505.17826, appendix A.1; Kimi k1.5, arXiv:2501.12599, section 2.3.2]

    Without ``rewards``, R - tau log Z is the row's advantage from the estimator ``opmd`` with
    ``baseline="log_avg_exp"`` and the same tau.

    Differs: We divide by the global count of sequences; the report has a plain sum.
    """
    a, logs = _regularised(log_probs, response_mask, old_log_probs, ref_log_probs, rewards, advantages, tau, reference)
    if rewards is not None:
        a = a - tau * _given(opmd_log_partition=opmd_log_partition).to(a.dtype)
    return _kept(a.square(), response_mask), {"policy/log_ratio": logs}


def _group_columns(
    log_probs: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Compute the mean of a and the number of responses of each row's group, ``[B]``."""
    tau, reference = options["tau"], options["reference"]
    a, _ = _regularised(log_probs, response_mask, old_log_probs, ref_log_probs, rewards, advantages, tau, reference)
    groups, real = Groups(group_ids), (response_mask != 0).any(-1)
    sizes = groups.sums(real.double())
    means = groups.sums(a.double().masked_fill(~real, 0.0)) / sizes.clamp(min=1.0)
    return {"opmd_group_means": means.to(a.dtype), "opmd_group_sizes": sizes.to(a.dtype)}


_GROUP_COLUMNS = ("opmd_group_means", "opmd_group_sizes")


@register("loss", "opmd_pairwise", "group", whole_batch=_GROUP_COLUMNS, prepare=_group_columns, per_sequence=True)
def _opmd_pairwise(
    log_probs: Tensor,
    response_mask: Tensor,
    opmd_group_means: Tensor,
    opmd_group_sizes: Tensor,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    group_ids: Tensor | None = None,
    *,
    tau: Positive = 1.0,
    reference: Literal["auto", "old", "ref"] = "auto",
) -> LossResult:
    """sum_{i<j}((a_i - a_j)^2) over each group, a = R - tau (log pi(y) - log pi_ref(y)). [Trinity-RFT report,
    arXiv:2505.17826, appendix A.2; two responses: Flet-Berliac et al., arXiv:2406.19185]

    It is computed as K sum_i((a_i - mean(a))^2), whose gradient does not change if mean(a) is held fixed: each row only
    needs the size and mean of its group. A baseline of the group cancels, so that the row's advantage is used without
    ``rewards``.

    Differs: Trinity-RFT needs a group's rows in one micro-batch; here a split group gives the same loss and gradient.
    We divide by the global count of sequences.
    """
    a, _ = _regularised(log_probs, response_mask, old_log_probs, ref_log_probs, rewards, advantages, tau, reference)
    return _kept(opmd_group_sizes * (a - opmd_group_means).square(), response_mask), {}


def _require_pairs(wrong: Tensor, pair_ids: Tensor, message: str, fix: str) -> None:
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        where = f"row {row}, pair_ids {int(pair_ids[row])}"
        message += "; a pair of dpo is one chosen and one rejected row"
        raise ConfigError(message, code="algorithm.input", where=where, fix=fix)


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

    e is ``label_smoothing``. Two rows with equal ``pair_ids`` are a pair: the one with the higher ``rewards`` is chosen
    or, without rewards, the first. A pair may be split into micro-batches: each of its rows has ``dpo_margins`` (z at
    the start of the step) and ``dpo_signs``, and contributes half of the value and of the gradient.

    Differs: The loss has one value per pair, averaged over the global count of pairs (global_sequences / 2). Summing
    log-probabilities over a micro-batch first would make it one pair.
    """
    implicit = row_log_ratio(log_probs, ref_log_probs)
    margin, zero = dpo_margins.to(implicit.dtype), implicit.new_zeros(())
    own = dpo_signs.to(implicit.dtype) * beta * (implicit - implicit.detach())  # value 0, with a gradient
    slope = label_smoothing * margin.sigmoid() - (1.0 - label_smoothing) * (-margin).sigmoid()
    # log sigmoid(z) = -log(e^0 + e^-z) for any z
    value = (1.0 - label_smoothing) * zero.logaddexp(-margin) + label_smoothing * zero.logaddexp(margin)
    metrics = {"policy/preference_accuracy": margin > 0, "policy/preference_margin": margin}
    return (Term(values=0.5 * value + slope * own, counts={"global_sequences": global_sequences / 2}),), metrics
