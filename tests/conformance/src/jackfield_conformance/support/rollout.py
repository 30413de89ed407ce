"""For the suite of rollout servers: a tiny model and its log-probabilities in float64, readers, weight updates."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import hashlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Coroutine, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import attrs
import torch
from safetensors.torch import save_file

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, TopologyRequest
from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import (
    BaseRolloutServer,
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
    RolloutContext,
    SamplingParams,
    UpdateWeightsRequest,
    WeightReceipt,
)
from jackfield.errors import JackfieldError
from jackfield.plugins import load_plugin
from jackfield.weights import WeightSender

if TYPE_CHECKING:
    from jackfield_conformance.subject import Subject

PAGE = "docs/plugins/rollout.md#"

VOCABULARY = 64
ENGINE_TOLERANCE = 1e-4  #: of log-probabilities, in float32, where the manifest says they are the engine's
END = 1  #: the model's own end token
LIMIT = 512  #: of the model: prompt and response
PATIENCE_SECONDS = 10.0  #: for what must happen at once
BREATH_BYTES = 1 << 22  #: hashed while a server is given time: longer than a few decode steps of a tiny model
_SLICES = 10
LONG = 300  #: tokens of a request that is not meant to end by itself
PROMPT = (31, 7, 47, 56, 54, 24, 53)

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PAIRS = [_LETTERS[n % 26] + _LETTERS[(n + 1 + n // 26) % 26] for n in range(VOCABULARY - 28)]

T = TypeVar("T")

#: ``float8``: the weights as :func:`_quantise` makes them
Which = Literal["base", "other", "adapted", "base float8", "other float8"]
Weights = Mapping[str, torch.Tensor]

_RANK, _ALPHA = 4, 8.0
#: of :func:`adapter`, in PEFT's terms
PEFT_CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA",
    "r": _RANK,
    "lora_alpha": _ALPHA,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
}
_ADAPTED = tuple(f"model.layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.q_proj", "mlp.down_proj"))


# -- the model -------------------------------------------------------------------------------------------------------


def _new_model(seed: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # kernels of some backends have no smaller heads
        intermediate_size=48,
        max_position_embeddings=LIMIT,
        eos_token_id=END,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.25,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def _tokenizer() -> Any:
    """Letters and some pairs of letters; text has no spaces, so only ids distinguish tokens."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<end>", *_LETTERS, *_PAIRS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in _PAIRS], fuse_unk=False))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


