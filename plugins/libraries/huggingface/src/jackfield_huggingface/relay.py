"""Base class of rollout servers that relay requests and updates to an inference engine."""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import attrs
import xxhash

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
    UpdateWeightsRequest,
    WeightReceipt,
    WorkerReceipt,
)
from jackfield.errors import JackfieldError, PluginError, RolloutError, WeightsError
from jackfield.sdk.receiver import check_base
from jackfield_huggingface.shaping import Likeliest, PromptToken, ShapedChunk, ShapedRequest, ShapedResult, shaping_of

MEMORY = ("weights", "kv_cache")  #: tags of the memory that sleep frees (:class:`~jackfield.abc.rollout.WakeUpRequest`)
_GRACE_SECONDS = 10.0  #: time for an engine to notice that a transfer is over

_Reason: TypeAlias = Literal["stop", "length", "abort"]
C = TypeVar("C", bound=GenerateChunk)


@attrs.define(eq=False)
class Running:
    """A running request with its tokens so far. The first call that ends it determines the result."""

    request: GenerateRequest
    seed: int = 0  #: the caller's, or one of its own
    name: str = ""  #: unique among all requests of the server
    stream: asyncio.Queue[GenerateChunk | None] | None = None
    ended: asyncio.Future[None] = attrs.Factory(lambda: asyncio.get_running_loop().create_future())
    token_ids: list[int] = attrs.Factory(list)
    log_probs: list[float] = attrs.Factory(list)
    weight_versions: list[int] = attrs.Factory(list)
    routed_experts: Any = None  #: of the result (:class:`~jackfield.abc.rollout.GenerateResult`)
    likeliest: list[Likeliest] = attrs.Factory(list)  #: for each token, if the request asks for it
    prompt: tuple[PromptToken, ...] = ()  #: of the prompt's tokens, likewise
    finish_reason: _Reason | None = None
    reading: asyncio.Task[None] | None = None  #: task that reads the engine's responses

    def append(
        self, token_ids: list[int], log_probs: list[float], version: int, likeliest: Sequence[Likeliest] = ()
    ) -> None:
        """Append tokens that weights of ``version`` generated."""
        self.token_ids += token_ids
        self.likeliest += likeliest
        self.log_probs += log_probs
        self.weight_versions += [version] * len(token_ids)
        if self.stream is not None and token_ids:
            self.stream.put_nowait(self._made(GenerateChunk, ShapedChunk, len(self.token_ids) - len(token_ids), None))

    def end(self, reason: _Reason) -> None:
        """End the request, which has all its tokens."""
        self.finish_reason = reason
        if self.stream is not None:
            self.stream.put_nowait(self._made(GenerateChunk, ShapedChunk, len(self.token_ids), reason))
            self.stream.put_nowait(None)
        if not self.ended.done():
            self.ended.set_result(None)

    def fail(self, error: Exception) -> None:
        """Fail the request: it gets no more tokens."""
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # mark it as retrieved: the caller may be gone
        if self.stream is not None:
            self.stream.put_nowait(None)

    def result(self) -> GenerateResult:
        """Return the result of ``generate``."""
        experts = self.routed_experts
        return self._made(GenerateResult, ShapedResult, 0, self.finish_reason, routed_experts=experts)

    def _made(self, plain: type[C], shaped: type[C], first: int, reason: _Reason | None, **more: Any) -> C:
        names: tuple[str, ...] = ("token_ids", "log_probs", "weight_versions")
        if not isinstance(self.request, ShapedRequest):
            shaped = plain
        else:
            names = (*names, "likeliest")
            more["prompt"] = self.prompt if first == 0 else ()
        tokens = {name: tuple(getattr(self, name)[first:]) for name in names}
        return shaped(request_id=self.request.request_id, finish_reason=reason, **tokens, **more)


def mixed(*numbers: int) -> int:
    """Return 63 bits that each depend on all bits of the numbers, as a seed."""
    return xxhash.xxh3_64_intdigest(repr(numbers).encode()) >> 1


