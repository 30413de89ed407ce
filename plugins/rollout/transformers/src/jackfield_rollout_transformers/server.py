"""The rollout server: requests, pauses, sleep and updates around the decode loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

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
from jackfield.errors import JackfieldError, RolloutError, WeightsError
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import WeightReceiver, check_base, open_receiver
from jackfield.sdk.requests import check_request
from jackfield_rollout_transformers.config import Config
from jackfield_rollout_transformers.decoder import Decoder
from jackfield_rollout_transformers.model import LoadedModel, load_decode, load_model
from jackfield_rollout_transformers.requests import Requests
from jackfield_rollout_transformers.sampling import mix
from jackfield_rollout_transformers.selfcheck import check_decoding, check_requests
from jackfield_rollout_transformers.sequence import Sequence, StopStrings
from jackfield_rollout_transformers.weights import ModelWeights

if TYPE_CHECKING:
    from jackfield_openai.endpoint import OpenAIEndpoint

T = TypeVar("T")

_MEMORY = ("weights", "kv_cache")
_UNSEEDED = 0x5851F42D4C957F2D  #: sets the seeds of requests without one apart from those that callers choose
_LARGE_BYTES = 1 << 23  # a tensor from this size on is copied on the worker thread


class TransformersServer(BaseRolloutServer):
    """One replica in this process.

    A task on the event loop alternates between two states: a *hop*, in which the worker thread runs forward passes and
    nothing else touches the batch, and the time between hops, in which callers come and go. What changes the batch
    (abort, pause, sleep, update) holds ``_between_hops`` and so comes after the pass that is running.
    """

    def __init__(self, config: Config, context: RolloutContext) -> None:
        super().__init__(config, context)
        self._clock = context.clock
        self._batch_lock = asyncio.Lock()
        self._update_lock = asyncio.Lock()
        self._visitors = 0
        self._requests = Requests()
        self._version = 0
        self._unseeded = 0  #: requests without a seed so far
        self._paused = self._draining = self._stopped = False
        self._awake: set[str] = set(_MEMORY)
        self._failure: str | None = None
        self._stale: str | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._update_task: asyncio.Task[WeightReceipt] | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._endpoint: OpenAIEndpoint | None = None
        self._decode_text: Callable[[list[int]], str] | None = None
        self._pieces: dict[int, str] = {}
        self._model: LoadedModel
        self._decoder: Decoder
        self._weights: ModelWeights

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> ServerInfo:
        """Load the model and begin to serve.

        Raises:
            RolloutError: ``engine.model`` when the folder cannot be served, ``rollout.stopped`` after :meth:`stop`.
        """
        if self._stopped or self._executor is not None:
            raise self._error("the server cannot be started twice", "rollout.stopped", fix="make a new server")
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"jackfield-rollout-{self.context.replica}")
        try:
            self._model = await self._in_thread(load_model, self.config, self.context)
            self._decoder = Decoder(self._model, self.config)
            self._weights = ModelWeights(self._model)
            checks = check_requests(self._model, self.config.rows)
            rows = [self._make_sequence(request, None) for request in checks]
            await self._in_thread(check_decoding, self._model, self._decoder, rows)
            if self._stopped:
                raise self._error("the server was stopped while it started", "rollout.stopped")
        except BaseException:
            await self.stop()
            raise
        self._loop_task = asyncio.create_task(self._serve(), name=f"rollout-{self.context.replica}")
        try:
            url = await self._listen()
        except BaseException:
            await self.stop()
            raise
        return ServerInfo(replica=self.context.replica, workers=1, openai_base_url=url)

    async def _listen(self) -> str | None:
        """Open the OpenAI-compatible address, if there is to be one."""
        config: Config = self.config
        if config.openai is None:
            return None
        from jackfield_openai.endpoint import OpenAIEndpoint  # a web server, which few replicas need

        self._endpoint = OpenAIEndpoint(self, config.openai)
        return await self._endpoint.start()

    async def stop(self) -> None:
        """End the decode loop and the worker thread; every unfinished request fails with ``rollout.stopped``."""
        self._stopped = True
        self._requests.reject_all(self._refusal)
        self._requests.work.set()
        if self._endpoint is not None:
            await self._endpoint.close()
        if self._update_task is not None:
            self._update_task.cancel()
        if self._loop_task is not None:
            await self._loop_task  # at most the pass that is running
            self._loop_task = None
            del self._model, self._decoder, self._weights
        if self._executor is not None:
            await asyncio.to_thread(self._executor.shutdown)  # idle by now, but for a model that is still being loaded

    async def health(self) -> HealthReport:
        """Report whether the replica can serve, and its load."""
        refusal = self._refusal()
        detail = refusal.message if refusal else "paused" if self._paused else ""
        if not detail and len(self._awake) < len(_MEMORY):
            detail = "asleep"
        return HealthReport(
            healthy=refusal is None,
            running=self._requests.running,
            waiting=len(self._requests.waiting),
            weight_version=self._version,
            detail=detail,
        )

    # -- requests --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample. Cancelling the call aborts the request."""
        await self._prepare_stop_strings(request)
        sequence = self._submit(request)
        try:
            await sequence.ended
        finally:
            self._requests.discard(sequence)
        return sequence.result()

    def generate_stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Generate one sample and yield its tokens as they come. Closing the iterator aborts the request."""
        return self._stream(request)

    async def _stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        await self._prepare_stop_strings(request)
        chunks: asyncio.Queue[GenerateChunk | None] = asyncio.Queue()
        sequence = self._submit(request, chunks)
        try:
            while chunk := await chunks.get():
                yield chunk
            await sequence.ended  # raises what ended it, if anything did
        finally:
            self._requests.discard(sequence)
            sequence.ended.cancel()

    def _submit(self, request: GenerateRequest, stream: asyncio.Queue[GenerateChunk | None] | None = None) -> Sequence:
        refusal = self._refusal()
        if refusal is not None:
            raise refusal
        check_request(request, self._model.vocabulary, self._model.max_model_len)
        if request.request_id in self._requests.active:
            raise self._error(f"request {request.request_id!r} is running already", "rollout.request")
        wanted = request.minimum_weight_version
        if wanted is not None and wanted > self._version:
            raise self._error(
                f"request {request.request_id!r} needs newer weights",
                "rollout.stale",
                expected=wanted,
                found=self._version,
            )
        sequence = self._make_sequence(request, stream)
        self._requests.add(sequence)
        return sequence

    def _make_sequence(self, request: GenerateRequest, stream: asyncio.Queue[GenerateChunk | None] | None) -> Sequence:
        sampling = request.sampling
        seed = sampling.seed
        if seed is None:
            seed = mix(mix(mix(self.context.seed + _UNSEEDED) + self.context.replica) + self._unseeded)
            self._unseeded += 1
        own = frozenset() if sampling.ignore_eos else self._model.end_ids
        stop_strings = None
        if sampling.stop:
            assert self._decode_text is not None
            stop_strings = StopStrings(sampling.stop, self._decode_text, self._pieces)
        return Sequence(
            request=request,
            seed=seed,
            limit=min(sampling.max_new_tokens, self._model.max_model_len - len(request.prompt_ids)),
            stop_ids=own.union(sampling.stop_token_ids),
            ended=asyncio.get_running_loop().create_future(),
            stop_strings=stop_strings,
            stream=stream,
        )

    async def _prepare_stop_strings(self, request: GenerateRequest) -> None:
        if request.sampling.stop and self._decode_text is None and self._refusal() is None:
            spec = self.context.model
            self._decode_text = await asyncio.to_thread(load_decode, spec.path, spec.trust_remote_code)

    async def abort(self, request: AbortRequest) -> AbortResult:
        """End requests; when it returns they generate no more."""
        async with self._between_hops():
            active = self._requests.active
            chosen = [active[name] for name in request.request_ids or active if name in active]
            for sequence in chosen:
                self._end_early(sequence)
        return AbortResult(request_ids=tuple(sequence.request.request_id for sequence in chosen))

    # -- pausing and memory ----------------------------------------------------------------------------------------

    async def pause(self, request: PauseRequest) -> PauseResult:
        """Stop decoding; when it returns no forward pass runs."""
        if request.mode == "wait" and not self._paused:
            self._draining = True
            self._requests.note_drained()
            try:
                # ends with the requests that run, at their limits; resume and stop end it, too
                await self._requests.drained.wait()
                if not self._draining:
                    return PauseResult(running=self._requests.running)
            finally:
                self._draining = False
                self._requests.work.set()
        async with self._between_hops():
            self._paused = True
            if request.mode == "abort":
                for sequence in [one for one in self._requests.active.values() if one.row >= 0]:
                    self._end_early(sequence)
        return PauseResult(running=self._requests.running)

    async def resume(self, request: ResumeRequest) -> ResumeResult:
        """Go on decoding."""
        self._paused = self._draining = False
        self._requests.drained.set()
        self._requests.work.set()
        return ResumeResult(running=self._requests.running)

    async def sleep(self, request: SleepRequest) -> SleepResult:
        """Give memory back; only while paused or idle. Requests that a pause keeps are computed again afterwards.

        Raises:
            RolloutError: ``rollout.request`` while decoding; ``rollout.stopped``.
        """
        async with self._between_hops():
            self._require_running()
            if not self._paused and self._requests.active:
                raise self._error("the server is decoding", "rollout.request", fix="pause it before it sleeps")
            kept = [one for one in self._decoder.sequences if one.request.request_id in self._requests.active]
            freed = self._decoder.release()
            self._requests.waiting.extendleft(reversed(kept))
            if request.level == 2:
                freed += self._weights.drop()
                self._stale = "the weights were given back by sleep(level=2) and no full update has come"
            else:
                freed += self._weights.to("cpu")
            self._awake.clear()
        return SleepResult(freed_bytes=freed)

    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        """Take memory again. After level 2 the weights have no contents until a full update."""
        async with self._between_hops():
            self._require_running()
            tags = set(request.tags or _MEMORY)
            if "weights" in tags:
                self._weights.to(self._model.device)
                self._weights.allocate()
            self._awake |= tags
            self._requests.work.set()
        return WakeUpResult(awake=tuple(tag for tag in _MEMORY if tag in self._awake))

    # -- weights ---------------------------------------------------------------------------------------------------

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        """Receive a new version of the weights, load it between two decode steps and acknowledge it.

        Running requests keep their KV cache and go on with the new weights. When it fails, everything unfinished fails
        with ``rollout.stale``, and so does every request until an update succeeds.

        Raises:
            WeightsError: ``weights.transfer``, ``weights.missing``, ``weights.version``; ``weights.base`` for a delta
                to a version that is not held: nothing has changed then.
        """
        self._require_running()
        async with self._update_lock:
            self._require_running()
            if request.kind == "delta":
                check_base(self._weights.held.version, request.base_version)
            receive = self._receive_delta if request.kind == "delta" else self._receive
            task = self._update_task = asyncio.create_task(receive(request))
            what = f"weights of version {request.version} for replica {self.context.replica}"
            try:
                return await self._clock.wait_for(task, request.deadline_seconds, what)
            except BaseException as error:
                if self._stopped and task.cancelled():
                    refusal = self._refusal()
                    assert refusal is not None
                    raise refusal from None
                self._weights.held.forget()  # what has come of it is not what is loaded
                self._become_stale(f"the update to version {request.version} failed: {_line(error)}")
                if isinstance(error, WeightsError) or not isinstance(error, Exception):
                    raise
                fix = error.fix if isinstance(error, JackfieldError) else None
                raise WeightsError(
                    f"the update to version {request.version} broke off: {_line(error)}",
                    where=f"replica {self.context.replica}",
                    fix=fix,
                ) from error
            finally:
                self._update_task = None

    async def _receive(self, request: UpdateWeightsRequest) -> WeightReceipt:
        began = self._clock.time()
        self._check_update(request)
        receiver = self._receiver(request)
        update = self._weights.begin(request, digest)
        async with contextlib.AsyncExitStack() as stack:
            paused: float | None = None
            tensors = receiver.tensors(request.connect[0], request.version)
            await stack.enter_async_context(contextlib.aclosing(tensors))
            async for name, tensor in tensors:
                if paused is None:  # meeting the sender took its time; decoding went on until here
                    await stack.enter_async_context(self._between_hops())
                    paused = self._clock.time()
                if tensor.nbytes < _LARGE_BYTES:
                    update.load(name, tensor)
                else:
                    await self._in_thread(update.load, name, tensor)
            if paused is None:
                await stack.enter_async_context(self._between_hops())
                paused = self._clock.time()
            digests = await self._in_thread(update.finish, receiver.digests)
            self._enter_version(request.version)
        return self._receipt(request.version, digests, began, paused)

    async def _receive_delta(self, request: UpdateWeightsRequest) -> WeightReceipt:
        """Decoding goes on until all that has changed is there, and the digests of what has not are taken."""
        began = self._clock.time()
        self._check_update(request)
        weights, receiver = self._weights, self._receiver(request)
        changes = await receiver.changes(request.connect[0], request.version, request.base_version)
        digests = await asyncio.to_thread(weights.held.unchanged, changes)
        async with self._between_hops():
            paused = self._clock.time()
            digests |= await self._in_thread(weights.apply, changes, request.version)
            self._enter_version(request.version)
        return self._receipt(request.version, digests, began, paused)

    def _receipt(self, version: int, digests: dict[str, str], began: float, paused: float) -> WeightReceipt:
        ended = self._clock.time()
        return WeightReceipt(
            version=version,
            replica=self.context.replica,
            workers=(WorkerReceipt(worker=0, digests=digests),),
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
        if len(request.connect) != 1:
            raise WeightsError(
                "connect arguments do not fit the replica's workers",
                expected="1 (one worker)",
                found=len(request.connect),
            )
        if "weights" not in self._awake:
            raise WeightsError("the weights are asleep", fix="wake_up(tags=('weights',)) before the update")

    def _receiver(self, request: UpdateWeightsRequest) -> WeightReceiver:
        held = self._weights.held
        return open_receiver(request, device=self.context.device, host=self.context.host, held=held)

    def _enter_version(self, version: int) -> None:
        for sequence in self._requests.active.values():
            sequence.stamp(self._version)
        self._version = version
        self._stale = self._failure = None
        self._requests.work.set()

    def _become_stale(self, reason: str) -> None:
        self._stale = reason
        self._requests.reject_all(self._refusal)

    # -- the loop --------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while not self._stopped:
            await self._requests.work.wait()
            self._requests.work.clear()
            try:
                while self._runnable():
                    async with self._batch_lock:
                        ended = await self._hop()
                    if ended:
                        await asyncio.sleep(0)  # who waited for these may have a next request: let it join the next hop
            except Exception as error:
                self._fail(error)

    def _runnable(self) -> bool:
        if self._paused or self._refusal() is not None or len(self._awake) < len(_MEMORY):
            return False
        return self._requests.running > 0 or (bool(self._requests.waiting) and not self._draining)

    async def _hop(self) -> bool:
        """Let callers in and out, then run some passes; whether requests ended."""
        self._decoder.remove(self._requests.discarded)
        self._requests.discarded.clear()
        if not self._runnable():
            return False
        count = 0 if self._draining else self._decoder.choose_joiners(self._requests.waiting)
        joiners, streams = self._requests.join(count), self._requests.streams()
        steps = 1 if streams else self.config.steps_per_hop
        ended = await self._in_thread(self._decoder.run, joiners, steps, self._interrupted)
        for sequence in ended:
            self._requests.settle(sequence, self._version)
        for sequence in streams:
            self._requests.feed(sequence, self._version)
        self._requests.note_drained()
        return bool(ended)

    def _interrupted(self) -> bool:
        return self._visitors > 0 or self._requests.arrived or self._stopped or self._stale is not None

    @contextlib.asynccontextmanager
    async def _between_hops(self) -> AsyncIterator[None]:
        self._visitors += 1
        try:
            async with self._batch_lock:
                yield
        finally:
            self._visitors -= 1

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        assert self._executor is not None
        return await asyncio.get_running_loop().run_in_executor(self._executor, functools.partial(function, *arguments))

    # -- how requests end ------------------------------------------------------------------------------------------

    def _end_early(self, sequence: Sequence) -> None:
        """Abort; between hops only."""
        if sequence.row >= 0:
            self._decoder.remove([sequence])
        else:
            self._requests.waiting.remove(sequence)
        sequence.finish_reason = "abort"
        self._requests.settle(sequence, self._version)
        self._requests.note_drained()

    def _fail(self, error: Exception) -> None:
        self._failure = _line(error)
        self._requests.reject_all(lambda: self._failed(error))
        self._requests.discarded.clear()
        self._decoder.release()

    def _failed(self, cause: BaseException | None = None) -> RolloutError:
        refusal = self._error(
            f"the decode loop failed: {self._failure}",
            "rollout.failed",
            fix="see the cause; a successful update starts it again",
        )
        refusal.__cause__ = cause
        return refusal

    def _refusal(self) -> RolloutError | None:
        """Why nothing can be generated, if so."""
        if self._stopped or self._loop_task is None:
            return self._error("the server is not running", "rollout.stopped", fix="start it, or make a new one")
        if self._failure is not None:
            return self._failed()
        if self._stale is not None:
            return self._error(self._stale, "rollout.stale", fix="send a full update")
        return None

    def _require_running(self) -> None:
        if self._stopped or self._loop_task is None:
            raise self._error("the server is not running", "rollout.stopped", fix="start it, or make a new one")

    def _error(self, message: str, code: str, **details: Any) -> RolloutError:
        return RolloutError(message, code=code, where=f"replica {self.context.replica}", **details)


def _line(error: BaseException) -> str:
    if isinstance(error, JackfieldError):
        return error.message
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return f"{type(error).__name__}: {error}"
