"""The rollout server: the contract, on SGLang's HTTP server.

Every interruption (a pause, an update) takes running requests out of SGLang, and what is left of them is asked for
afterwards, behind the tokens that they have. So each answer was made by one version of the weights, known on this side.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.abc.rollout import (
    GenerateRequest,
    PauseRequest,
    PauseResult,
    ResumeRequest,
    ResumeResult,
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
from jackfield.plugins import load_plugin
from jackfield.runtime.generation import Running, own_seed
from jackfield.runtime.relay import MEMORY, RelayServer
from jackfield.weights.staging import stage_adapter, stage_weights, tensors_of
from jackfield_rollout_sglang.config import Config
from jackfield_rollout_sglang.process import SglangProcess, free_port
from jackfield_rollout_sglang.requests import check_logprobs, generate_body, launch_arguments, read_answer

__all__ = ["SglangServer"]

_CONTROL_SECONDS = 120.0  #: for SGLang to pause, go on, sleep or wake up


@attrs.frozen
class _Staged:
    """Weights in a folder that SGLang can read."""

    folder: Path
    digests: dict[str, str]


class SglangServer(RelayServer):
    """One replica: SGLang's server is a process that this one starts."""

    config: Config
    engine_name = "SGLang"
    update_kinds = ("full", "adapter")

    def __init__(self, config: Config, context: RolloutContext) -> None:
        super().__init__(config, context)
        self._sglang: SglangProcess | None = None
        self._flows = asyncio.Event()  #: whether SGLang may be asked to generate
        self._flows.set()
        self._interruptions = 0
        self._expected: dict[str, tuple[int, ...]] = {}
        self._tied = False
        self._adapter: str | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> ServerInfo:
        """Start SGLang, and wait until it has loaded the model.

        Raises:
            PluginError: ``plugin.requirement``: SGLang is not installed in this interpreter.
            RolloutError: ``engine.model`` when the folder cannot be served, ``rollout.stopped``.
            DeadlineExceeded: SGLang did not answer.
        """
        folder = self._begin()
        self._require_sglang()
        self._expected = tensors_of(folder)
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._tied = bool({**described, **(described.get("text_config") or {})}.get("tie_word_embeddings"))
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
                fix="give it an environment that has it: runtime.interpreters.rollout; see the plugin's README",
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
        check_logprobs(request)

    async def _read(self, running: Running) -> None:
        """Ask for what is left until nothing is."""
        request = running.request
        self._requests += 1
        seed = request.sampling.seed
        if seed is None:
            seed = own_seed(self.context.seed, self.context.replica, self._requests)
        name = f"{self._requests}-{request.request_id}"
        while True:
            await self._flows.wait()
            interruptions, version = self._interruptions, self._version
            body = generate_body(
                request, seed, running.token_ids, name, self._max_model_len,
                stream=running.stream is not None, adapter=self._adapter,
            )  # fmt: skip
            if not body["sampling_params"]["max_new_tokens"]:
                self._end(running, "length")  # it was interrupted behind its last token
                return
            if await self._part(running, body, version):
                return
            if interruptions == self._interruptions:
                raise self._error(f"SGLang gave request {request.request_id!r} up", "rollout.failed")

    async def _part(self, running: Running, body: dict[str, Any], version: int) -> bool:
        """Take the answers to one question; whether the request has ended."""
        assert self._sglang is not None
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

    async def pause(self, request: PauseRequest) -> PauseResult:
        """Stop decoding; when it returns no forward pass runs."""
        self._require_running()
        self._paused = True
        self._flows.clear()
        if request.mode == "wait":
            begun = [each.ended for each in self._running.values() if each.token_ids]
            await asyncio.gather(*begun, return_exceptions=True)
        await self._hold()
        if request.mode == "abort":
            await self._abort([each for each in self._running.values() if each.token_ids])
        return PauseResult(running=sum(bool(each.token_ids) for each in self._running.values()))

    async def resume(self, request: ResumeRequest) -> ResumeResult:
        """Go on decoding."""
        self._require_running()
        self._paused = False
        await self._release()
        return ResumeResult(running=sum(bool(each.token_ids) for each in self._running.values()))

    async def _hold(self) -> None:
        self._flows.clear()
        self._interruptions += 1
        await self._post("/pause_generation", {"mode": "abort"})

    async def _release(self) -> None:
        await self._post("/continue_generation", {})
        self._flows.set()

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

    async def _receive(self, request: UpdateWeightsRequest) -> _Staged:
        """Write what comes into a folder, while SGLang decodes."""
        if len(request.connect) != 1:
            raise WeightsError(
                "connect arguments do not fit the replica's workers", expected=1, found=len(request.connect)
            )
        context = CheckpointEngineContext(
            side="rollout",
            rank=request.first_worker,
            world_size=request.total_workers,
            device="cpu",
            host=self.context.host,
            deadline_seconds=request.deadline_seconds,
        )
        settings = dict(request.checkpoint_engine_config)
        engine: Any = load_plugin("checkpoint_engine", request.checkpoint_engine).build(settings, context)
        folder = Path(tempfile.mkdtemp(prefix=f"jackfield-weights-{request.version}-", dir=self._staging()))
        arguments = request.connect[0]
        try:
            if request.kind == "adapter":
                peft_config = dict(request.peft_config or {})
                digests = await stage_adapter(engine, arguments, request.version, peft_config, folder)
            else:
                config = Path(self.context.model.path) / "config.json"
                shutil.copy(config, folder)
                digests = await stage_weights(
                    engine, arguments, request.version, self._expected, folder, tied=self._tied
                )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return _Staged(folder, digests)

    def _staging(self) -> str:
        if not Path(self.config.staging).is_dir():
            raise WeightsError(
                "there is no folder for new weights",
                code="weights.storage",
                where="rollout.staging",
                expected="an existing folder",
                found=self.config.staging,
            )
        return self.config.staging

    async def _load(self, request: UpdateWeightsRequest, received: _Staged) -> Sequence[WorkerReceipt]:
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
            shutil.rmtree(received.folder, ignore_errors=True)
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
