"""A small correct rollout server: one request after the other, a whole forward pass for every token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Literal

import attrs
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.abc.engine import Box
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
    SamplingParams,
    ServerInfo,
    SleepRequest,
    SleepResult,
    UpdateWeightsRequest,
    WakeUpRequest,
    WakeUpResult,
    WeightReceipt,
    WorkerReceipt,
)
from jackfield.clock import Clock
from jackfield.errors import JackfieldError, RolloutError, WeightsError
from jackfield.plugins import load_plugin
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import HeldWeights, WeightReceiver, check_base
from jackfield.sdk.slices import SliceReceiver, reopen_slice_receiver
from jackfield_openai import EndpointConfig
from jackfield_openai.endpoint import OpenAIEndpoint


@attrs.frozen(kw_only=True)
class Config:
    """Whether there is an address beside it."""

    openai: EndpointConfig | None = None


_LIBRARY: dict[str, Any] = {}
_STATES: dict[str, dict[str, Tensor]] = {}
_LOGITS: dict[tuple[str, tuple[int, ...]], Tensor] = {}


class Model(nn.Module):
    """The library's model with weights of its own. Logits are remembered by weights and tokens: mutants repeat them."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        if folder not in _LIBRARY:
            config = AutoConfig.from_pretrained(folder)
            _LIBRARY[folder] = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
            _STATES[folder] = load_file(f"{folder}/model.safetensors")
        self.state = {name: tensor.clone() for name, tensor in _STATES[folder].items()}
        self.library = [_LIBRARY[folder]]
        self.settings = _LIBRARY[folder].config
        self.name = folder

    def seal(self) -> None:
        """Note which weights these are."""
        self.name = ".".join(digest(tensor) for tensor in self.state.values())

    def forward(self, tokens: tuple[int, ...]) -> Tensor:
        """Logits of the next token, float64 ``[V]``."""
        key = self.name, tokens
        if key not in _LOGITS:
            arguments = {"input_ids": torch.tensor([tokens]), "use_cache": False}
            with torch.no_grad():
                output = torch.func.functional_call(self.library[0], self.state, (), arguments)
            _LOGITS[key] = output.logits[0, -1].double()
        return _LOGITS[key]


@attrs.define(eq=False)
class Job:
    """A request and what it has so far."""

    request: GenerateRequest
    seed: int
    tokens: list[int] = attrs.Factory(list)
    log_probs: list[float] = attrs.Factory(list)
    versions: list[int] = attrs.Factory(list)
    chunks: asyncio.Queue[GenerateChunk | None] = attrs.Factory(asyncio.Queue)
    reason: Literal["stop", "length", "abort"] | None = None
    error: JackfieldError | None = None
    ended: asyncio.Event = attrs.Factory(asyncio.Event)


