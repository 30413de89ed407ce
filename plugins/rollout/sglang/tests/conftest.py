"""A started server whose SGLang is the fake one, and weights for it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.abc.engine import LoraSpec, ModelSpec
from jackfield.abc.rollout import GenerateRequest, RolloutContext, SamplingParams, ServerInfo
from jackfield.clock import Clock
from jackfield.sdk import structure
from jackfield.weights import Replica, WeightSender, WeightsSynced, WeightSynchronizer
from jackfield.weights.in_process import InProcessCheckpointEngine, InProcessConfig
from jackfield_conformance.support.rollout_model import model_folder
from jackfield_rollout_sglang.config import Config
from jackfield_rollout_sglang.server import SglangProcess, SglangServer

from .fake_sglang import FakeSglang


class ServerOnFake(SglangServer):
    """Starts the fake in this process where SGLang's server would be started."""

    def __init__(self, config: Config, context: RolloutContext) -> None:
        super().__init__(config, context)
        self.fake = FakeSglang()
        self.arguments: list[str] = []
        self.info: ServerInfo | None = None

    def _require_sglang(self) -> None:
        pass

    async def _open(self, sglang: SglangProcess, arguments: list[str]) -> None:
        self.arguments = arguments
        await self.fake.start(int(arguments[arguments.index("--port") + 1]))
        await sglang.connect(10.0)


Serve = Callable[..., contextlib.AbstractAsyncContextManager[ServerOnFake]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """``async with serve(settings) as server``: started, and stopped at the end."""

    @contextlib.asynccontextmanager
    async def started(
        lora: bool = False, folder: str | None = None, router_replay: bool = False, **settings: Any
    ) -> AsyncIterator[ServerOnFake]:
        weights = tmp_path / "weights"
        weights.mkdir(exist_ok=True)
        model = ModelSpec(
            path=folder or model_folder(), lora=LoraSpec(rank=2) if lora else None, router_replay=router_replay
        )
        server = ServerOnFake(
            structure(Config, {"weight_folder": str(weights), **settings}), RolloutContext(model=model)
        )
        server.info = await server.start()
        try:
            yield server
        finally:
            await server.stop()
            await server.fake.close()
        assert [] == list(weights.iterdir()), "received weights were left behind"

    return started


def make_request(name: str, *prompt: int, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_ids=prompt or (5, 6), sampling=SamplingParams(**sampling))


def weights_of(server: ServerOnFake) -> dict[str, torch.Tensor]:
    """New values for all of the model's tensors."""
    assert server._weight_folder is not None
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in server._weight_folder.expected.items()}


async def sync(
    server: ServerOnFake,
    version: int,
    tensors: Mapping[str, torch.Tensor],
    peft_config: Mapping[str, Any] | None = None,
) -> WeightsSynced:
    """A real synchronisation, which believes nothing but receipts."""

    def source() -> tuple[Generator[tuple[str, torch.Tensor], None, None], Mapping[str, Any] | None]:
        return (item for item in tensors.items()), peft_config

    engine = InProcessCheckpointEngine(InProcessConfig(), CheckpointEngineContext(end="sender"))
    assert server.info is not None
    replica = Replica(server, attrs.evolve(server.info))
    synchronizer = WeightSynchronizer(
        [WeightSender(engine, source)],
        [replica],
        "in_process",
        Clock(),
        deadline_seconds=30.0,
    )
    return await synchronizer.sync(version)
