"""The rollout server: start and stop, requests, sleep and updates around the decode loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Literal

import attrs
import numpy as np
import torch
import xxhash

from jackfield.abc.rollout import (
    AbortRequest,
    AbortResult,
    GenerateRequest,
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
from jackfield.sdk.receiver import WeightReceiver, reopen_receiver
from jackfield.sdk.slices import SliceReceiver, reopen_slice_receiver
from jackfield_huggingface.relay import MEMORY, Running
from jackfield_huggingface.serving import SleepingServer
from jackfield_huggingface.shaping import ShapedRequest
from jackfield_openai import Address
from jackfield_rollout_transformers.config import Config
from jackfield_rollout_transformers.decode_loop import DecodeLoop
from jackfield_rollout_transformers.decoder import Decoder, Sequence, StopStrings
from jackfield_rollout_transformers.model import LoadedModel, load_decode, load_model, load_tokenizer
from jackfield_rollout_transformers.self_check import check_decoding, check_requests
from jackfield_rollout_transformers.shaping import SERVED, Grammars, Shaper
from jackfield_rollout_transformers.weights import AdapterUpdate, FullUpdate, ModelWeights

_LARGE_BYTES = 1 << 23  # a tensor from this size on is copied on the worker thread


class TransformersServer(SleepingServer):
    """One replica in this process: requests, weights and memory around the decode loop."""

    config: Config
    engine_name = "the decode loop"
    takes_arrays = True
    update_kinds = ("full", "adapter", "delta")
    shaping = SERVED

    def __init__(self, config: Config, context: RolloutContext) -> None:
        super().__init__(config, context)
        threads = f"jackfield-rollout-{context.replica}"
        self._loop = DecodeLoop(config.steps_per_hop, self._may_decode, self._made, threads)
        self._task: asyncio.Task[None] | None = None  #: of the decode loop
        self._failure: Exception | None = None  #: of the decode loop
        self._sequences: dict[str, Sequence] = {}
        self._updating: asyncio.Task[Any] | None = None
        self._receiver: WeightReceiver | None = None  #: of the last update, which keeps connections and buffers
        self._slice_receiver: SliceReceiver | None = None  #: likewise, of the last update to which every rank sent
        self._address = Address()
        self._decode_text: Callable[[list[int]], str] | None = None
        self._pieces: dict[int, str] = {}
        self._grammars: Grammars | None = None
        self._model: LoadedModel
        self._weights: ModelWeights

    async def start(self) -> ServerInfo:
        """Load the model and begin to serve."""
        self._begin()
        try:
            self._model = await self._loop.in_thread(load_model, self.config, self.context)
            self._vocabulary, self._max_model_len = self._model.vocabulary, self._model.max_model_len
            self._loop.decoder = Decoder(self._model, self.config)
            self._weights = ModelWeights(self._model)
            checks = check_requests(self._model, self.config.rows)
            rows = [self._make_sequence(Running(each)) for each in checks]
            await self._loop.in_thread(check_decoding, self._model, self._loop.decoder, rows)
            if self._stopped:
                raise self._error("the server was stopped while it started", "rollout.stopped")
            serving = self._loop.serve(lambda: self._stopped, self._fail)
            self._task = asyncio.create_task(serving, name=f"rollout-{self.context.replica}")
            url = await self._address.open(self, self.config.openai)
        except BaseException:
            await self.stop()
            raise
        layouts = (self._weights.layout(),)
        return ServerInfo(replica=self.context.replica, workers=1, openai_base_url=url, weight_layouts=layouts)

    async def stop(self) -> None:
        """Stop the decode loop and the worker thread; unfinished requests fail with ``rollout.stopped``."""
        self._stopped = True
        await self._fail_all()
        self._loop.work.set()
        await self._address.close()
        if self._updating is not None:
            self._updating.cancel()
        task, self._task, self._receiver, self._slice_receiver = self._task, None, None, None
        if task is not None:
            await task  # waits for at most the running pass
            del self._model, self._loop.decoder, self._weights
        # idle by now, unless a model is still being loaded
        await asyncio.to_thread(self._loop.executor.shutdown)

    def _down(self) -> str | None:
        return "the server is not running" if self._stopped or self._task is None else None

    def _refusal(self) -> RolloutError | None:
        if self._failure is None or self._down() is not None:
            return super()._refusal()
        fix = "see the cause; a successful update starts it again"
        refusal = self._error(f"the decode loop failed: {_line(self._failure)}", "rollout.failed", fix=fix)
        refusal.__cause__ = self._failure
        return refusal

    async def _fail(self, error: Exception) -> None:
        self._failure = error
        await self._fail_all()

    def _may_decode(self) -> bool:
        return not self._paused and len(self._awake) == len(MEMORY) and self._refusal() is None

    async def health(self) -> HealthReport:
        """Report whether the replica can serve, and its load."""
        running = self._loop.running if self._down() is None else 0
        return attrs.evolve(await super().health(), running=running, waiting=len(self._running) - running)

    def _refuse(self, request: GenerateRequest) -> None:
        """Raise if the model does not take what a request has beside tokens."""
        images, name, given = self._model.images, request.request_id, request.multi_modal_data
        if not given:
            return
        problem = ("text alone: this model takes no such images", ", ".join(given))
        if images is not None:
            for array in given.values():
                if not hasattr(array, "dtype"):
                    raise self._error(f"request {name!r} has inputs that are no arrays", "rollout.request", where=name)
            found = images.problem(given, request.prompt_ids)
            if found is None:
                return
            problem = found
        message = f"the images of request {name!r} do not fit the model"
        raise self._error(message, "rollout.request", where=name, expected=problem[0], found=problem[1])

    async def _read(self, running: Running) -> None:
        request, spec = running.request, self.context.model
        if request.sampling.stop and self._decode_text is None:
            self._decode_text = await asyncio.to_thread(load_decode, spec.path, spec.trust_remote_code)
        sequence = self._sequences[request.request_id] = self._make_sequence(running)
        try:
            if isinstance(request, ShapedRequest):
                sequence.shaper = await asyncio.to_thread(self._make_shaper, request, sequence.stop_ids)
            await self._loop.generate(sequence)
        finally:
            if self._sequences.get(request.request_id) is sequence:
                del self._sequences[request.request_id]

    def _make_sequence(self, running: Running) -> Sequence:
        request, sampling = running.request, running.request.sampling
        own = frozenset() if sampling.ignore_eos else self._model.end_ids
        stop_strings = None
        if sampling.stop:
            assert self._decode_text is not None
            stop_strings = StopStrings(sampling.stop, self._decode_text, self._pieces)
        limit = min(sampling.max_new_tokens, self._model.max_model_len - len(request.prompt_ids))
        seen: dict[str, Any] = {}
        if request.multi_modal_data and self._model.images is not None:
            arrays = {name: np.array(each, order="C") for name, each in sorted(request.multi_modal_data.items())}
            seen["images"] = {name: torch.from_numpy(each) for name, each in arrays.items()}
            seen["digest"] = _digest(arrays)
            seen["offset"] = self._model.images.offset(seen["images"])
        return Sequence(running, limit, own.union(sampling.stop_token_ids), stop_strings, **seen)

    def _make_shaper(self, request: ShapedRequest, end_ids: frozenset[int]) -> Shaper:
        grammar, matcher = request.shaping.grammar, None
        if grammar is not None:
            spec = self.context.model
            load = functools.partial(load_tokenizer, spec.path, spec.trust_remote_code)
            if self._grammars is None:
                self._grammars = Grammars(load, self._vocabulary, self._model.end_ids)
            matcher = self._grammars.matcher(grammar)
        return Shaper(request, end_ids, matcher)

    def _made(self, sequence: Sequence) -> None:
        if sequence.done.done():  # its caller has left
            return
        sequence.feed(self._version)
        if sequence.error is not None:
            sequence.done.set_exception(sequence.error)
        elif sequence.finish_reason is not None:
            self._end(sequence.running, sequence.finish_reason)
            sequence.done.set_result(None)

    def _end(self, running: Running, reason: Literal["stop", "length", "abort"]) -> None:
        sequence = self._sequences.get(running.request.request_id)
        if sequence is not None and sequence.running is running:
            sequence.feed(self._version)
            running.routed_experts = sequence.routed_experts()
        super()._end(running, reason)

    async def abort(self, request: AbortRequest) -> AbortResult:
        """End requests; when it returns they generate no more."""
        async with self._loop.between_hops():
            result = await super().abort(request)
            self._loop.remove_discarded()
        return result

    async def pause(self, request: PauseRequest) -> PauseResult:
        """Stop decoding; when it returns no forward pass runs."""
        self._require_running()
        if request.mode == "wait" and not self._paused and not await self._loop.drain():
            return PauseResult(running=self._loop.running)
        async with self._loop.between_hops():
            self._paused = True
            if request.mode == "abort":
                await self._abort([each.running for each in self._loop.decoder.sequences])
                self._loop.remove_discarded()
        return PauseResult(running=self._loop.running)

    async def resume(self, request: ResumeRequest) -> ResumeResult:
        """Resume decoding after a pause."""
        self._require_running()
        self._paused = False
        self._loop.go_on()
        return ResumeResult(running=self._loop.running)

    async def sleep(self, request: SleepRequest) -> SleepResult:
        """Release memory; only while paused or idle. Kept requests are recomputed afterwards."""
        async with self._loop.between_hops():
            return await super().sleep(request)

    async def _give_back(self, tags: list[str], level: int) -> int:
        return self._loop.release() + (self._weights.drop() if level == 2 else self._weights.to("cpu"))

    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        """Allocate memory again. After level 2 the weights are undefined until a full update."""
        async with self._loop.between_hops():
            result = await super().wake_up(request)
            self._loop.work.set()
        return result

    async def _take_back(self, tags: list[str]) -> None:
        if "weights" in tags:
            self._weights.to(self._model.device)
            self._weights.allocate()

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        """Receive a new version of the weights, load it between two decode steps and acknowledge it.

        Running requests keep their KV cache and continue with the new weights. If the update fails, all unfinished
        requests fail with ``rollout.stale``, and so does every request until an update succeeds. ``weights.base``, for
        a delta to a version that is not held, changes nothing.
        """
        try:
            return await super().update_weights(request)
        except BaseException as error:
            if self._updating is not None:
                self._updating.cancel()  # its result is not needed any more
            refusal = self._refusal()
            if self._stopped and refusal is not None:
                raise refusal from None
            if isinstance(error, WeightsError) or not isinstance(error, Exception):
                raise
            raise WeightsError(
                f"the update to version {request.version} broke off: {_line(error)}",
                where=f"replica {self.context.replica}",
                fix=error.fix if isinstance(error, JackfieldError) else None,
            ) from error

    async def _update(self, request: UpdateWeightsRequest) -> WeightReceipt:
        self._updating = asyncio.current_task()
        try:
            return await super()._update(request)
        except BaseException:
            self._weights.held.forget()  # the received tensors are not those that are loaded
            raise
        finally:
            self._updating = None

    async def _hold(self, wait: bool = False) -> None:
        """Do nothing: :meth:`_load` holds the loop itself."""

    async def _release(self) -> None:
        self._loop.work.set()

    async def _receive(self, request: UpdateWeightsRequest) -> tuple[Any, ...]:
        """Connect to the sender; of a delta, receive all changes and take the digests of the rest."""
        if len(request.connect) != 1:
            message = "connect arguments do not fit the replica's workers"
            raise WeightsError(message, expected="1 (one worker)", found=len(request.connect))
        held = self._weights.held
        place: dict[str, Any] = {"device": self.context.device, "host": self.context.host}
        if request.connect[0].get("links"):
            layout = self._weights.layout()
            parts = self._slice_receiver = reopen_slice_receiver(
                self._slice_receiver, request, layout, **place, held=held
            )
            whole = parts.tensors(request.version)
            return parts, FullUpdate(self._weights, parts.prove), whole, await anext(whole, None)
        receiver = self._receiver = reopen_receiver(self._receiver, request, **place, held=held)
        if request.kind == "delta":
            changes = await receiver.changes(request.connect[0], request.version, request.base_version)
            return changes, await asyncio.to_thread(held.unchanged, changes)
        update: FullUpdate | AdapterUpdate = FullUpdate(self._weights)
        if request.kind == "adapter":
            update = AdapterUpdate(self._weights, request.peft_config or {})
        tensors = receiver.tensors(request.connect[0], request.version)
        return receiver, update, tensors, await anext(tensors, None)

    async def _load(self, request: UpdateWeightsRequest, received: tuple[Any, ...]) -> list[WorkerReceipt]:
        async with self._loop.between_hops():
            if request.kind == "delta":
                changes, digests = received
                digests |= await self._loop.in_thread(self._weights.apply, changes, request.version)
            else:
                receiver, update, tensors, pair = received
                async with aclosing(tensors):
                    while pair is not None:
                        if pair[1].nbytes < _LARGE_BYTES:
                            update.load(*pair)
                        else:
                            await self._loop.in_thread(update.load, *pair)
                        pair = await anext(tensors, None)
                digests = await self._loop.in_thread(update.finish, receiver.digests)
            for sequence in self._sequences.values():
                sequence.feed(self._version)
            self._failure = None
        return [WorkerReceipt(worker=0, digests=digests)]


def _line(error: BaseException) -> str:
    return error.message if isinstance(error, JackfieldError) else f"{type(error).__name__}: {error}"


def _digest(arrays: dict[str, np.ndarray[Any, Any]]) -> str:
    """Return a digest of arrays, with their names and shapes."""
    found = xxhash.xxh3_128()
    for name, array in arrays.items():
        found.update(f"{name} {array.dtype} {array.shape}\n".encode())
        found.update(array.tobytes())
    return found.hexdigest()
