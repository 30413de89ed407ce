"""Passes without padding, in which rows with the same prompt share its tokens; the attention that makes it possible.

All tokens of a pass stand in one row: each distinct prompt once, then the responses. Everything but attention works on
single tokens. Attention spreads its queries, keys and values to padded rows, each with a prompt of its own.

Shapes: ``N`` tokens of a pass, ``b`` rows, ``L`` longest row, ``h`` heads, ``D`` head dimension, ``F`` features.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Literal

import attrs
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from jackfield_engine_fsdp.operators import rotary

_KNOWN = {f"{name}Attention" for name in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe")}
_TOLERANCE, _HALF_TOLERANCE = 1e-4, 2e-2  #: of logits, relative to the largest


@attrs.frozen(kw_only=True, eq=False)
class Packing:
    """Where the ``N`` tokens of a pass are in its padded rows ``[b, L]``."""

    rows: int  #: ``b``
    source: torch.Tensor  #: int64 ``[b * L]``: the token of each place; past a row's end any token
    place: torch.Tensor  #: int64 ``[N]``: the place of each token, in the first row that has it
    again: torch.Tensor  #: int64: the places of tokens in further rows
    unused: torch.Tensor  #: int64: the places that no ``place`` names

    def to(self, device: torch.device) -> Packing:
        """Return it on a device."""
        indexes = {name: getattr(self, name).to(device) for name in ("source", "place", "again", "unused")}
        return attrs.evolve(self, **indexes)

    def spread(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``[1, N, h, D]`` as ``[b, h, L, D]``."""
        flat = tokens.flatten(0, 1).flatten(1)
        spread: torch.Tensor = _Spread.apply(flat, self)  # type: ignore[no-untyped-call]
        return spread.view(self.rows, -1, *tokens.shape[2:]).transpose(1, 2)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``[b, h, L, D]`` as ``[1, N, h * D]``."""
        flat = rows.transpose(1, 2).flatten(0, 1).flatten(1)
        gathered: torch.Tensor = _Gather.apply(flat, self)  # type: ignore[no-untyped-call]
        return gathered[None]


class PackingState:
    """The packing of a model's present pass; None: its rows are padded."""

    def __init__(self) -> None:
        self.packing: Packing | None = None


@attrs.frozen(kw_only=True, eq=False)
class Packer:
    """How a model takes packed tokens."""

    #: ``own``: our attention; ``rows``: the library's, in padded rows; ``joined``: a kernel that reads positions
    kind: Literal["own", "rows", "joined"]
    state: PackingState = attrs.field(factory=PackingState)

    @property
    def shares(self) -> bool:
        """Return whether rows with the same prompt share its tokens."""
        return self.kind != "joined"

    def inputs(self, positions: torch.Tensor, packing: Packing | None) -> dict[str, Any]:
        """Return a model's arguments for packed tokens with ``positions`` ``[1, N]``."""
        if self.kind == "joined":
            return {"position_ids": positions}
        if self.kind == "own":  # the mask keeps the model from making one
            mask = torch.zeros(1, 1, 1, 1, device=positions.device)
            return {"position_ids": positions, "attention_mask": mask, "packing": packing}
        self.state.packing = packing
        return {"position_ids": positions, "attention_mask": torch.ones_like(positions)}


class _Spread(torch.autograd.Function):
    """``tokens`` ``[N, F]`` to places ``[b * L, F]``."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, packing: Packing) -> torch.Tensor:
        ctx.packing = packing
        return tokens.index_select(0, packing.source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        packing = ctx.packing
        of_tokens = gradients[0].index_select(0, packing.place)
        if len(packing.again):
            of_tokens.index_add_(0, packing.source[packing.again], gradients[0].index_select(0, packing.again))
        return of_tokens, None


class _Gather(torch.autograd.Function):
    """Places ``[b * L, F]`` to tokens ``[N, F]``."""

    @staticmethod
    def forward(ctx: Any, places: torch.Tensor, packing: Packing) -> torch.Tensor:
        ctx.packing, ctx.shape = packing, places.shape
        return places.index_select(0, packing.place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        of_places = gradients[0].new_empty(ctx.shape).index_copy_(0, ctx.packing.place, gradients[0])
        return of_places.index_fill_(0, ctx.packing.unused, 0.0), None


def _attend(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    past_key_values: None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally over rows ``[b, L, H]`` that are padded on the right, or over packed tokens ``[1, N, H]``."""
    cos, sin = (each.unsqueeze(-2) for each in position_embeddings)
    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    queries, keys = self.q_proj(hidden_states).view(heads), self.k_proj(hidden_states).view(heads)
    if hasattr(self, "q_norm"):
        queries, keys = self.q_norm(queries), self.k_norm(keys)
    queries, keys, values = rotary(queries, cos, sin), rotary(keys, cos, sin), self.v_proj(hidden_states).view(heads)
    if packing is None:
        queries, keys, values = (each.transpose(1, 2) for each in (queries, keys, values))
    else:
        queries, keys, values = (packing.spread(each) for each in (queries, keys, values))
    mixed = F.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=self.scaling, enable_gqa=keys.shape[1] != queries.shape[1]
    )
    joined = mixed.transpose(1, 2).flatten(2) if packing is None else packing.gather(mixed)
    return self.o_proj(joined), None