class RelayServer(BaseRolloutServer):
    """A replica that relays requests to an inference engine. A subclass implements the access to the engine.

    A request is in a table from its submission to its end, and one task reads the engine's responses for it. The
    engine, an abort or a failed update ends a request; the first of them determines the result.
    """

    engine_name: ClassVar[str] = "the engine"  #: name in error messages
    takes_arrays: ClassVar[bool] = False  #: whether requests may have ``multi_modal_data``
    shaping: frozenset[str] = frozenset()  #: fields of :class:`~jackfield_huggingface.shaping.Shaping` that it applies
    update_kinds: tuple[str, ...] = ("full",)  #: of :class:`~jackfield.abc.rollout.UpdateWeightsRequest`, supported

    def __init__(self, config: Any, context: RolloutContext) -> None:
        super().__init__(config, context)
        self._clock = context.clock
        self._running: dict[str, Running] = {}
        self._requests = 0
        self._version = 0
        self._update_lock = asyncio.Lock()
        self._paused = self._stopped = self._used = False
        self._held: int | None = None  #: the version to which a delta can be applied
        self._stale: str | None = None
        self._awake = set(MEMORY)
        self._vocabulary = self._max_model_len = 0

    @abstractmethod
    async def _read(self, running: Running) -> None:
        """Read the engine's responses to a request and end it. It is cancelled when no caller waits any more."""

    @abstractmethod
    def _down(self) -> str | None:
        """Return why the engine does not respond (``the server is not running``); None: it does."""

    @abstractmethod
    async def _hold(self, wait: bool = False) -> None:
        """Stop decoding for a pause or an update; with ``wait``, once the requests that have tokens have ended."""

    @abstractmethod
    async def _release(self) -> None:
        """Resume decoding after a pause or an update."""

    @abstractmethod
    async def _receive(self, request: UpdateWeightsRequest) -> Any:
        """Receive an update before decoding stops; :meth:`_load` gets the result."""

    @abstractmethod
    async def _load(self, request: UpdateWeightsRequest, received: Any) -> Sequence[WorkerReceipt]:
        """Load new weights into the stopped engine and drop what was computed with the old ones."""

    @property
    def max_model_len(self) -> int:
        """Return the largest number of tokens of a prompt and its answer; 0: not known before the start."""
        return self._max_model_len

    def _refuse(self, request: GenerateRequest) -> None:
        """Raise if the engine does not support a valid request."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample. Cancelling the call aborts the request."""
        running = self._submit(request)
        try:
            await running.ended
        finally:
            await self._leave(running)
        return running.result()

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Generate one sample and yield tokens as they are generated. Closing the iterator aborts it."""
        chunks: asyncio.Queue[GenerateChunk | None] = asyncio.Queue()
        running = self._submit(request, chunks)
        try:
            while chunk := await chunks.get():
                yield chunk
            await running.ended
        finally:
            await self._leave(running)

    def _submit(self, request: GenerateRequest, stream: asyncio.Queue[GenerateChunk | None] | None = None) -> Running:
        if (refusal := self._refusal()) is not None:
            raise refusal
        self._check(request)
        self._refuse(request)
        name, seed = request.request_id, request.sampling.seed
        self._requests += 1
        if seed is None:
            seed = mixed(self.context.seed, self.context.replica, self._requests)
        running = self._running[name] = Running(request, seed, f"{self._requests}-{name}", stream)
        running.reading = asyncio.create_task(self._read_or_fail(running), name=f"request {name}")
        return running

    def _check(self, request: GenerateRequest) -> None:
        """Raise if the model cannot generate the request, or it is not its turn."""
        name, prompt, wanted = request.request_id, request.prompt_ids, request.minimum_weight_version

        def refusal(found: str, expected: str, code: str = "rollout.request") -> RolloutError:
            message = f"request {name!r} cannot be generated"
            return self._error(message, code, where=name, expected=expected, found=found)

        if not prompt:
            raise refusal("an empty prompt", "at least one token")
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            wrong = next(token for token in prompt if not 0 <= token < self._vocabulary)
            raise refusal(f"token id {wrong}", f"ids from 0 to {self._vocabulary - 1}")
        if len(prompt) >= self._max_model_len:
            expected = f"fewer than max_model_len = {self._max_model_len}"
            raise refusal(f"a prompt of {len(prompt)} tokens", expected, "rollout.context-length")
        shaping = shaping_of(request)
        if unserved := shaping.wanted - self.shaping:
            message = f"{self.engine_name} does not serve {', '.join(sorted(unserved))} here"
            raise PluginError(message, code="plugin.capability", where=min(unserved))
        if strange := [token for token in shaping.logit_bias if not 0 <= token < self._vocabulary]:
            raise refusal(f"a logit_bias of token {strange[0]}", f"ids from 0 to {self._vocabulary - 1}")
        if request.multi_modal_data and not self.takes_arrays:
            raise refusal(f"multi_modal_data: {', '.join(request.multi_modal_data)}", "text alone")
        try:
            attrs.validate(request.sampling)  # the request may come from a process that does not check the ranges
        except RolloutError as error:
            raise refusal(f"{error.message}: {error.found}", str(error.expected)) from error
        if name in self._running:
            raise self._error(f"request {name!r} is running already", "rollout.request")
        if wanted is not None and wanted > self._version:
            message = f"request {name!r} needs newer weights"
            raise self._error(message, "rollout.stale", expected=wanted, found=self._version)

    async def _read_or_fail(self, running: Running) -> None:
        try:
            await self._read(running)
        except Exception as error:
            failure, down, fix = error, self._down(), f"see what {self.engine_name} has printed"
            if down is not None:
                failure = self._error(down, "rollout.stopped", fix=fix)
            elif not isinstance(error, RolloutError | PluginError):
                message = f"{self.engine_name} failed: {type(error).__name__}: {error}"
                failure = self._error(message, "rollout.failed", fix=fix)
            self._running.pop(running.request.request_id, None)
            running.fail(failure)

    def _end(self, running: Running, reason: _Reason) -> None:
        self._running.pop(running.request.request_id, None)
        running.end(reason)

    async def _leave(self, running: Running) -> None:
        """Cancel the task that reads a request's responses; it does nothing if the task has ended."""
        if self._running.get(running.request.request_id) is running:
            del self._running[running.request.request_id]
        reading, running.reading = running.reading, None
        if reading is not None and not reading.done() and reading is not asyncio.current_task():
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def abort(self, request: AbortRequest) -> AbortResult:
        """End requests, which generate no more tokens once it returns."""
        chosen = [self._running[name] for name in request.request_ids or self._running if name in self._running]
        await self._abort(chosen)
        return AbortResult(request_ids=tuple(each.request.request_id for each in chosen))

    async def _abort(self, chosen: Sequence[Running]) -> None:
        for each in chosen:
            self._end(each, "abort")
        await asyncio.gather(*(self._leave(each) for each in chosen))

    async def _fail_all(self) -> None:
        """Fail all unfinished requests with the error that new requests get."""
        chosen = list(self._running.values())
        for each in chosen:
            each.fail(self._refusal() or self._error("the request was given up", "rollout.failed"))
        await asyncio.gather(*(self._leave(each) for each in chosen), return_exceptions=True)

    async def pause(self, request: PauseRequest) -> PauseResult:
        """Stop decoding; no forward pass runs once it returns."""
        self._require_running()
        self._paused = True
        await self._hold(request.mode == "wait")
        if request.mode == "abort":
            await self._abort(self._begun())
        return PauseResult(running=len(self._begun()))

    async def resume(self, request: ResumeRequest) -> ResumeResult:
        """Resume decoding after a pause."""
        self._require_running()
        self._paused = False
        await self._release()
        return ResumeResult(running=len(self._begun()))

    def _begin(self) -> None:
        """Record the model's limits, before the engine is started.

        Raises ``engine.model`` if there is no model, ``rollout.stopped`` for a second start.
        """
        if self._stopped or self._used:
            raise self._error("the server cannot be started twice", "rollout.stopped", fix="make a new server")
        self._used = True
        folder = Path(self.context.model.path)
        try:
            described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            expected = "a Hugging Face folder with config.json, weights and tokenizer"
            message = "there is no model in the folder"
            raise self._error(message, "engine.model", expected=expected, found=str(folder)) from error
        text = {**described, **(described.get("text_config") or {})}
        positions = int(text.get("max_position_embeddings") or self.context.max_model_len or 0)
        self._vocabulary = int(text.get("vocab_size") or 0)
        self._max_model_len = min(self.context.max_model_len or positions, positions)

    async def health(self) -> HealthReport:
        """Report whether the replica can serve, and its load."""
        refusal, begun, asleep = self._refusal(), len(self._begun()), len(self._awake) < len(MEMORY)
        return HealthReport(
            healthy=refusal is None,
            running=begun,
            waiting=len(self._running) - begun,
            weight_version=self._version,
            detail=refusal.message if refusal else "paused" if self._paused else "asleep" if asleep else "",
        )

    def _begun(self) -> list[Running]:
        """Return the requests that have tokens."""
        return [each for each in self._running.values() if each.token_ids]

    def _refusal(self) -> RolloutError | None:
        """Return the error for new requests if nothing can be generated, else None."""
        if (down := self._down()) is not None:
            return self._error(down, "rollout.stopped", fix="start it, or make a new one")
        if self._stale is not None:
            return self._error(self._stale, "rollout.stale", fix="send a full update")
        return None

    def _require_running(self) -> None:
        refusal = self._refusal()
        if refusal is not None and refusal.code == "rollout.stopped":
            raise refusal

    def _error(self, message: str, code: str, **details: Any) -> RolloutError:
        return RolloutError(message, code=code, **{"where": f"replica {self.context.replica}", **details})

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        """Receive a new version, load it between two decode steps and acknowledge it.

        Raise ``weights.transfer``, ``weights.missing`` or ``weights.version``; ``plugin.capability`` for a kind of
        update that the engine does not support. Nothing has changed then, nor for ``weights.base`` (a delta to a
        version that is not held).
        """
        self._require_running()
        replica, expected = f"replica {self.context.replica}", " or ".join(self.update_kinds)
        if request.kind not in self.update_kinds:
            message = f"{self.engine_name} cannot load an update of kind '{request.kind}'"
            raise PluginError(message, code="plugin.capability", where=replica, expected=expected, found=request.kind)
        if request.kind == "delta":
            check_base(self._held, request.base_version)
        # the engine cannot be interrupted: the update continues if its caller is cancelled, and the next one waits
        task = asyncio.create_task(self._update(request), name=f"update to version {request.version}")
        what = f"weights of version {request.version} for {replica}"
        try:
            return await self._clock.wait_for(asyncio.shield(task), request.deadline_seconds + _GRACE_SECONDS, what)
        except BaseException as error:
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            why = error.message if isinstance(error, JackfieldError) else repr(error)
            self._stale = f"the update to version {request.version} failed: {why}"
            await self._fail_all()
            raise

    async def _update(self, request: UpdateWeightsRequest) -> WeightReceipt:
        async with self._update_lock:
            self._require_running()
            began, least = self._clock.time(), f"at least {self._version}"
            if request.version < self._version:
                message = "weights went backwards"
                raise WeightsError(message, code="weights.version", expected=least, found=request.version)
            if "weights" not in self._awake:
                raise WeightsError("the weights are asleep", fix="wake_up(tags=('weights',)) before the update")
            self._held = None
            received = await self._receive(request)
            await self._hold()
            paused = self._clock.time()
            try:
                workers = await self._load(request, received)
                self._version, self._stale = request.version, None
                if request.kind == "delta" or (request.kind == "full" and request.deltas_follow):
                    self._held = request.version
            finally:
                if not self._paused and self._down() is None:
                    await self._release()
            seconds, paused = self._clock.time() - began, self._clock.time() - paused
        replica, version, receipts = self.context.replica, request.version, tuple(workers)
        return WeightReceipt(version=version, replica=replica, workers=receipts, seconds=seconds, paused_seconds=paused)
