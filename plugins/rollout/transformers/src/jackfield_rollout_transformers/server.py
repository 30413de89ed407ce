"""The rollout server: life, requests, sleep and updates around the decode loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

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
from jackfield.errors import JackfieldError, WeightsError
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import WeightReceiver, check_base, open_receiver
from jackfield.sdk.requests import check_request
from jackfield_rollout_transformers.config import Config
from jackfield_rollout_transformers.decode_loop import MEMORY, DecodeLoop, line
from jackfield_rollout_transformers.decoder import Decoder
from jackfield_rollout_transformers.model import LoadedModel, check_decoding, check_requests, load_decode, load_model
from jackfield_rollout_transformers.sampling import mix
from jackfield_rollout_transformers.sequence import Sequence, StopStrings
from jackfield_rollout_transformers.weights import ModelWeights

if TYPE_CHECKING:
    from jackfield_openai.endpoint import OpenAIEndpoint

T = TypeVar("T")

_UNSEEDED = 0x5851F42D4C957F2D  #: sets the seeds of requests without one apart from those that callers choose
_LARGE_BYTES = 1 << 23  # a tensor from this size on is copied on the worker thread


class TransformersServer(BaseRolloutServer):
    """One replica in this process: requests, weights and memory around the decode loop."""

    def __init__(self, config: Config, context: RolloutContext) -> None:
        super().__init__(config, context)
        self._clock = context.clock
        self._loop = DecodeLoop(context.replica, config.steps_per_hop)
        self._update_lock = asyncio.Lock()
        self._unseeded = 0  #: requests without a seed so far
        self._update_task: asyncio.Task[WeightReceipt] | None = None
        self._endpoint: OpenAIEndpoint | None = None
        self._decode_text: Callable[[list[int]], str] | None = None
        self._pieces: dict[int, str] = {}
        self._model: LoadedModel
        self._weights: ModelWeights

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> ServerInfo:
        """Load the model and begin to serve.

        Raises:
            RolloutError: ``engine.model`` when the folder cannot be served, ``rollout.stopped`` after :meth:`stop`.
        """
        if self._loop.stopped or self._loop.executor is not None:
            raise self._loop.error("the server cannot be started twice", "rollout.stopped", fix="make a new server")
        self._loop.executor = ThreadPoolExecutor(1, thread_name_prefix=f"jackfield-rollout-{self.context.replica}")
        try:
            self._model = await self._loop.in_thread(load_model, self.config, self.context)
            self._loop.decoder = Decoder(self._model, self.config)
            self._weights = ModelWeights(self._model)
            checks = check_requests(self._model, self.config.rows)
            rows = [self._make_sequence(request, None) for request in checks]
            await self._loop.in_thread(check_decoding, self._model, self._loop.decoder, rows)
            if self._loop.stopped:
                raise self._loop.error("the server was stopped while it started", "rollout.stopped")
        except BaseException:
            await self.stop()
            raise
        self._loop.task = asyncio.create_task(self._loop.serve(), name=f"rollout-{self.context.replica}")
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
        self._loop.stopped = True
        self._loop.requests.reject_all(self._loop.refusal)
        self._loop.requests.work.set()
        if self._endpoint is not None:
            await self._endpoint.close()
        if self._update_task is not None:
            self._update_task.cancel()
        if self._loop.task is not None:
            await self._loop.task  # at most the pass that is running
            self._loop.task = None
            del self._model, self._loop.decoder, self._weights
        if self._loop.executor is not None:
            # idle by now, but for a model that is still being loaded
            await asyncio.to_thread(self._loop.executor.shutdown)

    async def health(self) -> HealthReport:
        """Report whether the replica can serve, and its load."""
        refusal = self._loop.refusal()
        detail = refusal.message if refusal else "paused" if self._loop.paused else ""
        if not detail and len(self._loop.awake) < len(MEMORY):
            detail = "asleep"
        return HealthReport(
            healthy=refusal is None,
            running=self._loop.requests.running,
            waiting=len(self._loop.requests.waiting),
            weight_version=self._loop.version,
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
            self._loop.requests.discard(sequence)
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
            self._loop.requests.discard(sequence)
            sequence.ended.cancel()

    def _submit(self, request: GenerateRequest, stream: asyncio.Queue[GenerateChunk | None] | None = None) -> Sequence:
        refusal = self._loop.refusal()
        if refusal is not None:
            raise refusal
        check_request(request, self._model.vocabulary, self._model.max_model_len)
        if request.request_id in self._loop.requests.active:
            raise self._loop.error(f"request {request.request_id!r} is running already", "rollout.request")
        wanted = request.minimum_weight_version
        if wanted is not None and wanted > self._loop.version:
            raise self._loop.error(
                f"request {request.request_id!r} needs newer weights",
                "rollout.stale",
                expected=wanted,
                found=self._loop.version,
            )
        sequence = self._make_sequence(request, stream)
        self._loop.requests.add(sequence)
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
        if request.sampling.stop and self._decode_text is None and self._loop.refusal() is None:
            spec = self.context.model
            self._decode_text = await asyncio.to_thread(load_decode, spec.path, spec.trust_remote_code)

    async def abort(self, request: AbortRequest) -> AbortResult:
        """End requests; when it returns they generate no more."""
        return await self._loop.abort(request)

    # -- pausing and memory ----------------------------------------------------------------------------------------

    async def pause(self, request: PauseRequest) -> PauseResult:
        """Stop decoding; when it returns no forward pass runs."""
        return await self._loop.pause(request)

    async def resume(self, request: ResumeRequest) -> ResumeResult:
        """Go on decoding."""
        return await self._loop.resume(request)

    async def sleep(self, request: SleepRequest) -> SleepResult:
        """Give memory back; only while paused or idle. Requests that a pause keeps are computed again afterwards.

        Raises:
            RolloutError: ``rollout.request`` while decoding; ``rollout.stopped``.
        """
        async with self._loop.between_hops():
            self._loop.require_running()
            if not self._loop.paused and self._loop.requests.active:
                raise self._loop.error("the server is decoding", "rollout.request", fix="pause it before it sleeps")
            kept = [one for one in self._loop.decoder.sequences if one.request.request_id in self._loop.requests.active]
            freed = self._loop.decoder.release()
            self._loop.requests.waiting.extendleft(reversed(kept))
            if request.level == 2:
                freed += self._weights.drop()
                self._loop.stale = "the weights were given back by sleep(level=2) and no full update has come"
            else:
                freed += self._weights.to("cpu")
            self._loop.awake.clear()
        return SleepResult(freed_bytes=freed)

    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        """Take memory again. After level 2 the weights have no contents until a full update."""
        async with self._loop.between_hops():
            self._loop.require_running()
            tags = set(request.tags or MEMORY)
            if "weights" in tags:
                self._weights.to(self._model.device)
                self._weights.allocate()
            self._loop.awake |= tags
            self._loop.requests.work.set()
        return WakeUpResult(awake=tuple(tag for tag in MEMORY if tag in self._loop.awake))

    # -- weights ---------------------------------------------------------------------------------------------------

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        """Receive a new version of the weights, load it between two decode steps and acknowledge it.

        Running requests keep their KV cache and go on with the new weights. When it fails, everything unfinished fails
        with ``rollout.stale``, and so does every request until an update succeeds.

        Raises:
            WeightsError: ``weights.transfer``, ``weights.missing``, ``weights.version``; ``weights.base`` for a delta
                to a version that is not held: nothing has changed then.
        """
        self._loop.require_running()
        async with self._update_lock:
            self._loop.require_running()
            if request.kind == "delta":
                check_base(self._weights.held.version, request.base_version)
            receive = self._receive_delta if request.kind == "delta" else self._receive
            task = self._update_task = asyncio.create_task(receive(request))
            what = f"weights of version {request.version} for replica {self.context.replica}"
            try:
                return await self._clock.wait_for(task, request.deadline_seconds, what)
            except BaseException as error:
                if self._loop.stopped and task.cancelled():
                    refusal = self._loop.refusal()
                    assert refusal is not None
                    raise refusal from None
                self._weights.held.forget()  # what has come of it is not what is loaded
                self._loop.become_stale(f"the update to version {request.version} failed: {line(error)}")
                if isinstance(error, WeightsError) or not isinstance(error, Exception):
                    raise
                fix = error.fix if isinstance(error, JackfieldError) else None
                raise WeightsError(
                    f"the update to version {request.version} broke off: {line(error)}",
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
                    await stack.enter_async_context(self._loop.between_hops())
                    paused = self._clock.time()
                if tensor.nbytes < _LARGE_BYTES:
                    update.load(name, tensor)
                else:
                    await self._loop.in_thread(update.load, name, tensor)
            if paused is None:
                await stack.enter_async_context(self._loop.between_hops())
                paused = self._clock.time()
            digests = await self._loop.in_thread(update.finish, receiver.digests)
            self._loop.enter_version(request.version)
        return self._receipt(request.version, digests, began, paused)

    async def _receive_delta(self, request: UpdateWeightsRequest) -> WeightReceipt:
        """Decoding goes on until all that has changed is there, and the digests of what has not are taken."""
        began = self._clock.time()
        self._check_update(request)
        weights, receiver = self._weights, self._receiver(request)
        changes = await receiver.changes(request.connect[0], request.version, request.base_version)
        digests = await asyncio.to_thread(weights.held.unchanged, changes)
        async with self._loop.between_hops():
            paused = self._clock.time()
            digests |= await self._loop.in_thread(weights.apply, changes, request.version)
            self._loop.enter_version(request.version)
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
        if request.version < self._loop.version:
            raise WeightsError(
                "weights went backwards",
                code="weights.version",
                expected=f"at least {self._loop.version}",
                found=request.version,
            )
        if len(request.connect) != 1:
            raise WeightsError(
                "connect arguments do not fit the replica's workers",
                expected="1 (one worker)",
                found=len(request.connect),
            )
        if "weights" not in self._loop.awake:
            raise WeightsError("the weights are asleep", fix="wake_up(tags=('weights',)) before the update")

    def _receiver(self, request: UpdateWeightsRequest) -> WeightReceiver:
        held = self._weights.held
        return open_receiver(request, device=self.context.device, host=self.context.host, held=held)
