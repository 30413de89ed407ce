"""Contract of a rollout server: one asynchronous object per replica.

It takes token ids and returns token ids and log-probabilities; text is never re-tokenised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from numbers import Integral, Real
from typing import Any, ClassVar, Literal

import attrs

from jackfield.abc.engine import Box, ModelSpec
from jackfield.clock import Clock
from jackfield.errors import RolloutError
from jackfield.settings import option


@attrs.frozen(kw_only=True)
class RolloutContext:
    """The context that a replica gets at its construction, with the plugin's config."""

    #: weights are cast to its dtype when they are loaded; ``float8_e4m3fn`` needs the capability ``weights_float8``
    model: ModelSpec
    replica: int = 0
    device: str = "cpu"
    seed: int = 0
    max_model_len: int | None = None  #: prompt and response tokens together; None: the model's own limit
    host: str = "127.0.0.1"  #: address at which servers of the replica listen
    clock: Clock = attrs.field(factory=Clock)
    memory_fraction: float | None = None  #: of each device's memory that this replica may use; None: its setting


def _number(fits: Callable[[Any], bool], kinds: tuple[type, ...] = (int, float, Real)) -> Callable[[Any], bool]:
    return lambda value: not isinstance(value, bool) and isinstance(value, kinds) and fits(value)


def _whole(low: int, high: int = 2**31 - 1) -> Callable[[Any], bool]:
    return _number(lambda value: low <= int(value) <= high, (int, Integral))


def _few(most: int, fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple | list) and len(value) <= most and all(map(fits, value))


#: By name of a setting: its range as text, and a predicate that checks a value.
_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "max_new_tokens": ("1 to 2^31 - 1", _whole(1)),
    "temperature": ("0 (greedy), or 0.01 to 100", _number(lambda value: value == 0 or 0.01 <= value <= 100)),
    "top_p": ("more than 0, at most 1", _number(lambda value: 0 < value <= 1)),
    "top_k": ("0 (off) to 2^31 - 1", _whole(0)),
    "min_p": ("0 to 1", _number(lambda value: 0 <= value <= 1)),
    "seed": ("null, or -2^63 to 2^63 - 1", _whole(-(2**63), 2**63 - 1)),
    "stop_token_ids": ("at most 4096 ids, 0 to 2^31 - 1", _few(4096, _whole(0))),
    "stop": (
        "at most 64 texts that are not empty, of at most 1024 characters",
        _few(64, lambda text: isinstance(text, str) and 0 < len(text) <= 1024),
    ),
    "log_probs": ("processed or raw", lambda value: value in ("processed", "raw")),
}


def _check(_: Any, attribute: Any, value: Any) -> None:
    expected, fits = _RANGES[attribute.name]
    if not fits(value):
        message, where = f"{attribute.name} is out of range", f"sampling.{attribute.name}"
        raise RolloutError(message, code="rollout.request", where=where, expected=expected, found=repr(value)[:200])


def _ranged(default: Any, help: str) -> Any:
    return option(default, help, _check)


@attrs.frozen(kw_only=True)
class SamplingParams:
    """The settings of token sampling, which mean the same on every backend.

    They apply in the order temperature, top-k, top-p, min-p. Every number has a range that each backend supports;
    a value outside of it is refused (``rollout.request``).
    """

    max_new_tokens: int = _ranged(128, "longest response, in tokens")
    temperature: float = _ranged(1.0, "logits are divided by it, 0.01 to 100; 0: greedy")
    top_p: float = _ranged(1.0, "keep the likeliest tokens that together have this probability; 1: all")
    top_k: int = _ranged(0, "keep this many of the likeliest tokens; 0: all")
    min_p: float = _ranged(0.0, "keep tokens of at least this share of the likeliest one's probability; 0: all")
    seed: int | None = _ranged(
        None, "seed of a request; of a run: the base of its requests' seeds; null: the replica's, or the run's seed"
    )
    stop_token_ids: tuple[int, ...] = _ranged((), "tokens that end a response, in addition to the model's own")
    stop: tuple[str, ...] = _ranged((), "texts that end a response; they find its end, and are never tokenised again")
    ignore_eos: bool = option(False, "continue after the model's own end tokens")
    log_probs: Literal["processed", "raw"] = _ranged(
        "processed", "processed: of the distribution that is sampled from; raw: of the logits at temperature 1"
    )


