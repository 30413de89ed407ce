"""Attention over packed tokens for the library's models: each row sees only itself, whatever the layer's mask.

Models take their attention from the library's registry by name. Ours spreads queries, keys and values to padded rows,
each with its prompt, and calls the attention that the model had. The masks of a packed pass are those of one row as
long as its longest, so sliding windows and chunks are the library's own.

Shapes: ``N`` tokens of a pass, ``b`` rows, ``L`` longest row, ``h`` heads, ``D`` head dimension.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from jackfield.abc.engine import EngineContext
from jackfield_engine_fsdp.config import Config
from jackfield_engine_fsdp.model import Rotary
from jackfield_engine_fsdp.packing import Packer, PackingState, agrees, packed_trial, padded_trial, speed_up_attention

_log = logging.getLogger("jackfield")
NAMES = {"sdpa": "jackfield_sdpa_rows", "eager": "jackfield_eager_rows"}
_KERNELS = ("flash_attention_2", "flash_attention_3")  #: they find the rows in the positions
_RECURRENT = ("linear", "mamba", "conv", "recurrent", "ssm", "delta")


_STATES: weakref.WeakValueDictionary[int, PackingState] = weakref.WeakValueDictionary()  #: by the id of a config


def choose_packer(model: PreTrainedModel, config: Config, context: EngineContext, *, own: bool) -> Packer | None:
    """Return how ``model`` takes packed tokens; None: its rows are padded, and rank 0 says why.

    ``own`` says whether our operators may replace the library's.
    """
    spec = context.model
    reasons = {
        "packing is off": not config.packing,
        "sequence_parallel cuts rows of one length": config.sequence_parallel > 1,
        "layers are split for tensor_parallel": config.tensor_parallel > 1,
        "layers are compiled": config.compile != "none",
        "a shared prompt would have one dropout": bool(spec.dropout),
        "a shared prompt would count once in the load of experts": bool(spec.router_aux_loss),
        "its rotary frequencies depend on the length of a row": bool(Rotary(model).limits),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is None:
        own = own and model.config._attn_implementation == "sdpa" and model.dtype == torch.float32
        packer = Packer(kind="own") if own and speed_up_attention(model) else make_packer(model)
        if packer is not None:
            return packer
        reason = "the model takes no packed tokens"
    level = logging.WARNING if config.packing and context.rank == 0 else logging.DEBUG
    _log.log(level, "rows of %s are padded: %s", type(model).__name__, reason)
    return None


def make_packer(model: PreTrainedModel) -> Packer | None:
    """Return how ``model`` takes packed tokens, with the library's attention; None: it does not, and stays as it was.

    Its logits are compared, with and without packing. Kernels that do not run on the CPU are represented by ``sdpa``.
    """
    try:
        return _make_packer(model)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError):
        return None  # it does not run on a few tokens alone


def _make_packer(model: PreTrainedModel) -> Packer | None:
    attention = model.config._attn_implementation
    inside = getattr(model.base_model, "language_model", None) or model.base_model
    if inside is not model.base_model or keeps_state(model):
        return None
    if attention in _KERNELS:
        model.set_attn_implementation("sdpa")
        try:
            joined = Packer(kind="joined")
            expected = padded_trial(model)
            return joined if agrees(expected, lambda: packed_trial(model, joined)) else None
        finally:
            model.set_attn_implementation(attention)
    if attention not in NAMES:
        return None
    expected = padded_trial(model)
    packer = Packer(kind="rows")
    _attend_to_rows(model, packer.state, NAMES[attention])
    changed = model.config._attn_implementation == NAMES[attention]
    if (
        changed
        and agrees(expected, lambda: padded_trial(model))
        and agrees(expected, lambda: packed_trial(model, packer))
    ):
        return packer
    forget_rows(model, attention)
    return None


def _attend_to_rows(model: PreTrainedModel, state: PackingState, name: str) -> None:
    for module in model.modules():
        module.__dict__["packing_state"] = state  # no submodule: it has no parameters
    for config in (model.config, model.config.get_text_config()):
        _STATES[id(config)] = state
    model.set_attn_implementation(name)


def forget_rows(model: PreTrainedModel, attention: str) -> None:
    """Give ``model`` its own attention back."""
    model.set_attn_implementation(attention)
    for module in model.modules():
        module.__dict__.pop("packing_state", None)


def keeps_state(model: PreTrainedModel) -> bool:
    """Return whether layers of ``model`` carry a state from token to token: it would reach the next row."""
    config = model.config.get_text_config()
    kinds = [*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())]
    if any(part in str(kind) for kind in kinds for part in _RECURRENT):
        return True
    inside = getattr(model.base_model, "language_model", None) or model.base_model
    return any(isinstance(module, nn.Conv1d) for module in inside.modules())


def _eager(module: nn.Module) -> Callable[..., Any]:
    """Return the eager attention of the module's own file."""
    function: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return function


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **keywords: Any
) -> Any:
    """Attend within rows: ``[1, h, N, D]`` to ``[1, N, h, D]``, or as the library does if rows are padded."""
    function = sdpa_attention_forward if module.config._attn_implementation == NAMES["sdpa"] else _eager(module)
    state: PackingState | None = getattr(module, "packing_state", None)
    packing = None if state is None else state.packing
    if packing is None:
        return function(module, query, key, value, *rest, **keywords)
    rows = (packing.spread(each.transpose(1, 2)) for each in (query, key, value))
    mixed, weights = function(module, *rows, *rest, **keywords)
    gathered = packing.gather(mixed.transpose(1, 2))
    return gathered.view(1, -1, *mixed.shape[2:]), weights


def _mask(library: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    def mask(*, config: Any = None, **keywords: Any) -> torch.Tensor | None:
        """Return the mask of one row ``[1, 1, L, L]`` if tokens are packed, and the library's otherwise."""
        state = _STATES.get(id(config))
        if state is not None and state.packing is not None:
            length = len(state.packing.source) // state.packing.rows
            own = {"batch_size": 1, "q_length": length, "kv_length": length, "attention_mask": None}
            keywords |= own
        return library(config=config, **keywords)

    return mask


for _library, _name in ((sdpa_mask, "sdpa"), (eager_mask, "eager")):
    AttentionInterface.register(NAMES[_name], _attend)
    AttentionMaskInterface.register(NAMES[_name], _mask(_library))
