"""Load a model folder, check what this server can do with it, and replace operators of the library.

The library's ``sdpa`` calls a blocked kernel that is made for many queries: with one query it needs up to 1.5 times the
time of two batched matrix products (256 rows, 24 to 128 positions, one thread). Everything else goes to ``sdpa``.

Rounding simulates an FP8 server: the parameter stays in bfloat16 and has the values of a quantised one. It saves
neither memory nor time; it shows the effect of the rounding on a run, on any device.

Shapes: ``B`` rows, ``Q`` query heads, ``H`` key/value heads, ``L`` positions, ``D`` head dimension.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from jackfield.abc.rollout import RolloutContext
from jackfield.errors import RolloutError
from jackfield.sdk.jagged import length_limits
from jackfield_huggingface.architectures import advice
from jackfield_huggingface.attention import choose_attention, layer_kinds
from jackfield_huggingface.images import ImageInputs, Images
from jackfield_huggingface.names import CheckpointNames, auto_class
from jackfield_huggingface.norms import replace_norms
from jackfield_huggingface.routers import Routers
from jackfield_rollout_transformers.config import Config

_LOG = logging.getLogger("jackfield")


def use_operator(model: nn.Module) -> int:
    """Use torch's operator for norms for which it computes the same; return how many."""
    return replace_norms(model, _rms_norm, 1e-6)


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return torch.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


DECODE_ATTENTION = "jackfield_decode"


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend ``query`` ``[B, Q, 1, D]`` to ``key`` and ``value`` ``[B, H, L, D]``, by the library's interface.

    Returns ``[B, 1, Q, D]``. ``attention_mask`` is additive, ``[B, 1, 1, L]``.
    """
    plain = all(kwargs.get(name) is None for name in ("softcap", "position_bias", "s_aux", "cache"))
    if query.shape[2] != 1 or attention_mask is None or attention_mask.shape[1] != 1 or not plain:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query.squeeze(2), key, value, attention_mask, scale)[:, None], None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend one query per row, ``[B, Q, D]``, to ``[B, H, L, D]``, with an additive mask ``[B, 1, 1, L]``."""
    batch, heads, dimension = query.shape
    groups = key.shape[1]
    grouped = (query * scale).view(batch, groups, heads // groups, dimension)
    scores = torch.matmul(grouped, key.transpose(2, 3)).add_(mask)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).view(batch, heads, value.shape[3])


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)


_LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448


def rounded(tensor: Tensor) -> Tensor:
    """Round to ``float8_e4m3fn`` times a scale (largest magnitude / 448); float32, same shape."""
    values = tensor.detach().float()
    largest = values.abs().max() if values.numel() else values.new_zeros(())
    scale = torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest))
    return (values / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).float() * scale


def rounded_names(module: Any) -> frozenset[str]:
    """Return the weights that FP8 servers quantise: those of linear layers except the output layer."""
    head = module.get_output_embeddings()
    return frozenset(
        f"{name}.weight" for name, each in module.named_modules() if isinstance(each, nn.Linear) and each is not head
    )


_FLOAT8 = "float8_e4m3fn"  #: a simulation: see ``float8``
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    _FLOAT8: torch.bfloat16,  # the dtype of its computations
}
_TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece", "tekken")


