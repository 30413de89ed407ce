"""The output layer and log-probabilities in one function that never holds the logits of all tokens.

Hidden states go through the output layer in pieces; the backward pass computes each piece again. What a model does to
its logits afterwards (a scale, a soft cap) is found at load and compared with the model's own logits.

Shapes: ``N`` response tokens, ``H`` hidden size, ``V`` vocabulary, ``R`` rank of an adapter, ``n`` tokens of a piece.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

_log = logging.getLogger("jackfield")

_TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-5}
_HALF_TOLERANCE = 2e-2  #: of logits in bfloat16 and float16, relative to the largest
_LARGEST = 100.0  #: the trial's largest logit: soft caps bend it


@attrs.frozen(kw_only=True)
class LogitTransformation:
    """What a model does to the result of its output layer: ``cap * tanh(scale * logits / cap)``."""

    scale: float = 1.0
    cap: float | None = None  #: None: ``scale * logits``

    def apply_(self, logits: torch.Tensor) -> torch.Tensor:
        """Transform float logits of any shape in place, and return them."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits


@attrs.frozen(kw_only=True, eq=False)
class _Settings:
    transformation: LogitTransformation
    temperature: float
    rows: int  #: tokens of a piece
    product: Callable[..., torch.Tensor]
    want_entropy: bool