class ReferenceServer(BaseRolloutServer):
    """Between two steps, which never suspend, callers change what they like."""

    config: Config
    context: RolloutContext

    def __init__(self, config: Config, context: RolloutContext) -> None:
        super().__init__(config, context)
        self.model: Any = None
        self.jobs: dict[str, Job] = {}
        self.admitted: set[str] = set()
        self.version = 0
        self.count = 0
        self.paused = self.draining = self.stopped = False
        self.awake = {"weights", "kv_cache"}
        self.stale: str | None = None
        self.work = asyncio.Event()
        self.drained = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.endpoint: OpenAIEndpoint | None = None
        self.held = HeldWeights()

    async def start(self) -> ServerInfo:
        try:
            self.model = self.open_model()
        except OSError as error:
            raise RolloutError(f"there is no model in {self.context.model.path}", code="engine.model") from error
        if self.float8:
            for name, tensor in self.model.state.items():
                tensor.copy_(self.cast(name, tensor))
            self.model.seal()
        self.task = asyncio.create_task(self.serve(), name="decode loop")
        state = self.model.state.items()
        shapes = ((name, tuple(each.shape)) for name, each in state)
        self.layout = tuple(
            Box(name=name, shape=shape, start=(0,) * len(shape), length=shape) for name, shape in shapes
        )
        url = await self.listen()
        return ServerInfo(replica=self.context.replica, openai_base_url=url, weight_layouts=(self.layout,))

    def open_model(self) -> Any:
        return Model(self.context.model.path)

    async def listen(self) -> str | None:
        if self.config.openai is None:
            return None
        self.endpoint = OpenAIEndpoint(self, self.config.openai)
        return await self.endpoint.start()

    async def close_address(self) -> None:
        if self.endpoint is not None:
            await self.endpoint.close()

    async def stop(self) -> None:
        self.stopped = True
        await self.close_address()
        for job in list(self.jobs.values()):
            self.fail(job, self.stopped_error())
        self.drained.set()
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    async def health(self) -> HealthReport:
        return HealthReport(
            healthy=self.refusal() is None,
            running=len(self.admitted),
            waiting=len(self.jobs) - len(self.admitted),
            weight_version=self.version,
        )

    def stopped_error(self) -> RolloutError:
        return RolloutError("the server is not running", code="rollout.stopped")

    def refusal(self) -> RolloutError | None:
        if self.stopped or self.model is None:
            return self.stopped_error()
        return RolloutError(self.stale, code="rollout.stale") if self.stale else None

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        job = self.submit(request)
        try:
            await job.ended.wait()
        finally:
            self.drop(job)
        return self.result(job)

    def result(self, job: Job) -> GenerateResult:
        if job.error is not None:
            raise job.error
        assert job.reason is not None
        return GenerateResult(
            request_id=job.request.request_id,
            token_ids=tuple(job.tokens),
            log_probs=tuple(job.log_probs),
            weight_versions=tuple(job.versions),
            finish_reason=job.reason,
        )

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        job = self.submit(request)
        try:
            while chunk := await job.chunks.get():
                yield chunk
        finally:
            self.close_stream(job)
        if job.error is not None:
            raise job.error

    def close_stream(self, job: Job) -> None:
        self.drop(job)

    def submit(self, request: GenerateRequest) -> Job:
        refusal = self.refusal()
        if refusal is not None:
            raise refusal
        self.check(request)
        if request.minimum_weight_version is not None and request.minimum_weight_version > self.version:
            raise RolloutError(f"{request.request_id!r} needs newer weights", code="rollout.stale")
        job = Job(request, self.seed_of(request.sampling))
        self.jobs[request.request_id] = job
        self.work.set()
        return job

    def seed_of(self, sampling: SamplingParams) -> int:
        if sampling.seed is not None:
            return sampling.seed
        self.count += 1
        return hash((self.context.seed, self.context.replica, self.count))

    def check(self, request: GenerateRequest) -> None:
        prompt, name = request.prompt_ids, request.request_id
        vocabulary = self.model.settings.vocab_size
        if not prompt or len(prompt) >= self.limit:
            self.refuse(name, f"a prompt of {len(prompt)} tokens")
        if any(not 0 <= token < vocabulary for token in prompt):
            self.refuse(name, "ids out of the vocabulary")
        if not self.in_range(request.sampling):
            self.refuse(name, f"{request.sampling}")
        if name in self.jobs:
            self.refuse(name, "an id that runs")
        if request.multi_modal_data:
            self.refuse(name, "inputs beside tokens")

    def refuse(self, name: str, found: str) -> None:
        raise RolloutError(f"request {name!r} cannot be generated", code="rollout.request", found=found)

    def in_range(self, sampling: SamplingParams) -> bool:
        try:
            attrs.validate(sampling)
        except RolloutError:
            return False
        return True

    @property
    def limit(self) -> int:
        own: int = self.model.settings.max_position_embeddings
        return min(own, self.context.max_model_len or own)

    async def serve(self) -> None:
        while True:
            await self.work.wait()
            self.work.clear()
            while self.runnable():
                for job in self.batch():
                    self.step(job)
                await asyncio.sleep(0)

    def runnable(self) -> bool:
        return not self.paused and self.stale is None and len(self.awake) == 2 and bool(self.batch())

    def batch(self) -> list[Job]:
        return [job for name, job in self.jobs.items() if not self.draining or name in self.admitted]

    def step(self, job: Job) -> None:
        self.admitted.add(job.request.request_id)
        token, log_prob = self.draw(job, self.logits(job))
        job.tokens.append(token)
        job.log_probs.append(log_prob)
        job.versions.append(self.version)
        job.reason = self.reason(job)
        self.emit(job)
        if job.reason is not None:
            self.end(job)

    def logits(self, job: Job) -> Tensor:
        logits: Tensor = self.model((*self.prompt(job.request), *job.tokens))
        return logits

    def prompt(self, request: GenerateRequest) -> tuple[int, ...]:
        return request.prompt_ids

    def draw(self, job: Job, logits: Tensor) -> tuple[int, float]:
        sampling = job.request.sampling
        raw = logits.log_softmax(-1)
        if sampling.temperature == 0:
            token = int(logits.argmax())
            return token, float(raw[token])
        processed = self.processed(logits, sampling)
        token = self.invert(processed.exp(), self.uniform(job))
        return token, float((raw if sampling.log_probs == "raw" else processed)[token])

    def invert(self, probabilities: Tensor, uniform: float) -> int:
        cumulative = probabilities.cumsum(-1)
        return int(torch.searchsorted(cumulative, cumulative[-1:] * uniform, right=True))

    def uniform(self, job: Job) -> float:
        return random.Random(f"{job.seed} {len(job.tokens)}").random()

    def processed(self, logits: Tensor, sampling: SamplingParams) -> Tensor:
        logits = logits / sampling.temperature
        if sampling.top_k:
            logits = self.top_k(logits, sampling.top_k)
        if sampling.top_p < 1:
            logits = self.top_p(logits, sampling.top_p)
        if sampling.min_p:
            logits = self.min_p(logits, sampling.min_p)
        return logits.log_softmax(-1)

    def top_k(self, logits: Tensor, k: int) -> Tensor:
        return logits.masked_fill(logits < logits.topk(min(k, len(logits))).values[-1], -torch.inf)

    def top_p(self, logits: Tensor, p: float) -> Tensor:
        ordered, order = logits.softmax(-1).sort(descending=True)
        return logits.index_fill(0, order[ordered.cumsum(-1) - ordered >= p], -torch.inf)

    def min_p(self, logits: Tensor, p: float) -> Tensor:
        probabilities = logits.softmax(-1)
        return logits.masked_fill(probabilities < p * probabilities.max(), -torch.inf)

    def reason(self, job: Job) -> Literal["stop", "length"] | None:
        sampling, token = job.request.sampling, job.tokens[-1]
        if token in sampling.stop_token_ids or (token == self.model.settings.eos_token_id and not sampling.ignore_eos):
            return "stop"
        if sampling.stop and any(string in self.text(job.tokens) for string in sampling.stop):
            return "stop"
        return "length" if len(job.tokens) >= self.budget(job) else None

    def budget(self, job: Job) -> int:
        return min(job.request.sampling.max_new_tokens, self.limit - len(job.request.prompt_ids))

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer().decode(tokens))

    def tokenizer(self) -> Any:
        key = f"tokenizer {self.context.model.path}"
        if key not in _LIBRARY:
            from transformers import AutoTokenizer

            _LIBRARY[key] = AutoTokenizer.from_pretrained(self.context.model.path)
        return _LIBRARY[key]

    def emit(self, job: Job) -> None:
        """The newest token, to whoever streams."""
        place = len(job.tokens) - 1
        job.chunks.put_nowait(self.chunk(job, place))

    def chunk(self, job: Job, first: int) -> GenerateChunk:
        return GenerateChunk(
            request_id=job.request.request_id,
            token_ids=tuple(job.tokens[first:]),
            log_probs=tuple(job.log_probs[first:]),
            weight_versions=tuple(job.versions[first:]),
            finish_reason=job.reason,
        )

    def end(self, job: Job) -> None:
        self.drop(job)
        job.chunks.put_nowait(None)
        job.ended.set()

    def fail(self, job: Job, error: JackfieldError) -> None:
        job.error = error
        self.end(job)

    def drop(self, job: Job) -> None:
        """Forget a job; no effect on one that has ended."""
        name = job.request.request_id
        if self.jobs.get(name) is job:
            del self.jobs[name]
            self.admitted.discard(name)
        if not self.admitted:
            self.drained.set()

    async def abort(self, request: AbortRequest) -> AbortResult:
        names = [name for name in request.request_ids or list(self.jobs) if name in self.jobs]
        for name in names:
            self.end_early(self.jobs[name])
        return AbortResult(request_ids=tuple(names))

    def end_early(self, job: Job) -> None:
        job.reason = "abort"
        job.chunks.put_nowait(self.chunk(job, len(job.tokens)))
        self.end(job)

    async def pause(self, request: PauseRequest) -> PauseResult:
        if request.mode == "wait" and self.admitted and not self.paused:
            self.draining = True
            self.drained.clear()
            await self.drained.wait()
            self.draining = False
        self.paused = True
        if request.mode == "abort":
            await self.abort_running()
        return PauseResult(running=len(self.admitted))

    async def abort_running(self) -> None:
        for name in list(self.admitted):
            self.end_early(self.jobs[name])

    async def resume(self, request: ResumeRequest) -> ResumeResult:
        self.paused = False
        self.work.set()
        return ResumeResult(running=len(self.admitted))

    async def sleep(self, request: SleepRequest) -> SleepResult:
        if self.jobs and not self.paused:
            raise RolloutError("requests run", code="rollout.request", fix="pause first")
        self.awake = set()
        if request.level == 2:
            self.lose_weights()
            self.stale = "the weights were given back"
        return SleepResult()

    def lose_weights(self) -> None:
        for tensor in self.model.state.values():
            tensor.zero_()
        self.model.seal()

    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        self.awake |= set(request.tags or ("weights", "kv_cache"))
        self.work.set()
        return WakeUpResult(awake=tuple(sorted(self.awake)))

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        if request.kind == "delta":
            self.check_base(request)
        clock = Clock()
        began = clock.time()
        try:
            digests = await clock.wait_for(self.receive(request), request.deadline_seconds, "the new weights")
        except BaseException as error:
            self.become_stale(f"the update to version {request.version} failed: {error}")
            raise
        self.enter(request)
        workers = (WorkerReceipt(worker=0, digests=digests),)
        return WeightReceipt(
            version=request.version, replica=self.context.replica, workers=workers, seconds=clock.time() - began
        )

    def enter(self, request: UpdateWeightsRequest) -> None:
        self.model.seal()
        self.version = request.version
        self.stale = None
        self.work.set()

    def become_stale(self, reason: str) -> None:
        self.held.forget()
        self.stale = reason
        for job in list(self.jobs.values()):
            self.fail(job, RolloutError(reason, code="rollout.stale"))

    async def receive(self, request: UpdateWeightsRequest) -> dict[str, str]:
        if request.version < self.version:
            raise WeightsError("weights go backwards", code="weights.version")
        if "links" in request.connect[0]:
            self.held.forget()
            return await self.receive_parts(reopen_slice_receiver(None, request, self.layout), request)
        context = CheckpointEngineContext(end="receiver", deadline_seconds=request.deadline_seconds)
        plugin = load_plugin("checkpoint_engine", request.checkpoint_engine)
        engine: Any = plugin.build(request.checkpoint_engine_config, context)
        if request.kind == "delta":
            return await self.receive_delta(WeightReceiver(engine, self.held), request)
        self.held.forget()
        receiver = WeightReceiver(engine, self.held if request.deltas_follow else None)
        received: dict[str, Tensor] = {}
        async with aclosing(receiver.tensors(request.connect[0], request.version)) as tensors:
            async for name, tensor in tensors:
                received[name] = tensor.clone()
        load: Callable[..., dict[str, str]] = self.load_adapter if request.kind == "adapter" else self.load
        return load(received, request)

    async def receive_parts(self, receiver: SliceReceiver, request: UpdateWeightsRequest) -> dict[str, str]:
        async with aclosing(receiver.tensors(request.version)) as tensors:
            self.load({name: tensor.clone() async for name, tensor in tensors}, request)
        state = self.model.state.items()
        proofs = {label: found for name, tensor in state for label, found in receiver.prove(name, tensor).items()}
        return receiver.digests if self.float8 else proofs

    def check_base(self, request: UpdateWeightsRequest) -> None:
        check_base(self.held.version, request.base_version)

    async def receive_delta(self, receiver: WeightReceiver, request: UpdateWeightsRequest) -> dict[str, str]:
        changes = await receiver.changes(request.connect[0], request.version, request.base_version)
        digests = self.held.unchanged(changes)
        for name, tensor in self.held.apply(changes, request.version, digests):
            self.copy(self.model.state[name], tensor)
        return digests

    def load(self, received: dict[str, Tensor], request: UpdateWeightsRequest) -> dict[str, str]:
        state = self.model.state
        self.check_names(received, state)
        for name, tensor in received.items():
            if tensor.shape != state[name].shape:
                raise WeightsError(f"{name} has the shape {tuple(tensor.shape)}")
        for name, tensor in received.items():
            self.copy(state[name], self.cast(name, tensor))
        self.bases: dict[str, Tensor] = {}
        return self.digests(received)

    def digests(self, received: dict[str, Tensor]) -> dict[str, str]:
        return {name: digest(tensor if self.float8 else self.model.state[name]) for name, tensor in received.items()}

    @property
    def float8(self) -> bool:
        return self.context.model.dtype == "float8_e4m3fn"

    def cast(self, name: str, tensor: Tensor) -> Tensor:
        """As it is held: of a float8 server, weights of the linear layers are rounded."""
        if not self.float8 or not name.endswith("_proj.weight"):
            return tensor
        scale = self.float8_scale(tensor)
        return (tensor / scale).to(torch.float8_e4m3fn).float() * scale

    def float8_scale(self, tensor: Tensor) -> Tensor:
        return tensor.abs().max() / torch.finfo(torch.float8_e4m3fn).max

    def copy(self, target: Tensor, tensor: Tensor) -> None:
        target.copy_(tensor)

    def check_names(self, received: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        missing, unknown = sorted(state.keys() - received.keys()), sorted(received.keys() - state.keys())
        if missing:
            raise WeightsError(f"parameters did not arrive: {missing}", code="weights.missing")
        if unknown:
            raise WeightsError(f"there are no such parameters: {unknown}", code="weights.missing")

    def load_adapter(self, received: dict[str, Tensor], request: UpdateWeightsRequest) -> dict[str, str]:
        self.bases = getattr(self, "bases", {})
        config = request.peft_config or {}
        for name, up in received.items():
            if not name.endswith(".lora_B.weight"):
                continue
            target = name.removeprefix("base_model.model.").replace(".lora_B", "")
            base = self.bases.setdefault(target, self.model.state[target].clone())
            down = received[name.replace("lora_B", "lora_A")]
            self.model.state[target].copy_(base + self.scale(config) * up @ down)
        return {name: digest(tensor) for name, tensor in received.items()}

    def scale(self, config: Any) -> float:
        return float(config["lora_alpha"]) / float(config["r"])