@attrs.frozen
class LayerMasks:
    """Which earlier tokens the layers of a model attend to: all, those of a window, or those of a chunk."""

    window: int | None = None
    chunk: int | None = None
    kinds: tuple[str, ...] = ()  #: the library takes one mask for each; empty: one mask for all layers

    def make(self, positions: Tensor, attended: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Return additive masks ``[B, 1, 1, L]`` for one token per row at ``positions`` ``[B]``."""
        if not self.kinds:
            return self._mask("sliding_attention" if self.window else "full_attention", positions, attended, dtype)
        return {kind: self._mask(kind, positions, attended, dtype) for kind in self.kinds}

    def _mask(self, kind: str, positions: Tensor, attended: int, dtype: torch.dtype) -> Tensor:
        columns, own = torch.arange(attended, device=positions.device), positions[:, None]
        hidden = columns > own
        if kind == "sliding_attention" and self.window is not None:
            hidden |= columns <= own - self.window
        if kind == "chunked_attention" and self.chunk is not None:
            hidden |= columns // self.chunk != own // self.chunk
        mask = torch.zeros(len(positions), attended, dtype=dtype, device=positions.device)
        return mask.masked_fill_(hidden, -math.inf)[:, None, None]


@attrs.frozen(eq=False)
class LoadedModel:
    """A causal language model on its device, in evaluation mode, without gradients."""

    module: Any  #: the library's ``PreTrainedModel``
    output_layer: nn.Module  #: hidden states to logits
    layers: int
    vocabulary: int  #: ids below it are valid
    end_ids: frozenset[int]  #: the model's own end tokens
    max_model_len: int  #: prompt and response together
    device: torch.device
    names: CheckpointNames  #: of its tensors in the model folder; new weights use them
    images: ImageInputs | None = None  #: what it takes beside tokens
    routers: Routers | None = None  #: of its experts, where a run needs to know them
    masks: LayerMasks = LayerMasks()  #: of the kinds of its layers
    by_row: str | None = None  #: why its requests are computed one after another; None: they are not
    float8: frozenset[str] = frozenset()  #: names of the weights that are rounded through float8_e4m3fn

    def parameters(self) -> list[Tensor]:
        """Return all parameters, tied ones once."""
        return list(self.module.parameters())

    def given(self, input_ids: Tensor, images: Sequence[Images | None]) -> AbstractContextManager[dict[str, Tensor]]:
        """Return a block for a pass over ``input_ids`` ``[B, P]`` with each row's images, and its arguments."""
        if self.images is None:
            return nullcontext({"input_ids": input_ids})
        return self.images.given(self.module, input_ids, images)


def load_model(config: Config, context: RolloutContext) -> LoadedModel:
    """Load ``context.model`` for generation.

    It raises ``engine.model`` if the folder is missing, cannot be loaded or holds a model that this server would
    compute wrongly, and ``weights.names`` if new weights could not be loaded under the names of the folder.
    """
    path, spec = context.model.path, context.model
    if spec.dtype not in _DTYPES:
        raise unusable(path, f"a dtype of {', '.join(_DTYPES)}", spec.dtype)
    device = torch.device(context.device)
    if device.type == "cuda" and context.memory_fraction is not None:  # it has a process of its own then
        torch.cuda.set_per_process_memory_fraction(context.memory_fraction, device)
    try:
        module = auto_class(Path(path), spec.trust_remote_code).from_pretrained(
            path,
            dtype=_DTYPES[spec.dtype],
            attn_implementation=choose_attention(Path(path), config.attention, spec.trust_remote_code),
            trust_remote_code=spec.trust_remote_code,
            use_safetensors=True,  # no pickle
            local_files_only=True,
        )
    except Exception as error:
        raise RolloutError(
            f"the model in {path} cannot be loaded: {error}",
            code="engine.model",
            where=path,
            fix=f"see the cause; {advice(path, 'served')}",
        ) from error
    names = CheckpointNames(module, Path(path))
    if module.config._attn_implementation == "sdpa" and device.type == "cpu":
        module.set_attn_implementation(DECODE_ATTENTION)
    module = module.to(device).eval().requires_grad_(False)
    use_operator(module)
    float8 = rounded_names(module) if spec.dtype == _FLOAT8 else frozenset()
    for name in float8:
        weight = module.get_parameter(name)
        weight.copy_(rounded(weight))
    settings = module.config.get_text_config(decoder=True)
    limits = getattr(settings, "max_position_embeddings", None), context.max_model_len
    limit = min((each for each in limits if each is not None), default=1 << 20)
    limit = _within_rotary_limits(path, settings, limit, given=context.max_model_len is not None)
    if getattr(settings, "is_encoder_decoder", False):
        raise unusable(path, "a decoder-only model", "an encoder-decoder model", unsupported=True)
    masks, by_row = _layout(config.cache, settings, limit)
    if by_row:
        _LOG.info("requests of %s are computed one after another: %s", path, by_row)
    head, embeddings = module.get_output_embeddings(), module.get_input_embeddings()
    if head is None or embeddings is None:
        expected = "a model with an embedding and an output layer"
        raise unusable(path, expected, type(module).__name__, unsupported=True)
    routers = Routers.of(module) if spec.router_replay else None
    if spec.router_replay and routers is None:
        raise unusable(path, "a mixture of experts (model.router_replay)", type(module).__name__)
    return LoadedModel(
        module=module,
        output_layer=head,
        layers=settings.num_hidden_layers,
        vocabulary=embeddings.weight.shape[0],
        end_ids=_end_ids(module),
        max_model_len=limit,
        device=device,
        names=names,
        images=ImageInputs.of(module),
        routers=routers,
        masks=masks,
        by_row=by_row,
        float8=float8,
    )


def load_decode(path: str, trust_remote_code: bool = False) -> Callable[[list[int]], str]:
    """Load the tokenizer's ``ids -> text`` (special tokens shown), which finds stop strings; it must exist."""
    tokenizer = load_tokenizer(path, trust_remote_code)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model folder; ``rollout.request`` if it has none."""
    try:
        # without its files the library creates an empty tokenizer, which decodes everything to an empty text
        if not any(name.startswith(_TOKENIZER_FILES) or name.endswith(".model") for name in os.listdir(path)):
            raise FileNotFoundError(f"{path} holds no tokenizer files")
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        raise RolloutError(
            f"stop strings and grammars need the model's tokenizer: {error}",
            code="rollout.request",
            where=path,
            fix="save the tokenizer into the model folder, or use stop_token_ids",
        ) from error


def unusable(path: str, expected: str, found: str, *, unsupported: bool = False) -> RolloutError:
    """Return the error for a refused model; where its architecture is unsupported, it says what else has it."""
    fix = advice(path, "served") if unsupported else None
    details = {"code": "engine.model", "where": path, "expected": expected, "found": found, "fix": fix}
    return RolloutError(f"the model in {path} cannot be served", **details)


_MASKED = {"full_attention", "sliding_attention", "chunked_attention"}  #: kinds that a mask describes


def _layout(given: str, settings: Any, limit: int) -> tuple[LayerMasks, str | None]:
    """Return the masks of the model's layers, and why its requests are computed one after another (None: they are not).

    A cache of the whole batch holds keys and values. It holds no state of a recurrence or a convolution.
    """
    kinds = layer_kinds(settings)
    window, chunk = (getattr(settings, name, None) for name in ("sliding_window", "attention_chunk_size"))
    strange = sorted(set(kinds) - _MASKED)
    if given == "rows":
        return LayerMasks(), "the setting cache is rows"
    if strange and (strange != ["global_attention", "local_attention"] or limit > getattr(settings, "window_size", 0)):
        return LayerMasks(), f"some layers have {', '.join(strange)}"
    if getattr(settings, "alibi", False) or settings.model_type in _ALIBI:
        return LayerMasks(), "its positions (ALiBi) are made from the mask"
    window = window if window is not None and limit > window and "sliding_attention" in kinds else None
    chunk = chunk if chunk is not None and limit > chunk and "chunked_attention" in kinds else None
    several = (window is not None or chunk is not None) and bool(getattr(settings, "layer_types", None))
    return LayerMasks(window, chunk, kinds if several else ()), None


_ALIBI = {"bloom", "mpt"}


def _within_rotary_limits(path: str, settings: Any, limit: int, *, given: bool) -> int:
    """Return the largest length with one set of rotary frequencies; refuse a larger one that was set by hand.

    A request that crosses it keeps keys of other frequencies, and no pass over the whole request computes the same.
    """
    for kind, within in length_limits(settings.to_dict()).items():
        if limit <= within:
            continue
        if given:
            raise unusable(
                path,
                f"max_model_len of at most {within} (cluster.max_model_len): its rope_type is {kind!r}, "
                "whose frequencies depend on the length beyond",
                str(limit),
            )
        _LOG.info("max_model_len of %s is %d: its rope_type %r has other frequencies beyond", path, within, kind)
        limit = within
    return limit


def _end_ids(module: Any) -> frozenset[int]:
    found: set[int] = set()
    for holder in (getattr(module, "generation_config", None), module.config):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return frozenset(found)