@functools.cache
def model_folder() -> str:
    """A Qwen3 model of 36,128 parameters with a tokenizer, in float32; made once per process."""
    folder = tempfile.mkdtemp(prefix="jackfield-conformance-model-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = _float32("base").config
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    save_file(named_weights("base"), f"{folder}/model.safetensors", metadata={"format": "pt"})
    _tokenizer().save_pretrained(folder)
    return folder


def decode(token_ids: Sequence[int]) -> str:
    """The text of tokens."""
    texts = ["<pad>", "<end>", *_LETTERS, *_PAIRS]
    return "".join(texts[token] for token in token_ids)


@functools.cache
def _float32(which: Which) -> Any:
    return _new_model(1 if which == "other" else 0)


@functools.cache
def _float64(which: Which) -> Any:
    model = _new_model(1 if which.startswith("other") else 0).double()
    if which.endswith("float8"):
        _quantise(model)
    if which == "adapted":
        tensors = adapter()
        for name in _ADAPTED:
            down, up = (tensors[f"base_model.model.{name}.{factor}.weight"].double() for factor in ("lora_A", "lora_B"))
            model.get_submodule(name).weight += (_ALPHA / _RANK) * up @ down
    return model


def _quantise(model: Any) -> None:
    """Weights of linear layers but the output layer in float8_e4m3fn with a scale per tensor, all else in bfloat16."""
    head = model.get_output_embeddings()
    linear = {id(each.weight) for each in model.modules() if isinstance(each, torch.nn.Linear) and each is not head}
    for parameter in model.parameters():
        if id(parameter) in linear:
            scale = parameter.abs().max() / torch.finfo(torch.float8_e4m3fn).max
            parameter.copy_((parameter / scale).to(torch.float8_e4m3fn).double() * scale)
        else:
            parameter.copy_(parameter.bfloat16())


def named_weights(which: Which = "other") -> dict[str, torch.Tensor]:
    """Return what an engine would export: Hugging Face names, tied tensors once."""
    return {name: parameter.detach().clone() for name, parameter in _float32(which).named_parameters()}


def adapted_weights() -> dict[str, torch.Tensor]:
    """The base model's with the adapter merged: two layers of each of the model's have changed."""
    weights = named_weights("base")
    for name, parameter in _float64("adapted").named_parameters():
        if name.removesuffix(".weight") in _ADAPTED:
            weights[name] = parameter.detach().float()
    return weights


def adapter() -> dict[str, torch.Tensor]:
    """The tensors of a LoRA adapter of the base model, under PEFT's names; see :data:`PEFT_CONFIG`."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name in _ADAPTED:
        rows, columns = _float32("base").get_submodule(name).weight.shape
        for factor, shape in (("lora_A", (_RANK, columns)), ("lora_B", (rows, _RANK))):
            tensors[f"base_model.model.{name}.{factor}.weight"] = torch.randn(shape, generator=generator) * 0.2
    return tensors


@functools.lru_cache(maxsize=4096)
def model_logits(which: Which, tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits after each of ``tokens``, float64 ``[T, V]``, of one plain forward pass of the library."""
    with torch.no_grad():
        logits: torch.Tensor = _float64(which)(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@functools.lru_cache(maxsize=256)
def _mixed_logits(old: Which, new: Which, tokens: tuple[int, ...], kept: int) -> torch.Tensor:
    """As :func:`model_logits` of the new weights over the old weights' keys and values of the first ``kept`` tokens."""
    with torch.no_grad():
        first = _float64(old)(torch.tensor([tokens[:kept]]), use_cache=True)
        rest = _float64(new)(torch.tensor([tokens[kept:]]), past_key_values=first.past_key_values, use_cache=True)
    return torch.cat((first.logits[0], rest.logits[0]))


@functools.cache
def prompt_that_ends() -> tuple[int, ...]:
    """A prompt after which greedy decoding meets the end token within a few tokens, but not at once."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(500):
        prompt = tuple(torch.randint(2, VOCABULARY, (5,), generator=generator).tolist())
        tokens = _argmax_path(prompt, 9)
        if END in tokens[2:] and END not in tokens[:2]:
            return prompt
    raise AssertionError("no prompt of the tiny model ends")


def _argmax_path(prompt: tuple[int, ...], count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(model_logits("base", (*prompt, *tokens))[-1].argmax()))
    return tokens


# -- what is expected ------------------------------------------------------------------------------------------------


def tolerance(subject: Subject) -> float:
    """Return how far log-probabilities may be off: fixture key ``log_prob_tolerance``, within what is declared."""
    allowed = float(subject.fixture.get("log_prob_tolerance", ENGINE_TOLERANCE))
    return min(allowed, ENGINE_TOLERANCE) if subject.capabilities.get("engine_log_probs") == "full" else allowed


def log_probs_of(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Log-probabilities ``[V]`` of the distribution that is to be drawn from: temperature, top-k, top-p, min-p."""
    scaled = logits / sampling.temperature
    if sampling.top_k:
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], -torch.inf)
    ordered, order = scaled.softmax(-1).sort(descending=True)
    before = ordered.cumsum(-1) - ordered  # the smallest set of at least top_p: what lies before a token is less
    dropped = (before >= sampling.top_p) & (sampling.top_p < 1)
    dropped |= ordered < sampling.min_p * ordered[0]
    dropped[0] = False
    return scaled.index_fill(0, order[dropped], -torch.inf).log_softmax(-1)