@attrs.frozen(kw_only=True)
class GenerateRequest:
    """A request to generate one sample."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = attrs.field(factory=SamplingParams)
    minimum_weight_version: int | None = None  #: a replica with older weights refuses (``rollout.stale``)
    #: the model's inputs beside tokens, NumPy arrays by name, for a server with the capability ``multi_modal``
    multi_modal_data: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class GenerateChunk:
    """The next tokens of a streamed sample; ``finish_reason`` is set on the last chunk."""

    request_id: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]  #: one per token, natural logarithm
    weight_versions: tuple[int, ...]  #: version of the weights that generated each token
    finish_reason: Literal["stop", "length", "abort"] | None = None


@attrs.frozen(kw_only=True)
class GenerateResult(GenerateChunk):
    """The generated tokens, including the end token."""

    finish_reason: Literal["stop", "length", "abort"]
    #: int16 ``[prompt + response - 1, layers, experts per token]``, the experts that the router of each layer with
    #: experts chose for each token but the last; only with ``ModelSpec.router_replay`` (capability ``router_replay``)
    routed_experts: Any = None


@attrs.frozen(kw_only=True)
class AbortRequest:
    """A request to end generation; each call returns its tokens with ``finish_reason="abort"``."""

    request_ids: tuple[str, ...] = ()  #: empty: all


@attrs.frozen(kw_only=True)
class AbortResult:
    """The running or waiting requests that were ended."""

    request_ids: tuple[str, ...]


@attrs.frozen(kw_only=True)
class PauseRequest:
    """A request to stop decoding until :class:`ResumeRequest`.

    ``keep``: requests are kept and continue at resume; ``wait``: running requests finish first; ``abort``: they end at
    once. New requests wait until resume.
    """

    mode: Literal["keep", "wait", "abort"] = "keep"


@attrs.frozen(kw_only=True)
class PauseResult:
    """The number of requests that are kept during the pause."""

    running: int = 0


@attrs.frozen(kw_only=True)
class ResumeRequest:
    """A request to resume decoding."""


@attrs.frozen(kw_only=True)
class ResumeResult:
    """The number of requests that continue."""

    running: int = 0


@attrs.frozen(kw_only=True)
class SleepRequest:
    """A request to free memory. Level 1 drops the KV cache and moves weights off the device; level 2 drops both."""

    level: Literal[1, 2] = 1


@attrs.frozen(kw_only=True)
class SleepResult:
    """The device memory that was freed."""

    freed_bytes: int = 0


@attrs.frozen(kw_only=True)
class WakeUpRequest:
    """A request to allocate memory again: ``weights``, ``kv_cache`` or both (empty)."""

    tags: tuple[Literal["weights", "kv_cache"], ...] = ()


@attrs.frozen(kw_only=True)
class WakeUpResult:
    """The tags that are awake now."""

    awake: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class UpdateWeightsRequest:
    """A request to receive and load weights. Each inference worker builds its own receiver.

    When the update returns, the next token of every request uses the new weights.
    """

    version: int
    checkpoint_engine: str  #: name of the plugin that moves the tensors
    checkpoint_engine_config: Mapping[str, Any] = attrs.field(factory=dict)
    connect: tuple[Mapping[str, Any], ...] = ()  #: arguments of ``connect``, per inference worker
    first_worker: int = 0  #: rank of this replica's first worker among the workers of all replicas
    total_workers: int = 1  #: workers of all replicas
    kind: Literal["full", "adapter", "delta"] = "full"
    peft_config: Mapping[str, Any] | None = None
    deadline_seconds: float = 600.0
    base_version: int | None = None  #: the version that a delta changes (capability ``weights_delta``)
    deltas_follow: bool = False  #: keep these weights as the base of a delta (capability ``weights_delta``)


@attrs.frozen(kw_only=True)
class WorkerReceipt:
    """The digest (:func:`jackfield.sdk.buckets.digest`) of each tensor that one worker loaded, by name."""

    worker: int
    digests: Mapping[str, str]


@attrs.frozen(kw_only=True)
class WeightReceipt:
    """A replica's proof of the weights that it serves from now on."""

    version: int
    replica: int
    workers: tuple[WorkerReceipt, ...]
    seconds: float = 0.0  #: duration of the whole update
    paused_seconds: float = 0.0  #: the part of it without decoding


