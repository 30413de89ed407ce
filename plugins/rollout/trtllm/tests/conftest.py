"""A started server on an LLM of the tests', and weights for it. It is no evidence of what TensorRT-LLM does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import GenerateRequest, RolloutContext, SamplingParams, ServerInfo
from jackfield.clock import Clock
from jackfield.sdk import structure
from jackfield.weights import Replica, WeightSender, WeightsSynced, WeightSynchronizer
from jackfield.weights.in_process import InProcessCheckpointEngine, InProcessConfig
from jackfield_conformance.support.rollout_model import model_folder
from jackfield_rollout_trtllm.config import Config
from jackfield_rollout_trtllm.server import TrtllmServer

SLOW = 7  #: a prompt that begins with this token is generated as steps are allowed


@attrs.define(eq=False)
class FakeAnswer:
    """What ``generate_async`` returns: outputs with all tokens so far."""

    llm: FakeLlm
    prompt: list[int]
    arguments: dict[str, Any]
    aborted: asyncio.Event = attrs.field(factory=asyncio.Event)

    def abort(self) -> None:
        self.aborted.set()

    async def __aiter__(self) -> AsyncIterator[Any]:
        tokens: list[int] = []
        version = self.llm.version
        for _ in range(self.arguments["max_tokens"]):
            if self.prompt[0] == SLOW:
                waits = [asyncio.ensure_future(each) for each in (self.llm.steps.get(), self.aborted.wait())]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for each in waits:
                    each.cancel()
            if self.aborted.is_set():
                yield self._output(tokens, "cancelled")
                return
            tokens.append(100 + version)
            yield self._output(tokens, "length" if len(tokens) == self.arguments["max_tokens"] else None)

    def _output(self, tokens: list[int], finish: str | None) -> Any:
        entries = [{token: SimpleNamespace(logprob=-float(token - 100), rank=1)} for token in tokens]
        completion = SimpleNamespace(token_ids=list(tokens), logprobs=entries, finish_reason=finish)
        return SimpleNamespace(outputs=[completion])


@attrs.define(eq=False)
class FakeLlm:
    """Draws token ``100 + version`` with log-probability ``-version`` in each place."""

    version: int = 0
    asked: list[FakeAnswer] = attrs.field(factory=list)
    called: list[str] = attrs.field(factory=list)
    memory: list[tuple[str, list[str]]] = attrs.field(factory=list)
    loaded: dict[str, torch.Tensor] = attrs.field(factory=dict)
    steps: asyncio.Queue[None] = attrs.field(factory=asyncio.Queue)
    fails: bool = False
    ended: bool = False

    async def setup_async(self) -> None:
        if self.fails:
            raise RuntimeError("no room")

    def generate_async(self, prompt: list[int], arguments: dict[str, Any], streaming: bool) -> FakeAnswer:
        assert streaming
        self.asked.append(FakeAnswer(self, prompt, arguments))
        return self.asked[-1]

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        assert all(answer.aborted.is_set() or answer.prompt[0] != SLOW for answer in self.asked)
        self.called.append(method)
        if self.fails:
            raise RuntimeError("no such tensor")
        if method == "jackfield_load":
            for file in Path(args[0]).glob("*.safetensors"):
                self.loaded |= load_file(file)
        else:
            assert (None,) == args
            self.version += 1
        return [None]

    async def release(self, tags: list[str]) -> None:
        self.memory.append(("release", tags))

    async def resume(self, tags: list[str]) -> None:
        self.memory.append(("resume", tags))

    def shutdown(self) -> None:
        self.ended = True


class ServerOnFake(TrtllmServer):
    """Has the tests' LLM in the place of TensorRT-LLM's."""

    def __init__(self, config: Config, context: RolloutContext) -> None:
        super().__init__(config, context)
        self.fake = FakeLlm()
        self.info: ServerInfo | None = None

    def _make(self) -> Any:
        return self.fake

    def _sampling_params(self, arguments: dict[str, Any]) -> Any:
        return arguments


Serve = Callable[..., contextlib.AbstractAsyncContextManager[ServerOnFake]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """``async with serve(settings) as server``: started, and stopped at the end."""

    @contextlib.asynccontextmanager
    async def started(fails: bool = False, **settings: Any) -> AsyncIterator[ServerOnFake]:
        weights = tmp_path / "weights"
        weights.mkdir(exist_ok=True)
        context = RolloutContext(model=ModelSpec(path=model_folder()))
        server = ServerOnFake(structure(Config, {"weight_folder": str(weights), **settings}), context)
        server.fake.fails = fails
        server.info = await server.start()
        try:
            yield server
        finally:
            await server.stop()
        assert server.fake.ended
        assert [] == list(weights.iterdir()), "received weights were left behind"

    return started


def make_request(name: str, *prompt: int, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_ids=prompt or (5, 6), sampling=SamplingParams(**sampling))


def weights_of(server: ServerOnFake) -> dict[str, torch.Tensor]:
    """New values for all of the model's tensors."""
    assert server._weight_folder is not None
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in server._weight_folder.expected.items()}


async def sync(server: ServerOnFake, version: int, tensors: Mapping[str, torch.Tensor]) -> WeightsSynced:
    """A real synchronisation, which believes nothing but receipts."""

    def source() -> tuple[Generator[tuple[str, torch.Tensor], None, None], None]:
        return (item for item in tensors.items()), None

    engine = InProcessCheckpointEngine(InProcessConfig(), CheckpointEngineContext(end="sender"))
    assert server.info is not None
    senders, replicas = [WeightSender(engine, source)], [Replica(server, server.info)]
    synchronizer = WeightSynchronizer(senders, replicas, "in_process", Clock(), deadline_seconds=30.0)
    return await synchronizer.sync(version)