def _acceptable(logits: torch.Tensor, sampling: SamplingParams) -> Iterator[torch.Tensor]:
    """The distributions that rounding at the edge of a filter may give, the exact one first."""
    if sampling.log_probs == "raw":
        yield logits.log_softmax(-1)
        return
    yield log_probs_of(logits, sampling)
    edges = (1 - 1e-5, 1 + 1e-5)
    for one in edges if sampling.top_p < 1 or sampling.min_p > 0 else ():
        for other in edges:
            top_p, min_p = min(sampling.top_p * one, 1.0), sampling.min_p * other
            yield log_probs_of(logits, attrs.evolve(sampling, top_p=top_p, min_p=min_p))


def assert_log_probs(
    subject: Subject,
    sent: GenerateRequest,
    result: GenerateResult,
    which: Which = "base",
    *,
    first: int = 0,
    old: Which | None = None,
) -> None:
    """The log-probabilities from token ``first`` on are those of an independent forward pass in float64.

    With ``old``, the tokens before ``first`` are an older model's, whose keys and values may have been kept.
    """
    tokens = (*sent.prompt_ids, *result.token_ids)
    passes = [model_logits(which, tokens)]
    if old is not None:
        passes.append(_mixed_logits(old, which, tokens, len(sent.prompt_ids) + first - 1))
    worst = [_worst(sent, result, logits, first, tolerance(subject)) for logits in passes]
    assert None in worst, f"request {sent.request_id!r}: {worst[0]}"


def _worst(
    sent: GenerateRequest, result: GenerateResult, logits: torch.Tensor, first: int, allowed: float
) -> str | None:
    """The first log-probability that is off by more than is allowed, in words."""
    begin = len(sent.prompt_ids) - 1
    for place in range(first, len(result.token_ids)):
        token, found = result.token_ids[place], result.log_probs[place]
        expected = (float(each[token]) for each in _acceptable(logits[begin + place], sent.sampling))
        exact = next(expected)
        if abs(found - exact) > allowed and not any(abs(found - value) <= allowed for value in expected):
            return (
                f"token {place} (id {token}) has log-probability {found:.6f}, "
                f"an independent forward pass gives {exact:.6f}"
            )
    return None


def assert_quantised(sent: GenerateRequest, result: GenerateResult, which: Literal["base", "other"]) -> None:
    """Log-probabilities are at most half as far from the model's with weights in float8 as from those without, on the
    average of the tokens: how a server computes beside its weights is its own."""
    tokens = (*sent.prompt_ids, *result.token_ids)
    chosen = torch.tensor(result.token_ids)[:, None]
    found = torch.tensor(result.log_probs, dtype=torch.float64)

    def distance(model: Which) -> float:
        logits = model_logits(model, tokens)[len(sent.prompt_ids) - 1 : -1]
        return float((logits.log_softmax(-1).gather(-1, chosen)[:, 0] - found).abs().mean())

    quantised, exact = distance("base float8" if which == "base" else "other float8"), distance(which)
    assert 2 * quantised <= exact, (
        f"request {sent.request_id!r}: log-probabilities are {quantised:.4f} from those of weights in float8_e4m3fn "
        f"with a scale per tensor, and {exact:.4f} from those of the weights that were sent"
    )


def assert_greedy(sent: GenerateRequest, result: GenerateResult, which: Which = "base", first: int = 0) -> None:
    """Each token is the most probable one, up to rounding."""
    logits = model_logits(which, (*sent.prompt_ids, *result.token_ids))
    for place in range(first, len(result.token_ids)):
        token, row = result.token_ids[place], logits[len(sent.prompt_ids) - 1 + place]
        assert row[token] >= row.max() - 1e-3, (
            f"request {sent.request_id!r}: greedy decoding drew {token} as token {place}, "
            f"the most probable one is {int(row.argmax())}"
        )


# -- servers and requests --------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving(subject: Subject, *, dtype: str = "float32", **context: Any) -> AsyncIterator[BaseRolloutServer]:
    """A started server of the tiny model, stopped at the end."""
    model = ModelSpec(path=model_folder(), dtype=dtype)
    server: BaseRolloutServer = subject.make(RolloutContext(model=model, **context))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def request(
    name: str, prompt: Sequence[int] = PROMPT, *, minimum: int | None = None, **sampling: Any
) -> GenerateRequest:
    """A request; end tokens are ignored unless ``ignore_eos=False`` is said, so that lengths are known."""
    settings = {"ignore_eos": True, **sampling}
    return GenerateRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(**settings),
        minimum_weight_version=minimum,
    )