def speed_up_attention(model: PreTrainedModel) -> bool:
    """Replace the forward of attention layers by an equivalent for packed tokens; return whether that was possible.

    The model's logits are compared, with and without packing; if they differ, the model stays as it was.
    """
    layers = [module for module in model.modules() if hasattr(module, "q_proj")]
    if not layers or not all(map(_is_candidate, layers)):
        return False
    expected = padded_trial(model)
    for layer in layers:
        layer.forward = MethodType(_attend, layer)
    own = Packer(kind="own")
    agree = agrees(expected, lambda: padded_trial(model)) and agrees(expected, lambda: packed_trial(model, own))
    if not agree:
        for layer in layers:
            del layer.forward
    return agree


def agrees(expected: torch.Tensor, trial: Callable[[], torch.Tensor]) -> bool:
    """Return whether a trial runs, and gives the ``expected`` logits ``[7, V]``."""
    tolerance = _TOLERANCE if expected.dtype == torch.float32 else _HALF_TOLERANCE
    try:
        found = trial()
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError):
        return False
    return float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def _is_candidate(layer: nn.Module) -> bool:
    """Return whether a layer is plain causal attention; others may differ only far beyond the lengths of a trial."""
    kind = type(layer)
    plain = getattr(layer, "layer_type", None) in (None, "full_attention")
    known = kind.__module__.startswith("transformers.models.") and kind.__name__ in _KNOWN
    holder = layer if hasattr(layer, "sliding_window") else getattr(layer, "config", None)  # Mistral's reads its config
    return known and plain and getattr(holder, "sliding_window", None) is None


#: two rows, ``0 1 2 3 4`` and ``0 1 5 6``, which share their prompt ``0 1``
_TRIAL = Packing(
    rows=2,
    source=torch.tensor([0, 1, 2, 3, 4, 0, 1, 5, 6, 0]),
    place=torch.tensor([0, 1, 2, 3, 4, 7, 8]),
    again=torch.tensor([5, 6]),
    unused=torch.tensor([5, 6, 9]),
)


def _tokens(model: PreTrainedModel) -> torch.Tensor:
    vocabulary: int = model.get_input_embeddings().num_embeddings
    return torch.arange(7) * 7919 % vocabulary


@torch.no_grad()
def padded_trial(model: PreTrainedModel) -> torch.Tensor:
    """Return the logits of both rows' tokens ``[7, V]``, the padded place and the second prompt left out."""
    rows = _tokens(model)[_TRIAL.source].view(_TRIAL.rows, -1)
    padded: torch.Tensor = model(input_ids=rows, use_cache=False).logits
    return padded.flatten(0, 1).index_select(0, _TRIAL.place)


@torch.no_grad()
def packed_trial(model: PreTrainedModel, packer: Packer) -> torch.Tensor:
    """Return the same of packed tokens."""
    tokens, positions = _tokens(model)[None], torch.tensor([[0, 1, 2, 3, 4, 2, 3]])
    if not packer.shares:
        tokens, positions = tokens[:, [0, 1, 2, 3, 4, 0, 1, 5, 6]], torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    try:
        packed: torch.Tensor = model(input_ids=tokens, use_cache=False, **packer.inputs(positions, _TRIAL)).logits
    finally:
        packer.state.packing = None
    return packed[0] if packer.shares else packed[0][[0, 1, 2, 3, 4, 7, 8]]
