"""Settings of the plugin; importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs.validators import and_, ge, gt, le

from jackfield.sdk import option
from jackfield_huggingface.serving import without
from jackfield_openai import EndpointConfig

#: Arguments of TensorRT-LLM's LLM that this plugin sets itself, with the setting to use for each.
_OURS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "max_seq_len": "cluster.max_model_len",
    "max_batch_size": "rollout.max_batch_size",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "kv_cache_config": "rollout.memory_fraction and rollout.prefix_caching",
    "orchestrator_type": "nothing: weights can be updated with Ray alone",
    "ray_worker_extension_cls": "nothing: it is how weights come",
    "quant_config": "nothing: weights come unquantised",
}


@attrs.frozen(kw_only=True)
class Config:
    """Settings of the ``trtllm`` rollout server."""

    max_batch_size: int = option(256, "requests decoded together", ge(1))
    tensor_parallel: int = option(1, "GPUs of a replica", ge(1))
    memory_fraction: float = option(0.85, "of the device's free memory, for the KV cache", and_(gt(0.0), le(1.0)))
    prefix_caching: bool = option(True, "keep what prompts have in common; forgotten at every update of weights")
    weight_folder: str = option(
        "/dev/shm", "an existing folder, in memory if it can be: new weights pass through files there"
    )
    start_seconds: float = option(900.0, "for TensorRT-LLM to load the model", gt(0.0))
    openai: EndpointConfig | None = option(None, "listen at an OpenAI-compatible address; null: no address")
    arguments: Mapping[str, Any] = option(
        factory=dict,
        help="further arguments of TensorRT-LLM's LLM, as it names them",
        validator=without(_OURS, "TensorRT-LLM", "rollout.arguments"),
    )
