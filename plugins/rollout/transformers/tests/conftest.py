"""A tiny model on disk, servers on it, and a checkpoint engine whose other end is the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from jackfield.abc.checkpoint_engine import CheckpointEngine, CheckpointEngineContext, PrepareResult, Topology
from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import GenerateRequest, RolloutContext, SamplingParams, UpdateWeightsRequest
from jackfield.sdk import receiver
from jackfield_rollout_transformers.config import Config
from jackfield_rollout_transformers.server import TransformersServer

VOCABULARY = 61
END = 1


def make_model(seed: int, **changes: Any) -> Any:
    """A random Qwen3 whose distributions are neither flat nor degenerate."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "eos_token_id": END,
        "pad_token_id": 0,
        "bos_token_id": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.25,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(settings | changes))).eval()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder with a tokenizer: token ``n`` is the word ``wn``, words are joined by spaces."""
    path = str(tmp_path_factory.mktemp("model"))
    make_model(0).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def reference(folder: str) -> Any:
    """The model of ``folder``, loaded and run by the library alone."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def other_model() -> Any:
    """Other weights of the same shapes."""
    return make_model(1)


Serve = Callable[..., contextlib.AbstractAsyncContextManager[TransformersServer]]


@pytest.fixture
def serve(folder: str) -> Serve:
    """``async with serve(config settings) as server``: started, and stopped at the end."""

    @contextlib.asynccontextmanager
    async def started(
        path: str = folder,
        dtype: str = "float32",
        context: Mapping[str, Any] | None = None,
        start: bool = True,
        **settings: Any,
    ) -> AsyncIterator[TransformersServer]:
        server = TransformersServer(
            Config(**settings), RolloutContext(model=ModelSpec(path=path, dtype=dtype), **(context or {}))
        )
        try:
            if start:
                await server.start()
            yield server
        finally:
            await server.stop()

    return started


def make_request(name: object, prompt: tuple[int, ...] = (5, 6, 7), **sampling: Any) -> GenerateRequest:
    """A request of few words; ``minimum_weight_version`` goes to the request, the rest to its sampling."""
    minimum = sampling.pop("minimum_weight_version", None)
    with attrs.validators.disabled():  # as of a caller that does not know the ranges
        return GenerateRequest(
            request_id=str(name),
            prompt_ids=prompt,
            sampling=SamplingParams(**sampling),
            minimum_weight_version=minimum,
        )


@pytest.fixture(name="make_request")
def make_request_fixture() -> Callable[..., GenerateRequest]:
    """See :func:`make_request`."""
    return make_request


@pytest.fixture(name="make_model")
def make_model_fixture() -> Callable[..., Any]:
    """See :func:`make_model`."""
    return make_model


class QueueEngine(CheckpointEngine):
    """The rollout's end of a transfer whose tensors the test puts into ``arguments["queue"]``; None ends it."""

    async def prepare(self) -> PrepareResult:
        return PrepareResult()

    @classmethod
    def build_topology(cls, request: Any) -> Topology:
        return Topology(trainer=(), rollout=())

    async def connect(self, request: Any) -> None:
        self._queue: asyncio.Queue[Any] = request.arguments["queue"]

    async def send_weights(self, weights: Any) -> None:
        raise NotImplementedError

    async def receive_weights(self) -> AsyncIterator[Any]:  # type: ignore[override]
        while (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    async def finalize(self) -> None:
        return


class _Loaded:
    def build(self, settings: Mapping[str, Any], context: CheckpointEngineContext, where: str = "") -> QueueEngine:
        return QueueEngine(settings, context)


@pytest.fixture
def send(monkeypatch: pytest.MonkeyPatch) -> Callable[..., UpdateWeightsRequest]:
    """``send(version, tensors)``: an update request whose tensors lie ready; ``complete=False`` leaves the end out."""
    monkeypatch.setattr(receiver, "load_plugin", lambda kind, name: _Loaded())

    def make(
        version: int, tensors: Mapping[str, Any] | list[Any], complete: bool = True, **fields: Any
    ) -> UpdateWeightsRequest:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        for item in tensors.items() if isinstance(tensors, Mapping) else tensors:
            queue.put_nowait(item)
        if complete:
            queue.put_nowait(None)
        return UpdateWeightsRequest(version=version, checkpoint_engine="queue", connect=({"queue": queue},), **fields)

    return make


def named_weights(model: Any) -> dict[str, torch.Tensor]:
    """What an engine would publish: tied tensors once."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture(name="named_weights")
def named_weights_fixture() -> Callable[[Any], dict[str, torch.Tensor]]:
    """See :func:`named_weights`."""
    return named_weights


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The machine is shared."""
    torch.set_num_threads(1)


@pytest.fixture
def home(tmp_path: Path) -> str:
    """An empty folder."""
    return str(tmp_path)