class FusedOutput:
    """An output layer of a model, with what the model does to its logits."""

    def __init__(self, transformation: LogitTransformation) -> None:
        self.transformation = transformation

    @classmethod
    def of(cls, model: PreTrainedModel) -> FusedOutput | None:
        """Return the fused output layer of ``model``; None if its logits are computed in another way.

        Logits of a few tokens, amplified so that a soft cap bends them, are compared with the model's own.
        """
        found = cls._found(model)
        if found is None:
            _log.info("%s: the logits of a micro-batch are computed at once", type(model).__name__)
        return found

    @classmethod
    def _found(cls, model: PreTrainedModel) -> FusedOutput | None:
        layer = model.get_output_embeddings()
        if not isinstance(layer, nn.Linear):
            return None
        try:
            hidden, plain, final = _trial(model, layer)
            with torch.no_grad():
                same = _close(plain, F.linear(hidden, layer.weight, layer.bias))
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):
            return None
        if not same or final.shape != plain.shape:
            return None
        for transformation in _candidates(model, plain.double(), final.double()):
            if _close(transformation.apply_(plain.double()).to(final.dtype), final):
                return cls(transformation)
        return None

    def fits(self, model: PreTrainedModel) -> bool:
        """Return whether the output layer of ``model`` has only known parts now (no DoRA), gathered with the rest."""
        layer = model.get_output_embeddings()
        base = getattr(layer, "base_layer", layer)
        return (layer is base or _is_plain_adapter(layer)) and not isinstance(base.weight, DTensor)

    def statistics(
        self,
        model: PreTrainedModel,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        want_entropy: bool,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probabilities of ``labels`` int64 ``[N]``, and entropies: float32 ``[N]``, float64 for float64.

        ``hidden`` is ``[N, H]``. At most ``chunk`` logits (at least one row) exist at once.
        """
        layer, low, up = model.get_output_embeddings(), None, None
        if not isinstance(layer, nn.Linear):
            layer, low, up = _adapted(layer, hidden)
        # a layer whose forward was replaced computes with oneDNN, and so does this
        product = _onednn if "forward" in vars(layer) and layer.bias is None else F.linear
        settings = _Settings(
            transformation=self.transformation,
            temperature=temperature,
            rows=max(1, chunk // layer.weight.shape[0]),
            product=product,
            want_entropy=want_entropy,
        )
        tensors = (hidden.to(layer.weight.dtype), layer.weight, layer.bias, low, up)
        log_probs, entropy = _Statistics.apply(*tensors, labels, settings)  # type: ignore[no-untyped-call]
        return log_probs, entropy if want_entropy else None


def token_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    want_entropy: bool,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities of ``labels`` int64 ``[N]``, and entropies (0 where not wanted), float32 ``[N]``.

    The distribution is ``softmax(hidden @ weight.T / temperature)`` of ``[N, H]`` and ``[V, H]``. At most ``chunk``
    logits (at least one token's) exist at once.
    """
    settings = _Settings(
        transformation=LogitTransformation(),
        temperature=temperature,
        rows=max(1, chunk // weight.shape[0]),
        product=F.linear,
        want_entropy=want_entropy,
    )
    tensors = (hidden, weight, None, None, None)
    result: tuple[torch.Tensor, torch.Tensor] = _Statistics.apply(*tensors, labels, settings)  # type: ignore[no-untyped-call]
    return result


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: None = None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _is_plain_adapter(layer: Any) -> bool:
    """Return whether PEFT's layer computes ``base(x) + scaling * up(down(dropout(x)))`` with at most one adapter."""
    peft = sys.modules.get("peft")
    if peft is None or type(layer) is not peft.tuners.lora.Linear or type(layer.base_layer) is not nn.Linear:
        return False
    if layer.disable_adapters or layer.merged:
        return True
    names = layer.active_adapters
    return len(names) == 1 and not layer.use_dora.get(names[0], False) and layer.lora_B[names[0]].bias is None


def _adapted(layer: Any, hidden: torch.Tensor) -> tuple[nn.Linear, torch.Tensor | None, torch.Tensor | None]:
    """Return the base of PEFT's adapted layer, its scaled low-rank input ``[N, R]`` and second matrix ``[V, R]``."""
    if layer.disable_adapters or layer.merged:
        return layer.base_layer, None, None
    name = layer.active_adapters[0]
    down = layer.lora_A[name]
    low = down(layer.lora_dropout[name](hidden.to(down.weight.dtype))) * layer.scaling[name]
    return layer.base_layer, low, layer.lora_B[name].weight


@torch.no_grad()
def _trial(model: PreTrainedModel, layer: nn.Linear) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output layer's input ``[1, 4, H]`` and output, and the model's logits, of four tokens."""
    seen: dict[str, torch.Tensor] = {}

    def amplify(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        largest = F.linear(inputs[0], layer.weight, layer.bias).abs().max().clamp_min(1e-6)
        seen["hidden"] = inputs[0] * (_LARGEST / largest)
        return (seen["hidden"], *inputs[1:])

    def keep(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        seen["plain"] = output.clone()

    handles = [layer.register_forward_pre_hook(amplify), layer.register_forward_hook(keep)]
    try:
        tokens = torch.arange(4)[None] * 7919 % model.get_input_embeddings().num_embeddings
        final = model(input_ids=tokens, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return seen["hidden"], seen["plain"], final


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    tolerance = _TOLERANCES.get(other.dtype, _HALF_TOLERANCE)
    return float((one.double() - other.double()).abs().max()) <= tolerance * float(other.double().abs().max())


def _candidates(model: PreTrainedModel, plain: torch.Tensor, final: torch.Tensor) -> Iterator[LogitTransformation]:
    """Yield transformations that the configuration's numbers allow, the likeliest first."""
    config = model.config.get_text_config()
    named = {name: value for name, value in vars(config).items() if type(value) in (int, float) and value}
    scales = {1.0}
    for name, value in named.items():
        if ("logit" in name or "lm_head" in name) and "cap" not in name:
            scales |= {float(value), 1.0 / value}
    ratio = float((plain * final).sum() / plain.square().sum())
    for scale in sorted(scales, key=lambda each: abs(each - ratio)):
        yield LogitTransformation(scale=scale)
    for cap in (float(value) for name, value in named.items() if "logit" in name and "cap" in name and value > 0):
        for scale in sorted(scales):
            yield LogitTransformation(scale=scale, cap=cap)


class _Statistics(torch.autograd.Function):
    """Log-probabilities and entropies ``[N]``; saved are the inputs and ``[N]`` normalizers, no logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        low: torch.Tensor | None,
        up: torch.Tensor | None,
        labels: torch.Tensor,
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        results = hidden.new_zeros((3, len(hidden)), dtype=dtype)
        log_probs, entropy, normalizers = results.unbind()
        for start in range(0, len(hidden), settings.rows):
            piece = slice(start, start + settings.rows)
            logits = _logits(piece, hidden, weight, bias, low, up, settings)
            largest = logits.amax(-1, keepdim=True)
            chosen = logits.gather(1, labels[piece, None]).sub_(largest).squeeze(1)
            shifted = logits.sub_(largest)
            if settings.want_entropy:
                powers = shifted.exp()
                total = powers.sum(-1)
                entropy[piece] = total.log() - (powers.mul_(shifted)).sum(-1) / total
            else:
                total = shifted.exp_().sum(-1)
            log_total = total.log_()
            log_probs[piece] = chosen - log_total
            normalizers[piece] = largest.squeeze(1) + log_total
        ctx.settings = settings
        ctx.save_for_backward(hidden, weight, bias, low, up, labels, normalizers, entropy)
        return log_probs.clone(), entropy.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, low, up, labels, normalizers, entropy = ctx.saved_tensors
        settings, needs = ctx.settings, ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if needs[0] else None
        sums = [
            _zeros(tensor) if needed else None for tensor, needed in zip((weight, bias, up), _sums(needs), strict=True)
        ]
        of_weight, of_bias, of_up = sums
        of_low = torch.empty_like(low) if needs[3] else None
        for start in range(0, len(hidden), settings.rows):
            piece = slice(start, start + settings.rows)
            logits = _logits(piece, hidden, weight, bias, low, up, settings, keep=True)
            of_logits = _of_logits(
                logits, labels[piece], normalizers[piece], entropy[piece], [each[piece] for each in gradients], settings
            )
            del logits
            if of_bias is not None:
                of_bias += of_logits.sum(0)
            of_plain = of_logits.to(weight.dtype)
            if of_hidden is not None:
                of_hidden[piece] = settings.product(of_plain, weight.mT)
            if of_weight is not None:
                _add_product(of_weight, of_plain, hidden[piece])
            if up is not None:
                of_plain = of_logits.to(up.dtype)
                if of_low is not None:
                    of_low[piece] = of_plain @ up
                if of_up is not None:
                    _add_product(of_up, of_plain, low[piece])
            del of_logits, of_plain
        of_weight, of_bias, of_up = (
            None if total is None else total.to(tensor.dtype)
            for total, tensor in zip(sums, (weight, bias, up), strict=True)
        )
        return of_hidden, of_weight, of_bias, of_low, of_up, None, None


def _sums(needs: tuple[bool, ...]) -> tuple[bool, bool, bool]:
    return needs[1], needs[2], needs[4]


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros to add up gradients of ``tensor``, float32 or more."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _add_product(total: torch.Tensor, of_logits: torch.Tensor, inputs: torch.Tensor) -> None:
    """Add ``of_logits.T @ inputs``."""
    if total.dtype == of_logits.dtype:
        total.addmm_(of_logits.mT, inputs)
    else:
        total += of_logits.mT @ inputs


def _logits(
    piece: slice,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    low: torch.Tensor | None,
    up: torch.Tensor | None,
    settings: _Settings,
    keep: bool = False,
) -> torch.Tensor:
    """Return transformed logits of a piece ``[n, V]``, float32 or more; not divided by the temperature if ``keep``."""
    logits = settings.product(hidden[piece], weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if low is not None and up is not None:
        logits += low[piece] @ up.mT
    settings.transformation.apply_(logits)
    return logits if keep or settings.temperature == 1.0 else logits.div_(settings.temperature)


def _of_logits(
    logits: torch.Tensor,
    labels: torch.Tensor,
    normalizers: torch.Tensor,
    entropy: torch.Tensor,
    gradients: list[torch.Tensor],
    settings: _Settings,
) -> torch.Tensor:
    """Return the gradient ``[n, V]`` of the output layer's result; ``logits`` are used up."""
    transformation, slope = settings.transformation, None
    if transformation.cap is not None:
        slope = (logits / transformation.cap).square_().neg_().add_(1.0)
    if settings.temperature != 1.0:
        logits.div_(settings.temperature)
    log_probs = logits.sub_(normalizers[:, None])
    of_log_probs = gradients[0][:, None]
    if settings.want_entropy:
        factor = torch.mul(log_probs + entropy[:, None], -gradients[1][:, None]).sub_(of_log_probs)
        of_logits = log_probs.exp_().mul_(factor)
    else:
        of_logits = log_probs.exp_().mul_(-of_log_probs)
    of_logits.scatter_add_(1, labels[:, None], of_log_probs)
    factor_of_all = transformation.scale / settings.temperature
    if factor_of_all != 1.0:
        of_logits.mul_(factor_of_all)
    return of_logits if slope is None else of_logits.mul_(slope)