def greedy(name: str, count: int, prompt: Sequence[int] = PROMPT, **sampling: Any) -> GenerateRequest:
    """A greedy request of ``count`` tokens with raw log-probabilities."""
    return request(name, prompt, temperature=0, max_new_tokens=count, log_probs="raw", **sampling)


@contextlib.contextmanager
def refused(kind: type[JackfieldError], *codes: str, naming: str = "") -> Iterator[None]:
    """The block raises an error of this class, with one of the codes (none: any), whose text holds ``naming``."""
    error: JackfieldError | None = None
    try:
        yield
    except kind as caught:
        error = caught
    assert error is not None, f"nothing was raised where {kind.__name__} {' or '.join(codes)} is due"
    assert not codes or error.code in codes, f"expected {' or '.join(codes)}, found {error.code}: {error}"
    assert naming in str(error), f"the error does not name {naming!r}: {error}"


def spawn(coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task whose error is its awaiter's business; after a failed check it is dropped."""
    task = asyncio.create_task(coroutine, name=name)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


class Reader:
    """Reads a stream as its chunks come."""

    def __init__(self, server: BaseRolloutServer, sent: GenerateRequest) -> None:
        self.sent = sent
        self.chunks: list[GenerateChunk] = []
        self._changed = asyncio.Event()
        self._task = spawn(self._read(server.generate_stream(sent)), f"reader of {sent.request_id}")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All so far."""
        return tuple(token for chunk in self.chunks for token in chunk.token_ids)

    async def at_least(self, count: int) -> None:
        """Wait for so many tokens, or for the end."""
        while len(self.token_ids) < count and not self._task.done():
            self._changed.clear()
            await self._changed.wait()

    async def result(self) -> GenerateResult:
        """Wait for the end; raises what the stream raised."""
        await self._task
        return GenerateResult(
            request_id=self.sent.request_id,
            token_ids=self.token_ids,
            log_probs=tuple(value for chunk in self.chunks for value in chunk.log_probs),
            weight_versions=tuple(version for chunk in self.chunks for version in chunk.weight_versions),
            finish_reason=self.chunks[-1].finish_reason or "length",
        )

    async def _read(self, stream: AsyncIterator[GenerateChunk]) -> None:
        try:
            async for chunk in stream:
                self.chunks.append(chunk)
                self._changed.set()
        finally:
            self._changed.set()


@contextlib.contextmanager
def forward_passes() -> Iterator[list[str]]:
    """The modules that run in this process meanwhile. A server in another process shows none."""
    seen: list[str] = []

    def note(module: torch.nn.Module, _: Any) -> None:
        seen.append(type(module).__name__)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


async def ended(awaitable: Awaitable[T], what: str) -> T:
    """Wait for what must come soon, but not for ever."""
    task = asyncio.ensure_future(awaitable)
    await _wait({task}, PATIENCE_SECONDS)
    if not task.done():
        task.cancel()
        raise AssertionError(f"{what} was waited for, {PATIENCE_SECONDS:g} s, and did not come")
    return await task


async def _wait(tasks: set[asyncio.Future[Any]], seconds: float) -> None:
    """Wait until all are done, one has failed, or time runs out: in slices, so that a machine that stood still for a
    while is not taken for a task that did."""
    for _ in range(_SLICES):
        done, pending = await asyncio.wait(tasks, timeout=seconds / _SLICES, return_when=asyncio.FIRST_EXCEPTION)
        if not pending or any(task.cancelled() or task.exception() is not None for task in done):
            return


async def breathe() -> None:
    """Give tasks and threads the time for a few decode steps of a tiny model."""
    for _ in range(40):
        await asyncio.sleep(0)
    await asyncio.to_thread(lambda: hashlib.sha256(bytes(BREATH_BYTES)).digest())
    for _ in range(10):
        await asyncio.sleep(0)


# -- weights ---------------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Pushed:
    """What came of an update."""

    receipt: WeightReceipt
    digests: Mapping[str, str]  #: of what was sent


def checkpoint_engine(subject: Subject) -> tuple[str, Mapping[str, Any]]:
    """Name and settings of the checkpoint engine that reaches the plugin's workers.

    Fixture keys ``checkpoint_engine`` (default: ``in_process``) and ``checkpoint_engine_config``.
    """
    return subject.fixture.get("checkpoint_engine", "in_process"), subject.fixture.get("checkpoint_engine_config", {})


def _sender(subject: Subject, block_bytes: int) -> WeightSender:
    name, settings = checkpoint_engine(subject)
    context = CheckpointEngineContext(end="sender", deadline_seconds=20.0)
    engine: Any = load_plugin("checkpoint_engine", name).build(settings, context)
    return WeightSender(engine, block_bytes=block_bytes)


def delta_sender(subject: Subject) -> WeightSender:
    """A sender for several updates: what has changed since one of them can be sent."""
    return _sender(subject, 64)


async def push(
    subject: Subject,
    server: BaseRolloutServer,
    version: int,
    weights: Weights | None = None,
    *,
    kind: Literal["full", "adapter", "delta"] = "full",
    breaks_after: int | None = None,
    never_comes: bool = False,
    deadline_seconds: float = 20.0,
    sender: WeightSender | None = None,
    base: int | None = None,
) -> Pushed:
    """Send weights (default: the other model's) to a server of one worker; raises what ``update_weights`` raises.

    Nothing is verified on the way: a receipt is returned as it came.

    Args:
        breaks_after: the sender raises after so many tensors.
        never_comes: the sender does not connect.
        sender: of :func:`delta_sender`, where deltas follow; None: a new one.
        base: of a delta, the version that it changes.
    """
    weights = named_weights() if weights is None else weights
    name, settings = checkpoint_engine(subject)
    cls: Any = load_plugin("checkpoint_engine", name).cls
    deltas_follow = sender is not None
    sender = sender or _sender(subject, 0)
    metadata = (await sender.prepare()).metadata
    topology = cls.build_topology(TopologyRequest(trainer_metadata=(metadata,), rollout_workers=1))
    update = UpdateWeightsRequest(
        version=version,
        checkpoint_engine=name,
        checkpoint_engine_config=settings,
        connect=topology.rollout,
        kind=kind,
        peft_config=PEFT_CONFIG if kind == "adapter" else None,
        deadline_seconds=deadline_seconds,
        base_version=base,
        deltas_follow=deltas_follow,
    )

    async def send() -> dict[str, str]:
        await sender.connect(topology.trainer[0], version)
        return await sender.send(_tensors(weights, breaks_after), base=base if await sender.knows(base or 0) else None)

    updating = spawn(server.update_weights(update), "update")
    sending: asyncio.Task[Any] = spawn(asyncio.Event().wait() if never_comes else send(), "sender")
    try:
        await _wait({updating, sending}, deadline_seconds + PATIENCE_SECONDS)
        if sending.done():
            await _wait({updating}, PATIENCE_SECONDS)
        assert updating.done(), "update_weights did not end, although the sender has, or its deadline has passed"
        receipt = await updating
        return Pushed(receipt, await _digests(sending))
    finally:
        for task in (updating, sending):
            task.cancel()
        await asyncio.gather(updating, sending, return_exceptions=True)
        await sender.finalize()


async def _digests(sending: asyncio.Task[Any]) -> Mapping[str, str]:
    """What was sent; none where the receiver has not taken it, or the sender has failed."""
    await _wait({sending}, 1.0)
    if not sending.done() or sending.cancelled() or sending.exception() is not None:
        return {}
    digests: Mapping[str, str] = sending.result()
    return digests


def _tensors(weights: Weights, breaks_after: int | None) -> Generator[tuple[str, torch.Tensor], None, None]:
    for count, (name, tensor) in enumerate(weights.items()):
        if count == breaks_after:
            raise OSError("the trainer died")
        yield name, tensor
