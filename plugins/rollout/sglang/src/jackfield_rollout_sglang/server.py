"""The rollout server: the contract, on SGLang's HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from jackfield.abc.rollout import (
    GenerateRequest,
    RolloutContext,
    ServerInfo,
    SleepRequest,
    SleepResult,
    UpdateWeightsRequest,
    WakeUpRequest,
    WakeUpResult,
    WorkerReceipt,
)
from jackfield.errors import JackfieldError, PluginError, WeightsError
from jackfield.sdk.relay import MEMORY, InterruptingServer
from jackfield.sdk.requests import Running
from jackfield_huggingface.folders import ReceivedWeights, WeightFolder
from jackfield_rollout_sglang.config import Config
from jackfield_rollout_sglang.process import SglangProcess, free_port
from jackfield_rollout_sglang.requests import check_log_probs, generate_body, launch_arguments, read_answer

_CONTROL_SECONDS = 120.0  #: for SGLang to pause, go on, sleep or wake up


class SglangServer(InterruptingServer):
    """One replica: SGLang's server is a process that this one starts."""

    config: Config
    engine_name = "SGLang"
    update_kinds = ("full", "adapter")

    def __init__(self, config: Config, context: RolloutContext) -> None:
        super().__init__(config, context)
        self._sglang: SglangProcess | None = None
        self._weight_folder: WeightFolder | None = None
        self._adapter: str | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> ServerInfo:
        """Start SGLang, and wait until it has loaded the model.

        Raises:
            PluginError: ``plugin.requirement``: SGLang is not installed in this interpreter.
            RolloutError: ``engine.model`` when the folder cannot be served, ``rollout.stopped``.
            DeadlineExceeded: SGLang did not answer.
        """
        self._begin()
        self._require_sglang()
        self._weight_folder = WeightFolder(self.context, self.config.weight_folder)
        port = free_port(self.context.host)
        self._sglang = SglangProcess(self._clock, self.context.host, port)
        await self._open(self._sglang, launch_arguments(self.config, self.context, port))
        return ServerInfo(replica=self.context.replica)  # SGLang's own workers read what this process receives

    def _require_sglang(self) -> None:
        from importlib.util import find_spec

        if find_spec("sglang") is None:
            raise PluginError(
                "SGLang is not installed in this interpreter",
                where="the rollout server 'sglang'",
                expected="the package sglang",
                fix="give it an environment that has it: cluster.interpreters.rollout; see the plugin's README",
            )

    async def _open(self, sglang: SglangProcess, arguments: list[str]) -> None:
        await sglang.start(arguments, self.config.start_seconds)

    async def stop(self) -> None:
        """End SGLang; every unfinished request fails with ``rollout.stopped``."""
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

    # -- requests --------------------------------------------------------------------------------------------------

    def _refuse(self, request: GenerateRequest) -> None:
        check_log_probs(request)

    async def _part(self, running: Running, left: int, seed: int, name: str) -> bool:
        assert self._sglang is not None
        version = self._version
        body = generate_body(
            running.request,
            running.token_ids,
            left,
            seed,
            name,
            stream=running.stream is not None,
            adapter=self._adapter,
        )
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

    # -- pausing and memory ----------------------------------------------------------------------------------------

    async def _interrupt(self) -> None:
        await self._post("/pause_generation", {"mode": "abort"})

    async def _continue(self) -> None:
        await self._post("/continue_generation", {})

    async def sleep(self, request: SleepRequest) -> SleepResult:
        """Give memory back; only while paused or idle.

        Raises:
            RolloutError: ``rollout.request`` while decoding; ``rollout.stopped``.
        """
        self._require_running()
        if not self._paused and self._running:
            raise self._error("the server is decoding", "rollout.request", fix="pause it before it sleeps")
        await self._post("/flush_cache", None)
        await self._post("/release_memory_occupation", {"tags": [tag for tag in MEMORY if tag in self._awake]})
        if request.level == 2:
            self._stale = "the weights were given back by sleep(level=2) and no full update has come"
        self._awake.clear()
        return SleepResult()

    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        """Take memory again."""
        self._require_running()
        tags = [tag for tag in request.tags or MEMORY if tag not in self._awake]
        if tags:
            await self._post("/resume_memory_occupation", {"tags": tags})
        self._awake |= set(tags)
        return WakeUpResult(awake=tuple(tag for tag in MEMORY if tag in self._awake))

    # -- weights ---------------------------------------------------------------------------------------------------

    async def _receive(self, request: UpdateWeightsRequest) -> ReceivedWeights:
        """Write what comes into a folder, while SGLang decodes."""
        assert self._weight_folder is not None
        return await self._weight_folder.receive(request)

    async def _load(self, request: UpdateWeightsRequest, received: ReceivedWeights) -> Sequence[WorkerReceipt]:
        """Have SGLang read the folder, and remove it."""
        try:
            if request.kind == "adapter":
                await self._load_adapter(request, received.folder)
            else:
                await self._load_full(request, received.folder)
        except JackfieldError as error:
            raise WeightsError(
                f"SGLang has not loaded version {request.version}: {error.message}",
                where=f"replica {self.context.replica}",
                found=error.found,
                fix="see what SGLang has printed",
            ) from error
        finally:
            received.remove()
        return [WorkerReceipt(worker=0, digests=received.digests)]

    async def _load_full(self, request: UpdateWeightsRequest, folder: Path) -> None:
        body = {
            "model_path": str(folder),
            "load_format": "safetensors",
            "flush_cache": True,
            "weight_version": str(request.version),
        }
        await self._post("/update_weights_from_disk", body, request.deadline_seconds)
        await self._forget_adapter()

    async def _load_adapter(self, request: UpdateWeightsRequest, folder: Path) -> None:
        if self.context.model.lora is None:
            raise WeightsError("an adapter came for a replica that was started without", fix="set model.lora")
        name = f"jackfield-{request.version}"
        await self._forget_adapter()
        await self._post(
            "/load_lora_adapter",
            {"lora_name": name, "lora_path": str(folder), "pinned": True},
            request.deadline_seconds,
        )
        self._adapter = name

    async def _forget_adapter(self) -> None:
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            await self._post("/unload_lora_adapter", {"lora_name": adapter})
