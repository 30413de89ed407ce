"""What a Hugging Face configuration means for Megatron-Core: sizes, features, and what is refused."""

from __future__ import annotations

import functools
from pathlib import Path

import attrs
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jackfield.abc.engine import ModelSpec
from jackfield.errors import EngineError
from jackfield_engine_megatron.config import Config

invalid = functools.partial(EngineError, code="config.invalid-value")
unusable = functools.partial(EngineError, code="engine.model")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KNOWN = ("llama", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


@attrs.frozen(kw_only=True)
class Experts:
    """A mixture of experts."""

    count: int
    per_token: int
    intermediate_size: int
    shared_size: int  #: of the shared expert; 0: none
    normalized: bool  #: whether the weights of a token's experts add up to 1
    layers: tuple[bool, ...]  #: which layers have experts


@attrs.frozen(kw_only=True)
class Architecture:
    """The sizes and features of a decoder."""

    model_type: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    epsilon: float
    tied: bool
    padding: int | None  #: the token whose embedding gets no gradient where it is an input, as in Hugging Face's models
    qkv_bias: bool
    qk_norm: bool
    experts: Experts | None
    frequencies: tuple[float, ...]  #: of rotary embeddings

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts."""
        return self.experts is not None and self.experts.layers[layer]


def read_architecture(spec: ModelSpec) -> Architecture:
    """Read ``config.json``; refuse models that Megatron-Core would compute otherwise (``engine.model``)."""
    folder = Path(spec.path)
    if not (folder / "config.json").is_file():
        raise unusable(
            f"no model in the folder {spec.path!r}",
            where="model.path",
            expected="a Hugging Face folder with config.json and weights",
            found="no config.json" if folder.is_dir() else "no such folder",
            fix="give a folder that save_pretrained() wrote or that was downloaded before",
        )
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as caught:
        raise unusable("config.json cannot be read", where="model.path", found=str(caught)) from caught
    kind = config.model_type
    _refuse(kind not in KNOWN, kind, "model_type: one of " + ", ".join(KNOWN))
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = kind == "mixtral" and config.sliding_window is not None
    _refuse(bool(layer_types - {"full_attention"}) or window, "sliding windows", "full attention in each layer")
    biased = bool(getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False))
    _refuse(biased and kind != "qwen2", "attention_bias or mlp_bias", "linear layers without biases")
    _refuse(config.hidden_act not in ("silu", "swish"), f"hidden_act: {config.hidden_act}", "hidden_act: silu")
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Architecture(
        model_type=kind,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads or config.num_attention_heads,
        head_size=head_size,
        vocabulary=config.vocab_size,
        epsilon=config.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        padding=None if config.pad_token_id is None else config.pad_token_id % config.vocab_size,
        qkv_bias=kind == "qwen2" or (kind == "qwen2_moe" and bool(getattr(config, "qkv_bias", True))),
        qk_norm=kind.startswith("qwen3"),
        experts=_experts(config),
        frequencies=_frequencies(config),
    )


def _refuse(when: bool, found: str, expected: str) -> None:
    if when:
        raise unusable(
            "the engine megatron does not have this model",
            where="model.path, config.json",
            expected=expected,
            found=found,
            fix="use engine.name: fsdp",
        )


def _experts(config: PreTrainedConfig) -> Experts | None:
    kind, layers = config.model_type, config.num_hidden_layers
    if kind == "mixtral":
        count, size, everywhere = config.num_local_experts, config.intermediate_size, (True,) * layers
        return Experts(
            count=count,
            per_token=config.num_experts_per_tok,
            intermediate_size=size,
            shared_size=0,
            normalized=True,
            layers=everywhere,
        )
    if not kind.endswith("_moe"):
        return None
    dense, step = set(config.mlp_only_layers or ()), config.decoder_sparse_step
    chosen = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    return Experts(
        count=config.num_experts,
        per_token=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        shared_size=getattr(config, "shared_expert_intermediate_size", 0) or 0,
        normalized=bool(config.norm_topk_prob),
        layers=chosen,
    )


def _frequencies(config: PreTrainedConfig) -> tuple[float, ...]:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    kind = rope.get("rope_type", "default")
    _refuse(kind not in ("default", "linear", "llama3"), f"rope_type: {kind}", "rope_type: default, linear or llama3")
    _refuse(rope.get("partial_rotary_factor", 1.0) != 1.0, "partial_rotary_factor", "rotary embeddings of whole heads")
    if kind != "default":
        values, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return tuple(values.tolist())
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    steps = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    return tuple((1.0 / (float(rope.get("rope_theta", 10000.0)) ** steps)).tolist())


def check_sizes(config: Config, architecture: Architecture, world_size: int) -> None:
    """Refuse sizes of parallelism that do not fit each other, the model or the ranks (``config.invalid-value``)."""
    tensor, pipeline, context = config.tensor_parallel, config.pipeline_parallel, config.context_parallel
    expert, virtual = config.expert_parallel, config.virtual_pipeline_stages
    experts = architecture.experts
    whole = tensor * pipeline * context
    _divides(
        world_size,
        whole,
        "tensor_parallel, pipeline_parallel, context_parallel",
        f"ranks in a multiple of {tensor} * {pipeline} * {context} = {whole}",
    )
    _divides(
        world_size,
        pipeline * expert,
        "expert_parallel, pipeline_parallel",
        f"ranks in a multiple of {expert} * {pipeline} = {expert * pipeline}",
    )
    for what, size in (
        ("heads", architecture.heads),
        ("key-value heads", architecture.key_heads),
        ("intermediate_size", architecture.intermediate_size),
        ("the shared expert's size", experts.shared_size if experts else 0),
    ):
        _divides(size, tensor, "tensor_parallel", f"a divisor of {size} ({what})")
    stages = pipeline * virtual
    where = "pipeline_parallel, virtual_pipeline_stages"
    _divides(architecture.layers, stages, where, f"{pipeline} * {virtual} that divides {architecture.layers} layers")
    if virtual > 1 and pipeline == 1:
        raise invalid(
            "virtual stages without a pipeline",
            where="engine.virtual_pipeline_stages",
            expected=1,
            found=virtual,
            fix="raise engine.pipeline_parallel, or leave virtual_pipeline_stages out",
        )
    if experts is None and expert > 1:
        raise invalid("the model has no experts", where="engine.expert_parallel", expected=1, found=expert)
    if experts is not None:
        _divides(experts.count, expert, "expert_parallel", f"a divisor of {experts.count} (experts)")
        if tensor > 1 and not config.sequence_parallel:
            raise invalid(
                "Megatron-Core trains experts with tensor parallelism only on shared positions",
                where="engine.sequence_parallel",
                expected=True,
                found=False,
                fix="set engine.sequence_parallel to true, or engine.tensor_parallel to 1",
            )
    if config.sequence_parallel and tensor == 1:
        raise invalid(
            "positions have no tensor-parallel ranks to share them",
            where="engine.sequence_parallel",
            expected="false with tensor_parallel 1",
            found=True,
        )


def _divides(size: int, divisor: int, where: str, expected: str) -> None:
    if size % divisor:
        names = ", ".join(f"engine.{name.strip()}" for name in where.split(","))
        raise invalid(f"{divisor} does not divide {size}", where=names, expected=expected, found=f"{size} / {divisor}")
