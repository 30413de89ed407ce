"""Baselines of online policy mirror descent (the Trinity-RFT report, arXiv:2505.17826, appendix A)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from jackfield.algorithms.options import Positive
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import Groups, row_sums, spread
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = []


@register(
    "advantages",
    "opmd",
    "group",
    paper="Trinity-RFT report, arXiv:2505.17826, appendix A.1 and A.3",
    differs="Trinity-RFT gives a group of one its raw score; both baselines of one reward are that reward, so 0.",
)
def _opmd(
    token_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    *,
    baseline: Literal["mean", "log_avg_exp"] = "mean",
    tau: Positive = 1.0,
) -> tuple[Tensor, Tensor]:
    """A_i = R_i - b, b = mean_group(R) (``mean``) or tau log(mean_group(exp(R / tau))) (``log_avg_exp``).

    The loss ``opmd`` wants ``mean``. ``log_avg_exp`` is tau log Z of appendix A.1: what ``opmd_kimi`` wants.
    """
    groups, scores = Groups(group_ids), row_sums(token_rewards)
    if baseline == "mean":
        expected = groups.means(scores)
    elif baseline == "log_avg_exp":
        if not tau > 0:
            raise ConfigError("log_avg_exp needs tau > 0", code="algorithm.input", found=str(tau))
        expected = tau * groups.log_mean_exp(scores / tau)
    else:
        raise ConfigError(
            "opmd has no such baseline", code="algorithm.input", expected="mean or log_avg_exp", found=baseline
        )
    advantages = spread((scores - expected).masked_fill(groups.alone, 0.0), response_mask, token_rewards)
    return advantages, advantages
