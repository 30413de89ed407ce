"""Operators with fewer passes over memory than the library's: norms, rotary embeddings, log-probabilities.

The library's norm and rotary embedding are chains of operations, each with a pass over memory, its own backward pass
and saved tensors. Ours save only their inputs. They are in float32, as the library's.

Shapes: ``N`` response tokens, ``V`` vocabulary, ``D`` head dimension; ``...`` any leading dimensions.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from jackfield_huggingface.norms import replace_norms

_NORM_TOLERANCE = 1e-5
_KEPT_BYTES = (1 << 31) - 1
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  #: names of parameters in glibc's malloc.h


def keep_freed_memory() -> None:
    """Have the C library keep up to 2 GiB of freed memory for the next pass, in the whole process.

    It would return much of it to the system, and the first access to a fresh page takes as long as several passes over
    it. Without glibc, do nothing.
    """
    library = ctypes.CDLL(None)
    for name in (_TRIM_THRESHOLD, _MMAP_THRESHOLD) if hasattr(library, "mallopt") else ():
        library.mallopt(name, _KEPT_BYTES)


class _RMSNorm(torch.autograd.Function):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension, in the dtype of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        result: torch.Tensor = (x * scale).mul_(weight)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        products, of_weight, of_x = gradients[0] * x, None, None
        if ctx.needs_input_grad[1]:
            of_weight = (scale.reshape(1, -1) @ products.flatten(0, -2)).squeeze(0)
        if ctx.needs_input_grad[0]:
            along = (products @ weight).unsqueeze(-1).mul_(scale.pow(3)).div_(x.shape[-1])
            of_x = torch.mul(gradients[0], weight, out=products).mul_(scale).addcmul_(x, along, value=-1)
        return of_x, of_weight, None


def _forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)  # type: ignore[no-untyped-call]
    return result


def speed_up_norms(model: nn.Module) -> int:
    """Replace the forward of the model's norms by a faster equivalent; return how many were replaced."""
    return replace_norms(model, _forward, _NORM_TOLERANCE)


class _Linear(torch.autograd.Function):
    """``x @ weight.T`` by oneDNN, and of the gradients that of ``x``; that of the weight is no faster there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = _product(gradients[0], weight.mT) if ctx.needs_input_grad[0] else None
        of_weight = gradients[0].flatten(0, -2).mT @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return result


def _linear(self: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Linear.apply(x, self.weight)  # type: ignore[no-untyped-call]
    return result


def speed_up_products(model: nn.Module) -> None:
    """On a CPU of AMD, have oneDNN compute linear layers in float32; MKL, which torch takes, is slower there."""
    described = Path("/proc/cpuinfo")
    if described.exists() and "AuthenticAMD" in described.read_text() and torch.backends.mkldnn.is_available():
        for module in model.modules():
            if type(module) is nn.Linear and [torch.float32] == [each.dtype for each in module.parameters()]:
                module.forward = MethodType(_linear, module)  # type: ignore[method-assign]


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """Rotate pairs of the halves of ``x`` ``[..., D]`` by the angles (``sign`` 1), or back (-1)."""
    half = x.shape[-1] // 2
    result = x * cos
    result[..., :half].addcmul_(x[..., half:], sin[..., :half] if sign > 0 else sin[..., half:], value=-sign)
    result[..., half:].addcmul_(x[..., :half], sin[..., half:] if sign > 0 else sin[..., :half], value=sign)
    return result


class _Rotary(torch.autograd.Function):
    """``x * cos + rotate_half(x) * sin``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradients[0], cos, sin, -1), None, None


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``[..., heads, D]`` with rotary embeddings ``[..., 1, D]``."""
    result: torch.Tensor = _Rotary.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return result


def token_statistics(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, want_entropy: bool, chunk: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return float32 log-probabilities of ``labels`` int64 ``[N]``, and entropies.

    The distribution is ``softmax(logits / temperature)``; ``logits`` are ``[N, V]`` of any float dtype. At most
    ``chunk`` of them (at least one row) are in float32 at once; pieces are recomputed in the backward pass.
    """
    rows = max(1, chunk // logits.shape[-1])
    if logits.shape[0] <= rows:
        return _statistics(logits, labels, temperature, want_entropy)
    pieces = []
    for piece, piece_labels in zip(torch.split(logits, rows), torch.split(labels, rows), strict=True):
        arguments = (piece, piece_labels, temperature, want_entropy)
        if torch.is_grad_enabled():
            pieces.append(checkpoint(_statistics, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            pieces.append(_statistics(*arguments))
    entropy = torch.cat([piece[1] for piece in pieces]) if want_entropy else None
    return torch.cat([piece[0] for piece in pieces]), entropy


def _statistics(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, want_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if not want_entropy:
        result: torch.Tensor = _LogProbs.apply(logits, labels)  # type: ignore[no-untyped-call]
        return result, None
    all_log_probs = logits.log_softmax(-1)
    log_probs = -F.nll_loss(all_log_probs, labels, reduction="none")
    return log_probs, -(all_log_probs.exp() * all_log_probs).sum(-1)


class _LogProbs(torch.autograd.Function):
    """Log-probabilities ``[N]`` of ``labels``. The gradient of the logits takes the place of what was saved for it."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        probabilities = logits.softmax(-1)
        # the most probable token has at least 1/V: its logarithm is exact where that of a label may underflow
        normalizer = logits.amax(-1).sub_(probabilities.amax(-1).log_())
        ctx.save_for_backward(probabilities, labels)
        return logits.gather(1, labels[:, None]).squeeze(1) - normalizer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        probabilities, labels = ctx.saved_tensors
        gradient = gradients[0][:, None]
        of_logits = probabilities.mul_(-gradient)
        return of_logits.scatter_add_(1, labels[:, None], gradient), None
