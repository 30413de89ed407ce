"""Megatron-Core's model on this rank: its pieces of layers, and the outputs of response tokens.

Shapes: ``s`` positions of this rank, ``b`` rows, ``H`` hidden size, ``V`` vocabulary of this rank.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from jackfield.abc.engine import EngineContext
from jackfield_engine_megatron.architecture import DTYPES, Architecture
from jackfield_engine_megatron.config import Config
from jackfield_engine_megatron.quiet import quiet
from jackfield_engine_megatron.ranks import Ranks, virtual

with quiet(imports=True):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from jackfield_engine_megatron.attention import CausalAttention, RMSNorm

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16.1 reads it also where it could not import Transformer Engine


class TokenModel(GPTModel):
    """A stage whose last one returns hidden states ``[s, b, H]``: logits are computed for response tokens only."""

    def _postprocess(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states

    @property
    def output_weight(self) -> torch.Tensor:
        """Return the output layer's matrix ``[V, H]``, which may be the embedding's."""
        tied = self.share_embeddings_and_output_weights
        weight: torch.Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight


def transformer_config(config: Config, architecture: Architecture, context: EngineContext) -> TransformerConfig:
    """Return Megatron-Core's settings; nothing in it is random or fused by CUDA kernels."""
    dtype = DTYPES[context.model.dtype]
    settings: dict[str, Any] = {
        "num_layers": architecture.layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.intermediate_size,
        "num_attention_heads": architecture.heads,
        "num_query_groups": architecture.key_heads,
        "kv_channels": architecture.head_size,
        "layernorm_epsilon": architecture.epsilon,
        "normalization": "RMSNorm",
        "qk_layernorm": architecture.qk_norm,
        "add_bias_linear": False,
        "add_qkv_bias": architecture.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": config.tensor_parallel,
        "pipeline_model_parallel_size": config.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": virtual(config),
        "context_parallel_size": config.context_parallel,
        "expert_model_parallel_size": config.expert_parallel,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": config.sequence_parallel,
        # Two stages are each other's next and previous: forward and backward messages in one batch would be mixed up.
        "overlap_p2p_comm": config.virtual_pipeline_stages > 1,
        "batch_p2p_comm": config.virtual_pipeline_stages == 1,
        "calculate_per_token_loss": True,  # gradients are summed, not averaged
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "attention_softmax_in_fp32": True,
        "moe_token_dispatcher_type": "alltoall",  # the only one for rows of different lengths
    }
    if config.recompute == "full" or context.model.gradient_checkpointing:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif config.recompute == "selective":
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    experts = architecture.experts
    if experts is not None:
        settings |= {
            "num_moe_experts": experts.count,
            "moe_router_topk": experts.per_token,
            "moe_ffn_hidden_size": experts.intermediate_size,
            "moe_layer_freq": [int(each) for each in experts.layers],
            "moe_router_pre_softmax": not experts.normalized or experts.per_token == 1,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_shared_expert_intermediate_size": experts.shared_size or None,
            "moe_shared_expert_gate": experts.shared_size > 0,
        }
    return TransformerConfig(**settings)


def _layer(architecture: Architecture, layer: int) -> ModuleSpec:
    count = architecture.experts.count if architecture.experts and architecture.has_experts(layer) else None
    spec = get_gpt_layer_local_spec(num_experts=count, qk_layernorm=architecture.qk_norm, normalization="RMSNorm")
    modules, attention = spec.submodules, spec.submodules.self_attention.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm
    attention.core_attention = CausalAttention
    if architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def first_layer(config: Config, ranks: Ranks, layers: int, chunk: int) -> int:
    """Return the first layer, from 0, of this rank's virtual stage ``chunk``."""
    stages = config.pipeline_parallel
    per_chunk = layers // (stages * config.virtual_pipeline_stages)
    return int((chunk * stages + ranks.pipeline.rank()) * per_chunk)


def build(
    config: Config, architecture: Architecture, context: EngineContext, ranks: Ranks
) -> list[DistributedDataParallel]:
    """Make this rank's virtual stages, without weights, wrapped to sum gradients in float32."""
    settings = transformer_config(config, architecture, context)
    padded = padded_vocabulary(config, architecture)
    chunks = []
    per_chunk = architecture.layers // (config.pipeline_parallel * config.virtual_pipeline_stages)
    for number in range(config.virtual_pipeline_stages):
        first = first_layer(config, ranks, architecture.layers, number)
        specs = [_layer(architecture, layer) for layer in range(first, first + per_chunk)]
        model = TokenModel(
            config=settings,
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm),
            vocab_size=padded,
            max_sequence_length=1,  # positions are rotary: it has no effect
            pre_process=first == 0,
            post_process=first + per_chunk == architecture.layers,
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="rope",
            vp_stage=number if config.virtual_pipeline_stages > 1 else None,
        )
        if model.pre_process and architecture.padding is not None:
            drop = functools.partial(_without_gradient, architecture.padding, ranks.tensor)
            model.embedding.word_embeddings.register_forward_hook(drop)
        model.rotary_pos_emb.inv_freq = torch.tensor(architecture.frequencies, dtype=torch.float32)
        model.to(ranks.device)
        if config.tensor_parallel > 1 or config.expert_parallel > 1:
            for name, parameter in model.named_parameters():
                if ".local_experts." in name:  # tensor-parallel ranks are replicas: each expert sees their tokens
                    parameter.allreduce = False  # reduced over the experts' own data-parallel group
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=config.distributed_optimizer and context.optimizer is not None,
        )
        chunks.append(DistributedDataParallel(settings, ddp, model, disable_bucketing=True))
    return chunks


def _without_gradient(token: int, group: Any, module: Any, inputs: Any, embeddings: torch.Tensor) -> torch.Tensor:
    """Stop gradients of a token's embedding, as ``padding_idx`` of ``torch.nn.Embedding`` does.

    The token may be in prompts and responses, and models are initialized with zeros there, whose norm has a gradient of
    ``1 / sqrt(epsilon)``.
    """
    (ids,) = inputs
    if module.reduce_scatter_embeddings:  # [s, b, H] of this rank's positions
        ids = ids.transpose(0, 1).chunk(group.size())[group.rank()].contiguous()
    return torch.where((ids == token)[..., None], embeddings.detach(), embeddings)


def padded_vocabulary(config: Config, architecture: Architecture) -> int:
    """Return the number of rows of the embedding over all tensor-parallel ranks."""
    multiple = config.vocabulary_multiple * config.tensor_parallel
    return -(-architecture.vocabulary // multiple) * multiple
