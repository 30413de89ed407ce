"""Sequence parallelism (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509): ranks compute parts of the same rows.

Each rank runs all layers on a piece of the positions. Before attention an all-to-all operation exchanges pieces of
positions for groups of heads, so attention sees whole rows; afterwards another one exchanges them back. Results per
token are gathered, so every rank evaluates the loss on whole rows; in the backward pass each rank keeps the gradients
of its own positions, and FSDP sums them.

Shapes: ``b`` rows, ``S`` positions, ``s`` those of a rank, ``h`` heads, ``D`` head dimension, ``N`` response tokens,
``n`` the most of them on a rank, ``P`` ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jackfield.errors import EngineError
from jackfield_engine_fsdp.model import Rotary, TokenModel
from jackfield_engine_fsdp.sharding import hidden_states

_TOLERANCE = 1e-4
_groups: dict[str, dist.ProcessGroup] = {}  #: by the name of the attention function


class _Exchange(torch.autograd.Function):
    """Send element ``i`` of ``[P, ...]`` to rank ``i``, and return what came: of rank ``i`` at ``i``."""

    @staticmethod
    def forward(ctx: Any, pieces: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(pieces, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(pieces: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    pieces = pieces.contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return received


def _to_heads(each: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange ``[b, h, s, D]`` (all heads, own positions) for ``[b, h / P, S, D]``."""
    pieces = each.unflatten(1, (group.size(), -1)).transpose(0, 1)
    received: torch.Tensor = _Exchange.apply(pieces, group)  # type: ignore[no-untyped-call]
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _to_positions(each: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange ``[b, S, h / P, D]`` for ``[b, s, h, D]``."""
    pieces = each.unflatten(1, (group.size(), -1)).transpose(0, 1)
    received: torch.Tensor = _Exchange.apply(pieces, group)  # type: ignore[no-untyped-call]
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


class _Layer:
    """An attention layer as its kernel sees it, with another number of query heads per head of keys."""

    def __init__(self, layer: nn.Module, groups: int) -> None:
        self._layer, self.num_key_value_groups = layer, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _attention(name: str, kernel: str) -> Any:
    """Return the attention function that exchanges positions for heads around ``kernel``."""

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        group = _groups[name]
        if key.shape[1] % group.size():  # fewer heads of keys than ranks: give each rank a copy of those it needs
            key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
        query, key, value = (_to_heads(each, group) for each in (query, key, value))
        window = options.get("sliding_window")
        if kernel == "sdpa" and attention_mask is None and window is not None and window < query.shape[2]:
            attention_mask = _band(query.shape[2], window, query.device)
        layer: Any = _Layer(module, query.shape[1] // key.shape[1])
        mixed, _ = ALL_ATTENTION_FUNCTIONS[kernel](layer, query, key, value, attention_mask, **options)
        return _to_positions(mixed, group), None

    return attend


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Return the causal mask of a sliding window, bool ``[1, 1, S, S]``."""
    behind = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return ((behind >= 0) & (behind < window))[None, None]


class _Gather(torch.autograd.Function):
    """Gather ``[k, n]`` of all ranks to ``[P, k, n]``; the gradient is this rank's own part."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.rank = group.rank()
        gathered = own.new_empty((group.size(), *own.shape))
        dist.all_gather(list(gathered.unbind(0)), own.contiguous(), group=group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0][ctx.rank], None


class SequenceParallel:
    """The splitting of a model's passes over the ranks of a group, by hooks on the model.

    Refused (``config.invalid-value``) are models whose heads cannot be divided, or whose layers do not compute the
    same on pieces, which one pass over a few tokens shows.
    """

    def __init__(self, causal_lm: PreTrainedModel, kernel: str, group: dist.ProcessGroup) -> None:
        self._group = group
        self._positions: torch.Tensor | None = None  # of this rank in the rows, int64 [1, s]
        self._pass: tuple[torch.Tensor, int] | None = None  # which of the gathered tokens are the labels, own ones
        self._check(causal_lm, kernel)
        self._name = f"jackfield_sequence_{kernel}_{group.size()}"
        _groups[self._name] = group
        tokens = torch.arange(4 * group.size())[None] * 7919 % causal_lm.get_input_embeddings().num_embeddings
        with self._refusing(causal_lm):
            expected = self._own(hidden_states(causal_lm, tokens))
        AttentionInterface.register(self._name, _attention(self._name, kernel))
        causal_lm.set_attn_implementation(self._name)
        causal_lm.base_model.register_forward_pre_hook(self._with_positions, with_kwargs=True)
        self._positions = self._own(torch.arange(tokens.shape[1])[None])
        try:
            with self._refusing(causal_lm):
                found = hidden_states(causal_lm, self._own(tokens))
        finally:
            self._positions = None
        difference = (found - expected).abs().max() / expected.abs().max()
        dist.all_reduce(difference, op=dist.ReduceOp.MAX, group=group)
        bound = _TOLERANCE if causal_lm.dtype == torch.float32 else 0.1
        if not float(difference) <= bound:
            raise self._refusal(causal_lm, f"hidden states that differ by {float(difference):.2g} of the largest")

    @contextmanager
    def _refusing(self, causal_lm: PreTrainedModel) -> Iterator[None]:
        try:
            yield
        except (AssertionError, RuntimeError, TypeError, ValueError, AttributeError, KeyError) as caught:
            raise self._refusal(causal_lm, f"{type(caught).__name__}: {caught}") from caught

    def _check(self, causal_lm: PreTrainedModel, kernel: str) -> None:
        size, config = self._group.size(), causal_lm.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        if heads is None:
            raise self._refusal(causal_lm, "a model without attention heads")
        keys = getattr(config, "num_key_value_heads", None) or heads
        if heads % size or (keys % size and size % keys):
            raise EngineError(
                f"{heads} attention heads with {keys} heads of keys cannot be divided over {size} ranks",
                code="config.invalid-value",
                where="sequence_parallel",
                expected=f"a divisor of {heads}, and a divisor or a multiple of {keys}",
                found=size,
            )
        if kernel == "eager" or Rotary(causal_lm).limits:
            why = "attention: eager" if kernel == "eager" else "rotary frequencies that depend on the length"
            raise self._refusal(causal_lm, why)

    def _refusal(self, causal_lm: PreTrainedModel, found: str) -> EngineError:
        return EngineError(
            f"{type(causal_lm).__name__} does not compute the same on pieces of rows",
            code="config.invalid-value",
            where="sequence_parallel",
            expected="causal attention through the library's attention functions in every layer",
            found=found,
            fix="set sequence_parallel to 1; tensor_parallel may work",
        )

    def attach(self, model: TokenModel) -> None:
        """Split the inputs of each pass of the whole model, and gather its results; after it was sharded."""
        model.register_forward_pre_hook(self._split)
        model.register_forward_hook(self._join)

    def _own(self, each: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of ``[b, S, ...]``."""
        return each.chunk(self._group.size(), dim=1)[self._group.rank()]

    def _with_positions(self, _: nn.Module, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        assert self._positions is not None, "the language model runs only inside of a pass"
        return inputs, {**options, "position_ids": self._positions.to(options["input_ids"].device)}

    def _split(self, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Cut ``(input_ids [b, S], positions [N], labels [N], ...)`` to this rank's piece."""
        input_ids, positions, labels, want_entropy, _, images = inputs
        if images:
            raise EngineError(
                "rows with images cannot be split over ranks",
                code="config.invalid-value",
                where="sequence_parallel",
                expected="rows of text",
                found=f"{sum(each is not None for each in images)} rows with images",
                fix="set sequence_parallel to 1",
            )
        size, rank = self._group.size(), self._group.rank()
        length = input_ids.shape[1]
        input_ids = F.pad(input_ids, (0, -length % size))
        piece = input_ids.shape[1] // size
        self._positions = self._own(torch.arange(input_ids.shape[1])[None])
        rows, places = positions // length, positions % length
        owner = places // piece
        counts = torch.bincount(owner, minlength=size)
        most = max(1, int(counts.max()))  # at least one token: every rank runs the output layer
        order = torch.argsort(owner, stable=True)
        in_piece = torch.empty_like(order)
        starts = counts.cumsum(0) - counts
        in_piece[order] = torch.arange(len(order), device=order.device) - starts[owner[order]]
        own = owner == rank
        padding = (0, 0 if bool(own.any()) else 1)
        self._pass = owner * most + in_piece, most
        own_positions = F.pad((rows * piece + places - rank * piece)[own], padding)
        return self._own(input_ids), own_positions, F.pad(labels[own], padding), want_entropy, None, ()

    def _join(self, _: nn.Module, inputs: Any, outputs: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...]:
        """Gather results per own token to those of all labels, ``[N]``."""
        assert self._pass is not None, "the pass was split"
        (index, most), self._pass = self._pass, None
        results = [each for each in outputs if each is not None]
        own = torch.stack([F.pad(each, (0, most - len(each))) for each in results])
        gathered: torch.Tensor = _Gather.apply(own, self._group)  # type: ignore[no-untyped-call]
        joined = iter(gathered.transpose(0, 1).flatten(1).index_select(1, index).unbind(0))
        return tuple(None if each is None else next(joined) for each in outputs)
