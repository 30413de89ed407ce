"""The rollout server: the contract, on vLLM's asynchronous engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from jackfield.abc.rollout import (
    AbortRequest,
    AbortResult,
    BaseRolloutServer,
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
    HealthReport,
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
    WeightReceipt,
    WorkerReceipt,
)
from jackfield.errors import JackfieldError, PluginError, RolloutError, WeightsError
from jackfield.runtime.generation import Running, check_request, own_seed
from jackfield.runtime.process.wire import rebuilt_error
from jackfield_rollout_vllm.config import Config
from jackfield_rollout_vllm.requests import vllm_arguments

__all__ = ["VllmServer"]

_CPU_CACHE_BYTES = 1 << 30
_GRACE_SECONDS = 10.0  #: for workers to notice that a transfer is over
_MEMORY = ("weights", "kv_cache")


class VllmServer(BaseRolloutServer):
    """One replica: vLLM's engine core and its workers are processes that this one starts."""

    config: Config

    def __init__(self, config: Config, context: RolloutContext) -> None:
        super().__init__(config, context)
        self._clock = context.clock
        self._engine: Any = None
        self._running: dict[str, Running] = {}
        self._requests = 0
        self._version = 0
        self._update_lock = asyncio.Lock()
        self._paused = self._stopped = self._used = False
        self._stale: str | None = None
        self._awake = set(_MEMORY)
        self._vocabulary = self._max_model_len = 0

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> ServerInfo:
        """Load the model and begin to serve.

        Raises:
            PluginError: ``plugin.requirement``: vLLM is not installed in this interpreter.
            RolloutError: ``engine.model`` when the folder cannot be served, ``rollout.stopped`` after :meth:`stop`.
        """
        if self._stopped or self._used:
            raise self._error("the server cannot be started twice", "rollout.stopped", fix="make a new server")
        self._used = True
        folder = Path(self.context.model.path)
        if not (folder / "config.json").is_file():
            raise self._error(
                "there is no model in the folder",
                "engine.model",
                expected="a Hugging Face folder with config.json, weights and tokenizer",
                found=str(folder),
            )
        self._engine = await self._open_engine()
        described = self._engine.model_config
        self._vocabulary = described.get_vocab_size()
        self._max_model_len = min(self.context.max_model_len or described.max_model_len, described.max_model_len)
        return ServerInfo(replica=self.context.replica, workers=self.config.tensor_parallel)

    async def _open_engine(self) -> Any:
        """Start vLLM; its loop is this one."""
        try:
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise PluginError(
                "vLLM is not installed in this interpreter",
                where="the rollout server 'vllm'",
                found=error,
                fix="give it an environment that has it: runtime.interpreters.rollout; see the plugin's README",
            ) from error
        try:
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._engine_arguments()))
            await engine.collective_rpc("jackfield_prepare")
        except Exception as error:
            raise self._error(
                f"vLLM cannot serve the model: {type(error).__name__}: {error}",
                "engine.model",
                found=self.context.model.path,
                fix="see what vLLM has printed",
            ) from error
        return engine

    def _engine_arguments(self) -> dict[str, Any]:
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform

        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        config, model = self.config, self.context.model
        cache = config.kv_cache_bytes
        if cache is None and current_platform.is_cpu():
            cache = _CPU_CACHE_BYTES
        return {
            "disable_log_stats": True,
            **config.engine,
            "model": model.path,
            "dtype": model.dtype,
            "trust_remote_code": model.trust_remote_code,
            "seed": self.context.seed,
            "max_model_len": self.context.max_model_len,
            "max_num_seqs": config.max_batch_size,
            "tensor_parallel_size": config.tensor_parallel,
            "gpu_memory_utilization": config.memory_fraction,
            "kv_cache_memory_bytes": cache,
            "enable_prefix_caching": config.prefix_caching,
            "enable_sleep_mode": not current_platform.is_cpu(),
            "enforce_eager": config.eager,
            "logprobs_mode": "processed_logprobs",
            "logits_processors": ["jackfield_rollout_vllm.sampling:Filters"],
            "worker_extension_cls": "jackfield_rollout_vllm.worker.WorkerExtension",
            "weight_transfer_config": WeightTransferConfig(backend="jackfield"),
        }

    async def stop(self) -> None:
        """End vLLM's processes; every unfinished request fails with ``rollout.stopped``."""
        self._stopped = True
        engine, self._engine = self._engine, None
        await self._fail_all()
        if engine is not None:
            await self._close_engine(engine)

    async def _close_engine(self, engine: Any) -> None:
        engine.shutdown()

    async def health(self) -> HealthReport:
        """Whether the replica can serve, and its load."""
        refusal = self._refusal()
        waiting = sum(not each.token_ids for each in self._running.values())
        detail = refusal.message if refusal else "paused" if self._paused else ""
        return HealthReport(
            healthy=refusal is None,
            running=len(self._running) - waiting,
            waiting=waiting,
            weight_version=self._version,
            detail=detail or ("asleep" if len(self._awake) < len(_MEMORY) else ""),
        )

    # -- requests --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample. Cancelling the call aborts the request."""
        running = self._submit(request)
        try:
            await running.ended
        finally:
            await self._leave(running)
        return running.result()

    def generate_stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Generate one sample and yield its tokens as they come. Closing the iterator aborts the request."""
        return self._stream(request)

    async def _stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        chunks: asyncio.Queue[GenerateChunk | None] = asyncio.Queue()
        running = self._submit(request, chunks)
        try:
            while chunk := await chunks.get():
                yield chunk
            await running.ended
        finally:
            await self._leave(running)

    def _submit(self, request: GenerateRequest, stream: asyncio.Queue[GenerateChunk | None] | None = None) -> Running:
        refusal = self._refusal()
        if refusal is not None:
            raise refusal
        check_request(request, self._vocabulary, self._max_model_len)
        name, wanted = request.request_id, request.minimum_weight_version
        if name in self._running:
            raise self._error(f"request {name!r} is running already", "rollout.request")
        if wanted is not None and wanted > self._version:
            raise self._error(
                f"request {name!r} needs newer weights", "rollout.stale", expected=wanted, found=self._version
            )
        running = Running(request, asyncio.get_running_loop().create_future(), stream)
        self._running[name] = running
        running.reading = asyncio.create_task(self._read(running), name=f"request {name}")
        return running

    async def _read(self, running: Running) -> None:
        """Take vLLM's answers until the last one."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request = running.request
        self._requests += 1
        seed = request.sampling.seed
        if seed is None:
            seed = own_seed(self.context.seed, self.context.replica, self._requests)
        arguments = vllm_arguments(request, seed, self._max_model_len)
        try:
            answers = self._engine.generate(
                {"prompt_token_ids": list(request.prompt_ids)},
                SamplingParams(output_kind=RequestOutputKind.DELTA, **arguments),
                f"{self._requests}-{request.request_id}",
            )
            async for answer in answers:
                part = answer.outputs[0]
                tokens = list(part.token_ids)
                log_probs = [each[token].logprob for token, each in zip(tokens, part.logprobs or (), strict=True)]
                running.append(tokens, log_probs, self._version)
                if part.finish_reason is not None:
                    self._end(running, "length" if part.finish_reason == "length" else "stop")
                    return
        except Exception as error:
            self._running.pop(request.request_id, None)
            running.fail(
                self._error(
                    f"vLLM failed: {type(error).__name__}: {error}", "rollout.failed", fix="see what vLLM has printed"
                )
            )

    def _end(self, running: Running, reason: Any) -> None:
        self._running.pop(running.request.request_id, None)
        running.end(reason)

    async def _leave(self, running: Running) -> None:
        """Have vLLM forget a request; no effect on one that has ended."""
        if self._running.get(running.request.request_id) is running:
            del self._running[running.request.request_id]
        reading, running.reading = running.reading, None
        if reading is not None and not reading.done() and reading is not asyncio.current_task():
            reading.cancel()  # vLLM aborts what nobody reads
            await asyncio.gather(reading, return_exceptions=True)

    async def abort(self, request: AbortRequest) -> AbortResult:
        """End requests; when it returns they generate no more."""
        chosen = [self._running[name] for name in request.request_ids or self._running if name in self._running]
        await self._abort(chosen)
        return AbortResult(request_ids=tuple(each.request.request_id for each in chosen))

    async def _abort(self, chosen: list[Running]) -> None:
        for each in chosen:
            self._end(each, "abort")
        await asyncio.gather(*(self._leave(each) for each in chosen))
        if chosen and self._engine is not None:
            await self._engine.is_paused()  # its answer comes after vLLM has taken note

    # -- pausing and memory ----------------------------------------------------------------------------------------

    async def pause(self, request: PauseRequest) -> PauseResult:
        """Stop decoding; when it returns no forward pass runs."""
        self._require_running()
        if request.mode == "abort":
            await self._engine.pause_generation(mode="keep", clear_cache=False)
            self._paused = True
            await self._abort([each for each in self._running.values() if each.token_ids])
        else:
            await self._engine.pause_generation(mode=request.mode, clear_cache=False)
            self._paused = True
        return PauseResult(running=sum(bool(each.token_ids) for each in self._running.values()))

    async def resume(self, request: ResumeRequest) -> ResumeResult:
        """Go on decoding."""
        self._require_running()
        self._paused = False
        await self._engine.resume_generation()
        return ResumeResult(running=sum(bool(each.token_ids) for each in self._running.values()))

    async def sleep(self, request: SleepRequest) -> SleepResult:
        """Give memory back; only while paused or idle, and only on a GPU.

        Raises:
            PluginError: ``plugin.capability`` on a CPU.
            RolloutError: ``rollout.request`` while decoding; ``rollout.stopped``.
        """
        from vllm.platforms import current_platform

        self._require_running()
        if current_platform.is_cpu():
            raise PluginError(
                "vLLM cannot sleep on a CPU",
                code="plugin.capability",
                where=f"replica {self.context.replica}",
                expected="a GPU",
                fix="set runtime.offload: false",
            )
        if not self._paused and self._running:
            raise self._error("the server is decoding", "rollout.request", fix="pause it before it sleeps")
        await self._engine.sleep(request.level, mode="keep")
        if request.level == 2:
            self._stale = "the weights were given back by sleep(level=2) and no full update has come"
        self._awake.clear()
        return SleepResult()

    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        """Take memory again."""
        self._require_running()
        tags = [tag for tag in request.tags or _MEMORY if tag not in self._awake]
        if tags:
            await self._engine.wake_up(tags)
        self._awake |= set(tags)
        return WakeUpResult(awake=tuple(tag for tag in _MEMORY if tag in self._awake))

    # -- weights ---------------------------------------------------------------------------------------------------

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        """Receive a new version in every worker, load it between two decode steps and acknowledge it.

        Running requests are computed again with the new weights; cached prefixes are forgotten.

        Raises:
            WeightsError: ``weights.transfer``, ``weights.missing``, ``weights.version``.
            PluginError: ``plugin.capability`` for a delta, or an adapter of another kind than LoRA.
        """
        self._require_running()
        workers = self.config.tensor_parallel
        if request.kind == "delta" or (request.kind == "adapter" and workers > 1):
            raise PluginError(
                f"the rollout server 'vllm' cannot load an update of kind '{request.kind}'",
                code="plugin.capability",
                expected="full, or with one worker an adapter",
                found=f"{request.kind}, {workers} workers",
            )
        # workers cannot be interrupted: whoever leaves early leaves the update to its end, and the next one waits
        task = asyncio.create_task(self._update(request), name=f"update to version {request.version}")
        what = f"weights of version {request.version} for replica {self.context.replica}"
        try:
            return await self._clock.wait_for(asyncio.shield(task), request.deadline_seconds + _GRACE_SECONDS, what)
        except BaseException as error:
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            await self._become_stale(f"the update to version {request.version} failed: {_line(error)}")
            raise

    async def _update(self, request: UpdateWeightsRequest) -> WeightReceipt:
        async with self._update_lock:
            self._require_running()
            began = self._clock.time()
            self._check_update(request)
            await self._engine.pause_generation(mode="keep", clear_cache=False)
            paused = self._clock.time()
            try:
                answers = await self._engine.collective_rpc("jackfield_update", args=(self._update_info(request),))
                for answer in answers:
                    if "error" in answer:
                        raise _weights_error(rebuilt_error(answer["error"], f"replica {self.context.replica}"))
                await self._engine.reset_prefix_cache(reset_running_requests=True)
                self._version, self._stale = request.version, None
            finally:
                if not self._paused and self._engine is not None:
                    await self._engine.resume_generation()
            ended = self._clock.time()
        return WeightReceipt(
            version=request.version,
            replica=self.context.replica,
            workers=tuple(
                WorkerReceipt(worker=number, digests=answer["digests"]) for number, answer in enumerate(answers)
            ),
            seconds=ended - began,
            paused_seconds=ended - paused,
        )

    def _check_update(self, request: UpdateWeightsRequest) -> None:
        if request.version < self._version:
            raise WeightsError(
                "weights went backwards",
                code="weights.version",
                expected=f"at least {self._version}",
                found=request.version,
            )
        if len(request.connect) != self.config.tensor_parallel:
            raise WeightsError(
                "connect arguments do not fit the replica's workers",
                expected=self.config.tensor_parallel,
                found=len(request.connect),
            )
        if "weights" not in self._awake:
            raise WeightsError("the weights are asleep", fix="wake_up(tags=('weights',)) before the update")

    def _update_info(self, request: UpdateWeightsRequest) -> dict[str, Any]:
        return {
            "checkpoint_engine": request.checkpoint_engine,
            "settings": dict(request.checkpoint_engine_config),
            "connect": [dict(each) for each in request.connect],
            "first_worker": request.first_worker,
            "total_workers": request.total_workers,
            "version": request.version,
            "host": self.context.host,
            "deadline_seconds": request.deadline_seconds,
            "kind": request.kind,
            "peft_config": dict(request.peft_config or {}),
        }

    async def _become_stale(self, reason: str) -> None:
        self._stale = reason
        await self._fail_all()

    # -- how requests end ------------------------------------------------------------------------------------------

    async def _fail_all(self) -> None:
        """Fail everything unfinished with what the server refuses new requests with."""
        refusal = self._refusal()
        chosen = list(self._running.values())
        self._running.clear()
        for each in chosen:
            assert refusal is not None
            each.fail(refusal)
        with suppress(Exception):
            await asyncio.gather(*(self._leave(each) for each in chosen))

    def _refusal(self) -> RolloutError | None:
        """Why nothing can be generated, if so."""
        if self._stopped or self._engine is None:
            return self._error("the server is not running", "rollout.stopped", fix="start it, or make a new one")
        if self._engine.errored:
            return self._error("vLLM's engine core has died", "rollout.stopped", fix="see what vLLM has printed")
        if self._stale is not None:
            return self._error(self._stale, "rollout.stale", fix="send a full update")
        return None

    def _require_running(self) -> None:
        if self._stopped or self._engine is None:
            raise self._error("the server is not running", "rollout.stopped", fix="start it, or make a new one")

    def _error(self, message: str, code: str, **details: Any) -> RolloutError:
        return RolloutError(message, code=code, **{"where": f"replica {self.context.replica}", **details})


def _weights_error(error: JackfieldError) -> JackfieldError:
    """What a worker raised, as what an update may raise."""
    if isinstance(error, WeightsError | PluginError):
        return error
    return WeightsError(f"the update broke off: {error.message}", where=error.where, found=error.found, fix=error.fix)


def _line(error: BaseException) -> str:
    if isinstance(error, JackfieldError):
        return error.message
    return "cancelled" if isinstance(error, asyncio.CancelledError) else f"{type(error).__name__}: {error}"
