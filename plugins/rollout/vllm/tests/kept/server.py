"""Runs in vLLM's interpreter, in the process that holds the servers."""

from __future__ import annotations

from typing import Any

from jackfield_rollout_vllm.server import VllmServer

_KEPT: dict[tuple[str, bool], Any] = {}  #: by model folder, and whether experts are returned


class KeptServer(VllmServer):
    """Gets vLLM as a new one would have it: the weights of the folder, nothing running or cached, not paused."""

    async def _open_engine(self) -> Any:
        key = (self.context.model.path, self.context.model.router_replay)
        engine = _KEPT.get(key)
        if engine is None:
            engine = _KEPT[key] = await super()._open_engine()
        await engine.collective_rpc("kept_reload")
        await engine.reset_prefix_cache(reset_running_requests=True)
        await engine.resume_generation()
        return engine

    def _engine_arguments(self) -> dict[str, Any]:
        own = {"max_model_len": None, "worker_extension_cls": "vllm_kept.worker.KeptExtension"}
        return {**super()._engine_arguments(), **own}

    async def _close_engine(self, engine: Any) -> None:
        await engine.is_paused()  # its answer comes after vLLM has forgotten what was aborted
