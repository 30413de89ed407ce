"""Estimators of the KL divergence to a reference, per token.

J. Schulman, "Approximating KL divergence", 2020. With r = pi_ref / pi and samples from pi, E[k1] = E[k3] = KL(pi,
pi_ref).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jackfield.algorithms.registry import part, register
from jackfield.algorithms.tensors import CLAMP, log_ratio

if TYPE_CHECKING:
    from torch import Tensor


def kl(name: str, log_probs: Tensor, ref_log_probs: Tensor, *, old_log_probs: Tensor | None = None) -> Tensor:
    """Estimate the KL per token, float ``[B, T]``, of log-probs ``[B, T]``.

    Args:
        name: ``k1``, ``k2``, ``k3``, ``abs``, ``low_var_kl``, the value of one of them with the gradient of k2
            (``k1+``, ``k3+``, ``abs+``, ``low_var_kl+``), or ``k3_corrected``.
        log_probs: of the policy.
        ref_log_probs: of the reference.
        old_log_probs: of the behaviour policy; an estimator that corrects for it refuses to be without it.
    """
    offered = {"log_probs": log_probs, "ref_log_probs": ref_log_probs, "old_log_probs": old_log_probs}
    value: Tensor = part("kl", name)(offered)
    return value


def _register(name: str, text: str, estimate: Callable[[Tensor], Tensor]) -> None:
    """Register an estimator of log r, and ``NAME+``: its value with the gradient of k2."""

    def function(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        return estimate(ref_log_probs - log_probs)

    def straight_through(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        value, gradient = (function(log_probs, ref_log_probs), 0.5 * (log_probs - ref_log_probs).square())
        return value.detach() + (gradient - gradient.detach())

    function.__doc__ = text
    register("kl", name, "token")(function)
    paper = "the gradient of k2 is the gradient of the KL in expectation: arXiv:2506.09477"
    straight_through.__doc__ = f"the value of {name} with the gradient of k2. [{paper}]"
    if name != "k2":
        register("kl", f"{name}+", "token")(straight_through)


def _k3(log_r: Tensor) -> Tensor:
    return log_r.expm1() - log_r


_PAPER = "[Schulman, Approximating KL divergence, 2020]"
_register(
    "k1",
    f"-log r = log pi - log pi_ref. Unbiased in value; in a loss its gradient is 0 in expectation. {_PAPER}",
    lambda log_r: -log_r,
)
_register(
    "k2",
    f"(log r)^2 / 2. Biased in value; its gradient is that of the KL in expectation. {_PAPER}",
    lambda log_r: 0.5 * log_r.square(),
)
_register("k3", f"r - 1 - log r. Unbiased in value, never negative. {_PAPER}", _k3)
_register("abs", "|log r|.", lambda log_r: log_r.abs())
_register(
    "low_var_kl",
    "clip(r - 1 - log r, -10, 10) with log r clipped to [-20, 20]. Beyond the bounds there is no gradient. " + _PAPER,
    lambda log_r: _k3(log_r.clamp(-CLAMP, CLAMP)).clamp(-10.0, 10.0),
)


@register("kl", "k3_corrected", "token")
def _k3_corrected(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """(pi / pi_old) (r - 1 - log r): unbiased, in value and gradient, for samples from pi_old. [DeepSeek-V3.2,
    arXiv:2512.02556]
    """
    return log_ratio(log_probs, old_log_probs).exp() * _k3(ref_log_probs - log_probs)
