"""The rollout server: the contract, on SGLang's HTTP server."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from importlib.util import find_spec
from typing import Any

from jackfield.abc.rollout import GenerateRequest, RolloutContext, ServerInfo, UpdateWeightsRequest
from jackfield.errors import WeightsError
from jackfield.sdk.relay import Running
from jackfield_huggingface.folders import WeightFolder
from jackfield_huggingface.serving import FolderServer
from jackfield_rollout_sglang.config import Config
from jackfield_rollout_sglang.process import SglangProcess, free_port
from jackfield_rollout_sglang.requests import check_log_probs, generate_body, launch_arguments, read_answer

_CONTROL_SECONDS = 120.0  #: for SGLang to pause, go on, sleep or wake up


class SglangServer(FolderServer):
    """One replica, which runs SGLang's server as a child process."""

    config: Config
    engine_name = "SGLang"
    update_kinds = ("full", "adapter")

    def __init__(self, config: Config, context: RolloutContext) -> None:
        super().__init__(config, context)
        self._sglang: SglangProcess | None = None
        self._adapter: str | None = None

    async def start(self) -> ServerInfo:
        """Start SGLang and wait until the model is loaded; ``plugin.requirement`` if it is not installed."""
        self._begin()
        self._require_sglang()
        self._weight_folder = WeightFolder(self.context, self.config.weight_folder)
        port = free_port(self.context.host)
        self._sglang = SglangProcess(self._clock, self.context.host, port)
        await self._open(self._sglang, launch_arguments(self.config, self.context, port))
        return ServerInfo(replica=self.context.replica)  # SGLang's workers read the weights that this process receives

    def _require_sglang(self) -> None:
        if find_spec("sglang") is None:
            raise self.missing()

    async def _open(self, sglang: SglangProcess, arguments: list[str]) -> None:
        await sglang.start(arguments, self.config.start_seconds)

    async def stop(self) -> None:
        """Stop SGLang; every unfinished request fails with ``rollout.stopped``."""
        self._stopped = True
        await self._fail_all()
        if self._sglang is not None:
            await self._sglang.close()

    def _down(self) -> str | None:
        if self._stopped or self._sglang is None:
            return "the server is not running"
        return self._sglang.ended

    async def _post(self, path: str, body: dict[str, Any] | None, seconds: float = _CONTROL_SECONDS) -> Any:
        assert self._sglang is not None
        return await self._sglang.post(path, body, seconds)

    def _refuse(self, request: GenerateRequest) -> None:
        check_log_probs(request)

    async def _part(self, running: Running, left: int) -> bool:
        assert self._sglang is not None
        version, body = self._version, generate_body(running, left, self._adapter)
        try:
            async with aclosing(self._sglang.generate(body)) as answers:
                async for each in answers:
                    answer = read_answer(each, body)
                    running.append(answer.token_ids, answer.log_probs, version)
                    if answer.finish_reason in ("stop", "length"):
                        self._end(running, answer.finish_reason)
                        return True
        except asyncio.CancelledError:
            if self._down() is None:
                with suppress(Exception):
                    await self._post("/abort_request", {"rid": body["rid"]})
            raise
        return False

    async def _interrupt(self) -> None:
        await self._post("/pause_generation", {"mode": "abort"})

    async def _release(self) -> None:
        await self._post("/continue_generation", {})
        await super()._release()

    async def _give_back(self, tags: list[str], level: int) -> None:
        await self._post("/flush_cache", None)
        await self._post("/release_memory_occupation", {"tags": tags})

    async def _take_back(self, tags: list[str]) -> None:
        await self._post("/resume_memory_occupation", {"tags": tags})

    async def _read_folder(self, request: UpdateWeightsRequest, folder: str) -> None:
        if request.kind == "adapter":
            await self._load_adapter(request, folder)
        else:
            await self._load_full(request, folder)

    async def _load_full(self, request: UpdateWeightsRequest, folder: str) -> None:
        body = {
            "model_path": folder,
            "load_format": "safetensors",
            "flush_cache": True,
            "weight_version": str(request.version),
        }
        await self._post("/update_weights_from_disk", body, request.deadline_seconds)
        await self._forget_adapter()

    async def _load_adapter(self, request: UpdateWeightsRequest, folder: str) -> None:
        if self.context.model.lora is None:
            raise WeightsError("an adapter came for a replica that was started without", fix="set model.lora")
        name = f"jackfield-{request.version}"
        await self._forget_adapter()
        await self._post(
            "/load_lora_adapter", {"lora_name": name, "lora_path": folder, "pinned": True}, request.deadline_seconds
        )
        self._adapter = name

    async def _forget_adapter(self) -> None:
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            await self._post("/unload_lora_adapter", {"lora_name": adapter})
