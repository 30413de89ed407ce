"""Settings of the plugin; importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs.validators import and_, ge, gt, le

from jackfield.sdk import option
from jackfield_huggingface.serving import without
from jackfield_openai import EndpointConfig

#: Arguments of vLLM's engine that this plugin sets itself, with the setting to use for each.
_OURS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "seed",
    "max_model_len": "cluster.max_model_len",
    "max_num_seqs": "rollout.max_batch_size",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "gpu_memory_utilization": "rollout.memory_fraction",
    "kv_cache_memory_bytes": "rollout.kv_cache_bytes",
    "enable_prefix_caching": "rollout.prefix_caching",
    "enforce_eager": "rollout.eager",
    "logprobs_mode": "sampling.log_probs",
    "logits_processors": "sampling",
    "worker_extension_cls": "nothing: it is how weights come",
    "enable_return_routed_experts": "model.router_replay",
    "quantization": "nothing: weights come unquantised",
}


@attrs.frozen(kw_only=True)
class Config:
    """Settings of the ``vllm`` rollout server."""

    max_batch_size: int = option(256, "requests decoded together", ge(1))
    tensor_parallel: int = option(1, "inference workers of a replica", ge(1))
    memory_fraction: float = option(0.9, "of the device's memory, for weights and KV cache", and_(gt(0.0), le(1.0)))
    kv_cache_bytes: int | None = option(
        None, "for the KV cache; null: what memory_fraction leaves, on a CPU 1 GiB", gt(0)
    )
    prefix_caching: bool = option(True, "keep what prompts have in common; forgotten at every update of weights")
    eager: bool = option(False, "no compilation and no CUDA graphs: starts sooner, generates more slowly")
    openai: EndpointConfig | None = option(None, "listen at an OpenAI-compatible address; null: no address")
    engine: Mapping[str, Any] = option(
        factory=dict,
        help="further arguments of vLLM's engine (AsyncEngineArgs), as vLLM names them",
        validator=without(_OURS, "vLLM", "rollout.engine"),
    )