@attrs.frozen(kw_only=True)
class ServerInfo:
    """The address and size of a started replica."""

    replica: int
    workers: int = 1  #: inference workers (tensor-parallel ranks), as ``build_topology`` counts them
    openai_base_url: str | None = None
    #: by worker: what it has of each tensor, if it can receive just that; all workers together have each whole tensor
    #: (:func:`jackfield.sdk.slices.reopen_slice_receiver`). Empty: they receive whole tensors. Since ABI 1.1
    weight_layouts: tuple[tuple[Box, ...], ...] = ()


@attrs.frozen(kw_only=True)
class HealthReport:
    """The state of a replica."""

    healthy: bool
    running: int = 0
    waiting: int = 0
    weight_version: int = 0
    detail: str = ""


class BaseRolloutServer(ABC):
    """A replica that generates samples.

    Invariants, each checked by the conformance suite:

    * one log-probability and one weight version per generated token; log-probabilities equal the engine's within
      the tolerance that the manifest declares;
    * a request with a seed yields the same tokens whatever else runs, up to numerical noise;
    * aborting and resuming a request does not change its token budget;
    * after :meth:`update_weights` the next token uses the new weights, and the receipt proves it by digest.
    """

    abi_version: ClassVar[str] = "1.1"

    def __init__(self, config: Any, context: RolloutContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    async def start(self) -> ServerInfo:
        """Load the model and start to serve it as weight version 0."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample. Cancelling the call aborts the request.

        Raise ``rollout.request`` for an invalid request, ``rollout.context-length`` for a prompt that leaves no room
        for a response, ``rollout.failed`` if the model's outputs for this request are not finite (other requests
        continue), ``rollout.stopped``, ``rollout.stale``.
        """

    @abstractmethod
    def generate_stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Generate one sample and yield tokens as they are generated. Closing the iterator aborts it."""

    @abstractmethod
    async def abort(self, request: AbortRequest) -> AbortResult:
        """End requests, which generate no more tokens once it returns."""

    @abstractmethod
    async def pause(self, request: PauseRequest) -> PauseResult:
        """Stop decoding; no forward pass runs once it returns."""

    @abstractmethod
    async def resume(self, request: ResumeRequest) -> ResumeResult:
        """Resume decoding after a pause."""

    @abstractmethod
    async def sleep(self, request: SleepRequest) -> SleepResult:
        """Free memory of the replica, which has to be paused or idle."""

    @abstractmethod
    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        """Allocate the freed memory again."""

    @abstractmethod
    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        """Receive a new version of the weights, load it between two decode steps and acknowledge it.

        After ``weights.transfer``, ``weights.missing`` or ``weights.version`` the replica serves nothing until a later
        update succeeds. ``weights.base`` says that a delta's base version is not held: then nothing has changed, and
        the replica continues to serve.
        """

    @abstractmethod
    async def health(self) -> HealthReport:
        """Report whether the replica can serve, and its load."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop everything that the replica started. Waiting requests fail with ``rollout.stopped``."""
