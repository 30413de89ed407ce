"""Settings of the plugin; importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs.validators import and_, ge, gt, le

from jackfield.sdk import option
from jackfield_huggingface.serving import without
from jackfield_openai import EndpointConfig

#: Arguments of SGLang's server that this plugin sets itself, with the setting to use for each.
_OURS = {
    "model-path": "model.path",
    "dtype": "model.dtype",
    "trust-remote-code": "model.trust_remote_code",
    "random-seed": "seed",
    "context-length": "cluster.max_model_len",
    "max-running-requests": "rollout.max_batch_size",
    "tp-size": "rollout.tensor_parallel",
    "mem-fraction-static": "rollout.memory_fraction",
    "disable-radix-cache": "rollout.prefix_caching",
    "enable-deterministic-inference": "rollout.deterministic",
    "enable-lora": "model.lora",
    "max-lora-rank": "model.lora.rank",
    "lora-target-modules": "model.lora",
    "enable-return-routed-experts": "model.router_replay",
    "host": "nothing: it is the replica's own",
    "port": "nothing: a free one is taken",
    "enable-memory-saver": "nothing: it is how the replica sleeps",
    "enable-weights-cpu-backup": "nothing: it is how the replica sleeps",
    "incremental-streaming-output": "nothing: it is how streams are read",
    "quantization": "nothing: weights come unquantised",
}


@attrs.frozen(kw_only=True)
class Config:
    """Settings of the ``sglang`` rollout server."""

    max_batch_size: int = option(256, "requests decoded together", ge(1))
    tensor_parallel: int = option(1, "GPUs of a replica", ge(1))
    memory_fraction: float = option(0.85, "of the device's memory, for weights and KV cache", and_(gt(0.0), le(1.0)))
    prefix_caching: bool = option(True, "keep what prompts have in common; forgotten at every update of weights")
    deterministic: bool = option(
        True, "SGLang's deterministic kernels, without which seeds have no effect; false: faster"
    )
    weight_folder: str = option(
        "/dev/shm", "an existing folder, in memory if it can be: new weights pass through files there"
    )
    start_seconds: float = option(600.0, "for SGLang to load the model and answer", gt(0.0))
    openai: EndpointConfig | None = option(None, "listen at an OpenAI-compatible address; null: no address")
    arguments: Mapping[str, Any] = option(
        factory=dict,
        help="further arguments of sglang.launch_server, without the dashes in front; true: a flag",
        validator=without(_OURS, "SGLang", "rollout.arguments"),
    )
