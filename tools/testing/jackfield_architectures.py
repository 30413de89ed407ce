"""Tiny models with random weights of many architectures, in the layout of their published checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

VOCABULARY = 96

#: Settings that make any text configuration tiny; each is applied where the configuration has it.
_TINY: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_seq_len": 64,
    "word_embed_proj_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "num_shared_expert": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "window_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TINY_VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "depth": 2,
    "num_attention_heads": 4,
    "attention_heads": 4,
    "num_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "num_position_embeddings": 16,
    "projection_dim": 32,
    "in_channels": 3,
    "num_global_layers": 1,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}

_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
_MROPE: Mapping[str, Any] = {**_ROPE, "mrope_section": [2, 1, 1]}

#: By model type: settings of its own.
DENSE: Mapping[str, Mapping[str, Any]] = {
    "apertus": {},
    "bloom": {},
    "cohere": {},
    "cohere2": {},
    "exaone4": {},
    "falcon": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "glm": {},
    "glm4": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"],
    },
    "gpt_neox": {},
    "gptj": {"rotary_dim": 4},
    "granite": {},
    "helium": {},
    "hunyuan_v1_dense": {"rope_parameters": _ROPE, "head_dim": 8},
    "llama": {},
    "mistral": {},
    "nemotron": {"num_key_value_heads": 2},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "opt": {},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}
MIXTURES: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {},
    "dbrx": {
        "attn_config.rope_theta": 1e4,
        "attn_config.kv_n_heads": 2,
        "attn_config.clip_qkv": 8.0,
        "ffn_config.hidden_size": 32,
        "ffn_config.ffn_hidden_size": 16,
        "ffn_config.moe_num_experts": 4,
        "ffn_config.moe_top_k": 2,
    },
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_moe": {},
    "flex_olmo": {},
    "glm4_moe": {},
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {"rope_parameters": _ROPE, "head_dim": 8},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "jetmoe": {},
    "llama4_text": {},
    "longcat_flash": {
        "num_key_value_heads": 4,
        "num_layers": 2,
        "num_hidden_layers": 4,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
        "qk_head_dim": 16,
        "head_dim": 8,
    },
    "minimax": {},
    "minimax_m2": {},
    "mixtral": {},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "qwen3_next": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "solar_open": {},
}
#: Layers with a state: recurrences and convolutions, most beside layers with attention.
_MAMBA2: Mapping[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_GATED_DELTA: Mapping[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
HYBRID: Mapping[str, Mapping[str, Any]] = {
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": _MAMBA2,
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_key_value_heads": 4,
        "num_experts_per_token": 2,
        "num_expert_group": 1,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "qk_head_dim": 16,
        "head_dim": 8,
        "model_max_length": 64,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba": {"intermediate_size": 64, "state_size": 8, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "nemotron_h": {},
    "olmo_hybrid": _GATED_DELTA,
    "qwen3_5_moe_text": {**_GATED_DELTA, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {**_GATED_DELTA, "layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {
        "lru_width": 32,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
        "head_dim": 8,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "hybrid_layer_ids": [1],
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "kv_channels": 8,
        "num_query_groups": 4,
        "chunk_size": 8,
        "adapter_rank": 4,
        "use_mem_rope": True,
    },
}
VISION_LANGUAGE: Mapping[str, Mapping[str, Any]] = {
    "aria": {},
    "aya_vision": {},
    "gemma3": {},
    "glm4v": {"text_config.rope_parameters": _MROPE},
    "glm4v_moe": {"text_config.rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
    "got_ocr2": {},
    "idefics2": {},
    "idefics3": {},
    "internvl": {},
    "llama4": {
        "vision_config.vision_output_dim": 32,
        "vision_config.projector_input_dim": 32,
        "vision_config.projector_output_dim": 32,
    },
    "llava": {},
    "llava_next": {},
    "llava_onevision": {},
    "mistral3": {"vision_config.head_dim": 8, "vision_config.image_size": 56},
    "mllama": {},
    "paligemma": {"projection_dim": 32},
    "qwen2_5_vl": {"text_config.rope_parameters": _MROPE},
    "qwen2_vl": {"text_config.rope_parameters": _MROPE, "vision_config.hidden_size": 32},
    "qwen3_vl": {"text_config.rope_parameters": _MROPE},
    "qwen3_vl_moe": {"text_config.rope_parameters": _MROPE},
    "smolvlm": {},
    "vipllava": {},
}
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {**DENSE, **MIXTURES, **HYBRID, **VISION_LANGUAGE}

#: Forms of an architecture, by name: its model type, and settings of its own.
_TEXT_ROPE: Mapping[str, Any] = {"rope_theta": 1e4, "original_max_position_embeddings": 32}
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama with llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                **_TEXT_ROPE,
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        },
    ),
    "phi3 with longrope": (
        "phi3",
        {
            "rope_parameters": {
                **_TEXT_ROPE,
                "rope_type": "longrope",
                "partial_rotary_factor": 1.0,
                "factor": 2.0,
                "long_factor": [4.0, 9.0, 16.0, 30.0],
                "short_factor": [1.0, 1.0, 1.0, 1.0],
            },
            "original_max_position_embeddings": 32,
        },
    ),
    "qwen2 with a sliding window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "qwen3 with dynamic rope": (
        "qwen3",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 32},
    ),
    "qwen3 with yarn": (
        "qwen3",
        {"rope_parameters": {**_TEXT_ROPE, "rope_type": "yarn", "factor": 2.0}},
    ),
}
#: Architectures that are trained less often, or are close relatives of others here.
_RARE = {
    "glm",
    "gpt_bigcode",
    "gpt_neo",
    "gptj",
    "helium",
    "olmo",
    "stablelm",
    "afmoe",
    "dbrx",
    "flex_olmo",
    "granitemoeshared",
    "jetmoe",
    "solar_open",
    "kimi_linear",
    "recurrent_gemma",
    "zamba2",
    "lfm2_moe",
    "mamba",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "aria",
    "aya_vision",
    "glm4v",
    "glm4v_moe",
    "got_ocr2",
    "idefics2",
    "idefics3",
    "llama4",
    "llava_next",
    "llava_onevision",
    "mllama",
    "qwen2_vl",
    "qwen3_vl_moe",
    "smolvlm",
    "vipllava",
}
#: What people train, by name: architectures and variants, of which as many as possible have to run.
TRAINED = tuple(name for name in (*DENSE, *VARIANTS, *MIXTURES, *HYBRID, *VISION_LANGUAGE) if name not in _RARE)

#: Architectures that the rollout server ``transformers`` refuses at its start, and why; only their files are compared.
NOT_SERVED: dict[str, str] = {"recurrent_gemma": "its log-probabilities in a decode loop are others than in one pass"}
#: Architectures that are neither trained nor served, and why.
REFUSED: dict[str, str] = {"paligemma": "it attends to later tokens of the prompt"}


def _settable(config: Any, name: str) -> bool:
    return getattr(config, name, None) is not None and not isinstance(getattr(type(config), name, None), property)


def _shrink(config: Any, *, vision: bool = False) -> None:
    for name, value in (_TINY_VISION if vision else _TINY).items():
        if _settable(config, name) or (name.endswith("_token_id") and name in vars(config)):
            sizes = isinstance(getattr(config, name), list | tuple) and not isinstance(value, list)
            setattr(config, name, [value] * len(getattr(config, name)) if sizes else value)
    for name in ("layer_types", "mlp_layer_types"):
        if _settable(config, name):
            with suppress(AttributeError):  # some are made from other settings
                setattr(config, name, list(getattr(config, name))[-2:])
    for name in getattr(config, "sub_configs", None) or {}:
        if getattr(config, name, None) is not None:
            _shrink(getattr(config, name), vision=vision or "text" not in name)


def _config(architecture: str, changes: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(architecture)
    _shrink(config)
    for path, value in {**ARCHITECTURES[architecture], **changes}.items():
        *holders, name = path.split(".")
        holder = config
        for each in holders:
            holder = getattr(holder, each)
        setattr(holder, name, dict(value) if isinstance(value, Mapping) else value)
    return config


def make_model(architecture: str, seed: int = 0, **changes: Any) -> Any:
    """A model of ``architecture`` in float32, every parameter random."""
    import torch
    from transformers.models.auto import modeling_auto

    config = _config(architecture, changes)
    mapping = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        if architecture in VISION_LANGUAGE
        else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = mapping[type(config)](config)
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (1.0 if parameter.ndim == 1 else 0.0))
    return model.eval()


def save_model(architecture: str, folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Make a model of an architecture or a variant, write it to ``folder`` as its publisher would, and return it."""
    if architecture in VARIANTS:
        architecture, own = VARIANTS[architecture]
        changes = {**own, **changes}
    model = make_model(architecture, seed, **changes)
    model.save_pretrained(folder)
    return model
