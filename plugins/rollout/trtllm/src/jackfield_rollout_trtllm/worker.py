"""The part in each of TensorRT-LLM's workers, which reads new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tensorrt_llm._ray_utils import control_action_decorator
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension as UpstreamExtension


class WorkerExtension(UpstreamExtension):
    """Methods that are added to TensorRT-LLM's worker; ``self`` is the worker.

    TensorRT-LLM's own ``update_weights`` takes handles of another process's GPU memory in buckets, and with None ends
    an update. Here files take the place of buckets; TensorRT-LLM's method ends the update.
    """

    @control_action_decorator  # type: ignore[untyped-decorator]
    def jackfield_load(self, folder: str) -> None:
        """Load all tensors of a folder; ``update_weights(None)`` has to follow."""
        worker: Any = self
        engine = worker.engine.model_engine
        if not hasattr(engine.model, "first_pre_reload_weights"):
            for module in engine.model.modules():
                if hasattr(module, "pre_reload_weights") and not getattr(module, "_weights_removed", False):
                    module.pre_reload_weights()
            engine.model.first_pre_reload_weights = True
        for file in sorted(Path(folder).glob("*.safetensors")):
            weights = load_file(file, device=f"cuda:{worker.device_id}")
            engine.model_loader.reload(engine.model, weights, allow_partial_loading=True)
