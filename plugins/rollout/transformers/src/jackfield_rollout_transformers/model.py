"""Load a model folder, check what this server can do with it, and replace operators of the library.

The library's ``sdpa`` calls a blocked kernel that is made for many queries: with one query it needs up to 1.5 times the
time of two batched matrix products (256 rows, 24 to 128 positions, one thread). Everything else goes to ``sdpa``.

Rounding simulates an FP8 server: the parameter stays in bfloat16 and has the values of a quantised one. It saves
neither memory nor time; it shows the effect of the rounding on a run, on any device.

Shapes: ``B`` rows, ``Q`` query heads, ``H`` key/value heads, ``L`` positions, ``D`` head dimension.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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
from jackfield_huggingface.names import CheckpointNames, auto_class
from jackfield_huggingface.norms import replace_norms
from jackfield_rollout_transformers.config import Config


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
    float8: frozenset[str] = frozenset()  #: names of the weights that are rounded through float8_e4m3fn

    def parameters(self) -> list[Tensor]:
        """Return all parameters, tied ones once."""
        return list(self.module.parameters())


def load_model(config: Config, context: RolloutContext) -> LoadedModel:
    """Load ``context.model`` for generation.

    It raises ``engine.model`` if the folder is missing, cannot be loaded or holds a model that this server would
    compute wrongly, and ``weights.names`` if new weights could not be loaded under the names of the folder.
    """
    path, spec = context.model.path, context.model
    if spec.dtype not in _DTYPES:
        raise unusable(path, f"a dtype of {', '.join(_DTYPES)}", spec.dtype)
    device = torch.device(context.device)
    try:
        module = auto_class(Path(path), spec.trust_remote_code).from_pretrained(
            path,
            dtype=_DTYPES[spec.dtype],
            attn_implementation=config.attention,
            trust_remote_code=spec.trust_remote_code,
            use_safetensors=True,  # no pickle
            local_files_only=True,
        )
    except Exception as error:
        raise RolloutError(
            f"the model in {path} cannot be loaded: {error}",
            code="engine.model",
            where=path,
            fix="see the cause; where it says that sdpa is not supported, set attention to eager",
        ) from error
    names = CheckpointNames(module, Path(path))
    if config.attention == "sdpa" and device.type == "cpu":
        module.set_attn_implementation(DECODE_ATTENTION)
    module = module.to(device).eval().requires_grad_(False)
    use_operator(module)
    float8 = rounded_names(module) if spec.dtype == _FLOAT8 else frozenset()
    for name in float8:
        weight = module.get_parameter(name)
        weight.copy_(rounded(weight))
    settings = module.config.get_text_config()
    limits = getattr(settings, "max_position_embeddings", None), context.max_model_len
    limit = min((each for each in limits if each is not None), default=1 << 20)
    _check_architecture(path, settings, limit)
    head, embeddings = module.get_output_embeddings(), module.get_input_embeddings()
    if head is None or embeddings is None:
        raise unusable(path, "a model with an embedding and an output layer", type(module).__name__)
    return LoadedModel(
        module=module,
        output_layer=head,
        layers=settings.num_hidden_layers,
        vocabulary=embeddings.weight.shape[0],
        end_ids=_end_ids(module),
        max_model_len=limit,
        device=device,
        names=names,
        float8=float8,
    )


def load_decode(path: str, trust_remote_code: bool = False) -> Callable[[list[int]], str]:
    """Load the tokenizer's ``ids -> text`` (special tokens shown), which finds stop strings; it must exist."""
    try:
        # without its files the library creates an empty tokenizer, which decodes everything to an empty text
        if not any(name.startswith(_TOKENIZER_FILES) or name.endswith(".model") for name in os.listdir(path)):
            raise FileNotFoundError(f"{path} holds no tokenizer files")
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        raise RolloutError(
            f"stop strings need the model's tokenizer: {error}",
            code="rollout.request",
            where=path,
            fix="save the tokenizer into the model folder, or use stop_token_ids",
        ) from error
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def unusable(path: str, expected: str, found: str) -> RolloutError:
    """Return the error for a refused model."""
    return RolloutError(
        f"the model in {path} cannot be served", code="engine.model", where=path, expected=expected, found=found
    )


def _check_architecture(path: str, settings: Any, limit: int) -> None:
    """Refuse models known to need more than plain causal attention; the self-check finds others."""
    window, chunk = (getattr(settings, name, None) for name in ("sliding_window", "attention_chunk_size"))
    kinds = set(getattr(settings, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"])
    for kind, reach in (("sliding_attention", window), ("chunked_attention", chunk)):
        if reach is not None and limit <= reach:
            kinds.discard(kind)  # every token is within the window
    strange = sorted(kinds - {"full_attention"})
    if strange:
        reach = min(filter(None, (window, chunk)), default=None)
        hint = f" (or max_model_len of at most {reach})" if reach else ""
        raise unusable(path, f"layers with full attention{hint}", ", ".join(strange))
    if getattr(settings, "is_encoder_decoder", False):
        raise unusable(path, "a decoder-only model", "an encoder-decoder model")
    for kind, within in length_limits(settings.to_dict()).items():
        if limit > within:  # a request that crosses it keeps keys of other frequencies, and so do others in its batch
            raise unusable(
                path,
                f"max_model_len of at most {within} (cluster.max_model_len): its rope_type is {kind!r}, "
                "whose frequencies depend on the length beyond",
                str(limit),
            )


def _end_ids(module: Any) -> frozenset[int]:
    found: set[int] = set()
    for holder in (getattr(module, "generation_config", None), module.config):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return frozenset(found)
