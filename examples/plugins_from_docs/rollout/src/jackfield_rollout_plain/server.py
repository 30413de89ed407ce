"""A rollout server without a cache: each token is one forward pass over everything before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Literal, TypeVar
from zlib import crc32

import attrs
import torch
from transformers import AutoModelForCausalLM

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
from jackfield.errors import PluginError, RolloutError, WeightsError
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import open_receiver
from jackfield_rollout_plain.config import Config
from jackfield_rollout_plain.sampling import draw

T = TypeVar("T")


@attrs.define(eq=False)
class _Sequence:
    """A request on its way."""

    request: GenerateRequest
    generator: torch.Generator
    limit: int
    stops: frozenset[int]
    admitted: bool = False  #: has begun to decode
    token_ids: list[int] = attrs.Factory(list)
    log_probs: list[float] = attrs.Factory(list)
    versions: list[int] = attrs.Factory(list)
    finish_reason: Literal["stop", "length", "abort"] | None = None

    def append(self, token: int, log_prob: float, version: int) -> None:
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        if token in self.stops:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.limit:
            self.finish_reason = "length"


class PlainServer(BaseRolloutServer):
    """One condition guards everything: whoever holds it knows that no forward pass runs and no weight changes."""

    def __init__(self, config: Config, context: RolloutContext) -> None:
        super().__init__(config, context)
        self._clock = context.clock
        self._changed = asyncio.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"plain-rollout-{context.replica}")
        self._sequences: dict[str, _Sequence] = {}
        self._model: Any = None
        self._shapes: dict[str, torch.Size] = {}
        self._awake = {"weights", "kv_cache"}
        self._paused = self._draining = self._stopped = False
        self._stale: str | None = None  #: why nothing may be generated until an update succeeds
        self._version = 0
        self._requests = 0

    # ---- life

    async def start(self) -> ServerInfo:
        """Load the model; version 0."""
        if self.context.device != "cpu":
            raise PluginError("the rollout 'plain' does not have 'cuda'", code="plugin.capability")
        spec = self.context.model
        try:
            self._model = await self._in_thread(
                lambda: AutoModelForCausalLM.from_pretrained(
                    spec.path, dtype=getattr(torch, spec.dtype), local_files_only=True
                ).eval()
            )
        except Exception as error:
            raise self._error(f"the model cannot be loaded: {error}", "engine.model") from error
        self._shapes = {name: parameter.shape for name, parameter in self._model.named_parameters()}
        return ServerInfo(replica=self.context.replica, workers=1)

    async def stop(self) -> None:
        """Fail what is unfinished, and end the thread."""
        if self._stopped:
            return
        self._stopped = True
        async with self._changed:
            self._changed.notify_all()
        await self._in_thread(lambda: None)  # a pass whose caller was cancelled may still be running
        self._thread.shutdown()

    async def health(self) -> HealthReport:
        """The load, and why nothing can be generated, if so."""
        refusal = self._refusal()
        running = sum(sequence.admitted for sequence in self._sequences.values())
        return HealthReport(
            healthy=refusal is None,
            running=running,
            waiting=len(self._sequences) - running,
            weight_version=self._version,
            detail=refusal.message if refusal else "",
        )

    # ---- requests

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate to the end. When the call is cancelled, the sequence is forgotten."""
        sequence = self._admit(request)
        async with aclosing(self._decode(sequence)) as steps:
            async for _ in steps:
                pass
        assert sequence.finish_reason is not None
        return GenerateResult(
            request_id=request.request_id,
            token_ids=tuple(sequence.token_ids),
            log_probs=tuple(sequence.log_probs),
            weight_versions=tuple(sequence.versions),
            finish_reason=sequence.finish_reason,
        )

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Generate and yield each token."""
        sequence, sent = self._admit(request), 0
        async with aclosing(self._decode(sequence)) as steps:
            async for _ in steps:
                yield GenerateChunk(
                    request_id=request.request_id,
                    token_ids=tuple(sequence.token_ids[sent:]),
                    log_probs=tuple(sequence.log_probs[sent:]),
                    weight_versions=tuple(sequence.versions[sent:]),
                    finish_reason=sequence.finish_reason,
                )
                sent = len(sequence.token_ids)

    def _admit(self, request: GenerateRequest) -> _Sequence:
        refusal = self._refusal()
        if refusal is not None:
            raise refusal
        self._check(request)
        sampling, config = request.sampling, self._model.config
        ends = self._model.generation_config.eos_token_id or config.eos_token_id
        own = set() if sampling.ignore_eos or ends is None else {ends} if isinstance(ends, int) else set(ends)
        seed: object = sampling.seed
        if seed is None:
            seed = f"{self.context.seed}/{self.context.replica}/{self._requests}"
            self._requests += 1
        sequence = _Sequence(
            request=request,
            generator=torch.Generator().manual_seed(crc32(f"{seed}".encode())),  # torch looks at 32 bits only
            limit=min(sampling.max_new_tokens, self._max_model_len - len(request.prompt_ids)),
            stops=frozenset(own | set(sampling.stop_token_ids)),
        )
        self._sequences[request.request_id] = sequence
        return sequence

    def _check(self, request: GenerateRequest) -> None:
        """Refuse what cannot be generated, rather than ignore it."""
        vocabulary, sampling = self._model.config.vocab_size, request.sampling
        try:
            attrs.validate(sampling)  # it may come from a process that has not looked at the ranges
        except RolloutError as error:
            message = f"request {request.request_id!r} cannot be generated: {error.message}"
            raise self._error(message, "rollout.request", error.expected) from error
        for fits, expected in (
            (len(request.prompt_ids) > 0, "a prompt"),
            (all(0 <= token < vocabulary for token in request.prompt_ids), f"token ids below {vocabulary}"),
            (len(request.prompt_ids) < self._max_model_len, f"fewer than {self._max_model_len} prompt tokens"),
            (request.request_id not in self._sequences, "a request_id that is not running"),
            (not sampling.stop, "no stop strings (capability stop_strings)"),
            (not request.multi_modal_data, "no multi_modal_data (capability multi_modal)"),
        ):
            if not fits:
                raise self._error(f"request {request.request_id!r} cannot be generated", "rollout.request", expected)
        wanted = request.minimum_weight_version
        if wanted is not None and wanted > self._version:
            raise self._error("the weights are too old", "rollout.stale", f"version {wanted}, not {self._version}")

    async def _decode(self, sequence: _Sequence) -> AsyncGenerator[None, None]:
        """Yields after each token; when it is aborted, once more without one."""
        ended = False
        try:
            while not ended:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._may_step(sequence))
                    refusal = self._refusal()
                    if refusal is not None:
                        raise refusal
                    if sequence.finish_reason is None:
                        sequence.admitted = True
                        token, log_prob = await self._in_thread(lambda: self._next(sequence))
                        sequence.append(token, log_prob, self._version)
                ended = sequence.finish_reason is not None
                yield
        finally:
            async with self._changed:
                self._forget(sequence)

    def _forget(self, sequence: _Sequence) -> None:
        if self._sequences.get(sequence.request.request_id) is sequence:
            del self._sequences[sequence.request.request_id]
        self._changed.notify_all()  # a pause may wait for the last one

    def _may_step(self, sequence: _Sequence) -> bool:
        if sequence.finish_reason is not None or self._refusal() is not None:
            return True
        admitted = sequence.admitted or not self._draining
        return admitted and not self._paused and len(self._awake) == 2

    @torch.inference_mode()
    def _next(self, sequence: _Sequence) -> tuple[int, float]:
        ids = torch.tensor([[*sequence.request.prompt_ids, *sequence.token_ids]])
        logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
        return draw(logits, sequence.request.sampling, sequence.generator)

    async def abort(self, request: AbortRequest) -> AbortResult:
        """End requests: they are forgotten here, and whoever waits for one hears of it."""
        async with self._changed:
            names = [name for name in request.request_ids or tuple(self._sequences) if name in self._sequences]
            self._abort(names)
        return AbortResult(request_ids=tuple(names))

    def _abort(self, names: list[str]) -> None:
        for name in names:
            self._sequences[name].finish_reason = "abort"
            self._forget(self._sequences[name])

    # ---- pausing and memory

    async def pause(self, request: PauseRequest) -> PauseResult:
        """Stop decoding."""
        async with self._changed:
            if request.mode == "wait":
                self._draining = True
                await self._changed.wait_for(lambda: not self._draining or not self._running())
                if not self._draining:  # resumed in the meantime
                    return PauseResult(running=len(self._running()))
            self._paused, self._draining = True, False
            if request.mode == "abort":
                self._abort(self._running())
            await self._in_thread(lambda: None)  # a pass whose caller was cancelled may still be running
        return PauseResult(running=0 if request.mode == "abort" else len(self._running()))

    def _running(self) -> list[str]:
        return [name for name, sequence in self._sequences.items() if sequence.admitted]

    async def resume(self, request: ResumeRequest) -> ResumeResult:
        """Go on."""
        async with self._changed:
            self._paused = self._draining = False
            self._changed.notify_all()
        return ResumeResult(running=len(self._running()))

    async def sleep(self, request: SleepRequest) -> SleepResult:
        """Level 1 has nothing to give back here: there is no cache. Level 2 gives the weights back."""
        async with self._changed:
            if not self._paused and self._sequences:
                raise self._error("the server is decoding", "rollout.request", "a pause before sleep")
            freed = 0
            if request.level == 2:
                self._stale = "the weights were given back by sleep(level=2)"
                for parameter in self._model.parameters():
                    freed += parameter.nbytes
                    parameter.data = parameter.data.new_empty(0)
            self._awake.clear()
        return SleepResult(freed_bytes=freed)

    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        """Take memory again; after level 2 its contents come with the next full update."""
        async with self._changed:
            tags = request.tags or ("weights", "kv_cache")
            if "weights" in tags:
                for name, parameter in self._model.named_parameters():
                    if parameter.shape != self._shapes[name]:
                        parameter.data = torch.zeros(self._shapes[name], dtype=parameter.dtype)
            self._awake.update(tags)
            self._changed.notify_all()
        return WakeUpResult(awake=tuple(sorted(self._awake)))

    # ---- weights

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        """Load a full set of weights between two steps. After a failure nothing is served until an update succeeds."""
        if request.kind != "full":
            raise PluginError(f"the rollout 'plain' cannot load {request.kind!r} weights", code="plugin.capability")
        if request.version < self._version:
            raise WeightsError("weights went backwards", code="weights.version", found=request.version)
        began = self._clock.time()
        what = f"weights of version {request.version} for replica {self.context.replica}"
        try:
            async with self._changed:
                digests = await self._clock.wait_for(self._receive(request), request.deadline_seconds, what)
                self._version, self._stale = request.version, None
        except BaseException as error:
            self._stale = f"the update to version {request.version} failed: {error}"
            raise
        finally:
            async with self._changed:
                self._changed.notify_all()
        seconds = self._clock.time() - began
        return WeightReceipt(
            version=request.version,
            replica=self.context.replica,
            workers=(WorkerReceipt(worker=0, digests=digests),),
            seconds=seconds,
            paused_seconds=seconds,
        )

    async def _receive(self, request: UpdateWeightsRequest) -> dict[str, str]:
        """Copy each tensor into its place; digests of what lies there afterwards."""
        receiver = open_receiver(request, host=self.context.host)
        targets = self._model.state_dict(keep_vars=True)
        digests: dict[str, str] = {}
        async with aclosing(receiver.tensors(request.connect[0], request.version)) as tensors:
            async for name, tensor in tensors:
                if name not in targets or targets[name].shape != tensor.shape:
                    raise WeightsError(f"the model has no place for tensor {name!r}", code="weights.missing")
                targets[name].data.copy_(tensor)
                same = targets[name].dtype == tensor.dtype
                digests[name] = digest(targets[name].data) if same else receiver.digests[name]
        arrived = {id(targets[name]) for name in digests}
        missing = [name for name, parameter in self._model.named_parameters() if id(parameter) not in arrived]
        if missing:
            raise WeightsError(f"parameters did not arrive: {', '.join(missing[:4])}", code="weights.missing")
        return digests

    # ---- helpers

    @property
    def _max_model_len(self) -> int:
        own = int(self._model.config.max_position_embeddings)
        return own if self.context.max_model_len is None else min(own, self.context.max_model_len)

    def _refusal(self) -> RolloutError | None:
        if self._stopped or self._model is None:
            return self._error("the server is not running", "rollout.stopped")
        return None if self._stale is None else self._error(self._stale, "rollout.stale", "a full update")

    def _error(self, message: str, code: str, expected: str | None = None) -> RolloutError:
        return RolloutError(message, code=code, where=f"replica {self.context.replica}", expected=expected)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
