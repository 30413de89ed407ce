"""The plugin through the door that everybody uses: manifest, settings, the in-process checkpoint engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import pytest
import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import PauseRequest, ResumeRequest, RolloutContext, ServerInfo
from jackfield.clock import Clock
from jackfield.errors import ConfigError, WeightsError
from jackfield.plugins import load_plugin
from jackfield.weights import Replica, WeightSender, WeightSynchronizer
from jackfield_testing import refused


def build(folder: str, replica: int = 0, **settings: Any) -> Any:
    context = RolloutContext(model=ModelSpec(path=folder), replica=replica)
    return load_plugin("rollout", "transformers").build(settings, context)


def test_settings_are_checked(folder: str) -> None:
    """A misspelt key and a value out of range are refused."""
    with refused("config.unknown-key", "max_batch_size"):
        build(folder, max_batchsize=3)
    with pytest.raises(ConfigError):
        build(folder, max_batch_size=0)


def test_the_package_and_its_settings_need_no_torch() -> None:
    """Listing plugins and validating a configuration stay light."""
    script = (
        "import sys, jackfield_rollout_transformers, jackfield_rollout_transformers.config;"
        "sys.exit(int('torch' in sys.modules or 'transformers' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def synchronizer(source: Any, servers: list[Any], bucket_bytes: int) -> WeightSynchronizer:
    plugin = load_plugin("checkpoint_engine", "in_process")
    settings = {"bucket_bytes": bucket_bytes}
    engine: Any = plugin.build(settings, CheckpointEngineContext(end="sender"))
    sender = WeightSender(engine, source)
    return WeightSynchronizer(
        [sender],
        [Replica(server, ServerInfo(replica=server.context.replica)) for server in servers],
        "in_process",
        Clock(),
        settings=settings,
        deadline_seconds=30,
    )


@pytest.mark.parametrize("bucket_bytes", [0, 4096])
def test_two_replicas_follow_a_trainer(folder: str, make_request: Any, other_model: Any, bucket_bytes: int) -> None:
    """Through the core's synchroniser, while both generate: receipts are accepted, tokens change weights mid-flight."""

    def source() -> tuple[Generator[tuple[str, torch.Tensor], None, None], None]:
        return ((name, parameter.detach()) for name, parameter in other_model.named_parameters()), None

    async def main() -> None:
        servers = [build(folder, replica) for replica in range(2)]
        for server in servers:
            await server.start()
        sync = synchronizer(source, servers, bucket_bytes)
        streams = [
            server.generate_stream(make_request("a", seed=1, max_new_tokens=40, ignore_eos=True)) for server in servers
        ]
        for stream in streams:
            await anext(stream)
        report = await sync.sync(3)
        assert [receipt.replica for receipt in report.receipts] == [0, 1]
        for stream in streams:
            versions = [version async for chunk in stream for version in chunk.weight_versions]
            assert versions == sorted(versions)
            assert versions[-1] == 3
        results = [await server.generate(make_request("b", seed=1, max_new_tokens=10)) for server in servers]
        assert results[0] == results[1]
        held = dict(servers[1]._model.module.named_parameters())
        for name, parameter in other_model.named_parameters():
            assert torch.equal(parameter, held[name])
        for server in servers:
            await server.stop()

    asyncio.run(main())


def test_a_trainer_that_breaks_off(folder: str, make_request: Any, other_model: Any) -> None:
    """Half the tensors, then an error: the sync fails, the replica is stale, and the next sync heals it."""
    failing = [True]

    def source() -> tuple[Generator[tuple[str, torch.Tensor], None, None], None]:
        def tensors() -> Generator[tuple[str, torch.Tensor], None, None]:
            for count, (name, parameter) in enumerate(other_model.named_parameters()):
                if failing[0] and count == 5:
                    raise OSError("the trainer died")
                yield name, parameter.detach()

        return tensors(), None

    async def main() -> None:
        server = build(folder)
        await server.start()
        sync = synchronizer(source, [server], 0)
        with pytest.raises(WeightsError) as caught:
            await sync.sync(1)
        assert "weights.transfer" == caught.value.code
        assert not (await server.health()).healthy
        failing[0] = False
        await server.pause(PauseRequest())
        await sync.sync(1)
        await server.resume(ResumeRequest())
        assert (await server.generate(make_request("a", max_new_tokens=1))).weight_versions == (1,)
        await server.stop()

    asyncio.run(main())
