"""The folder: who comes late gets the newest weights, damage is noticed, only so much stays."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, ConnectRequest, TopologyRequest
from jackfield.errors import DeadlineExceeded, WeightsError
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import WeightReceiver
from jackfield.weights import WeightSender
from jackfield_transport_file.config import Config
from jackfield_transport_file.engine import FileCheckpointEngine
from jackfield_transport_file.storage import abandoned, guarded


def model(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(40, 8, generator=generator)
    return {
        "a": weight,
        "b": weight.T,
        "c": weight.to(torch.bfloat16),
        "d": weight.to(torch.float8_e4m3fn),
        "e": weight[0],
    }


def digests(seed: int) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in model(seed).items()}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(folder=str(tmp_path / "weights"), bucket_bytes=2000, poll_seconds=0.002)


def engine(config: Config, end: Any = "receiver", seconds: float = 20.0) -> FileCheckpointEngine:
    return FileCheckpointEngine(config, CheckpointEngineContext(end=end, deadline_seconds=seconds))


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(main)


async def send(config: Config, version: int) -> None:
    """Publish to nobody: explorers come when they like."""
    sender = WeightSender(engine(config, "sender"))
    request = TopologyRequest(trainer_metadata=((await sender.prepare()).metadata,), rollout_workers=0)
    topology = FileCheckpointEngine.build_topology(request)
    await sender.connect(topology.trainer[0], version)
    await sender.send(pair for pair in model(version).items())
    await sender.finalize()


async def receive(config: Config, found: ConnectRequest) -> dict[str, str]:
    receiver = WeightReceiver(engine(config))
    async with aclosing(receiver.tensors(found.arguments, found.version)) as stream:
        async for _ in stream:
            pass
    return receiver.digests


def test_who_comes_late_gets_the_newest_weights(config: Config) -> None:
    async def main() -> None:
        assert FileCheckpointEngine.newest(config) is None
        for version in (1, 2, 3):
            await send(config, version)
        found = FileCheckpointEngine.newest(config)
        assert found is not None
        assert 3 == found.version
        assert digests(3) == await receive(config, found)

    run(main())


def test_a_watcher_is_told_of_other_weights(config: Config) -> None:
    async def main() -> None:
        first = asyncio.ensure_future(FileCheckpointEngine.newer(config, None, 20))
        await send(config, 1)
        second = asyncio.ensure_future(FileCheckpointEngine.newer(config, await first, 20))
        await send(config, 2)
        assert [1, 2] == [(await first).version, (await second).version]
        with pytest.raises(DeadlineExceeded) as caught:
            await FileCheckpointEngine.newer(config, await second, 0.02)
        assert "deadline" == caught.value.code

    run(main())


def test_so_many_transfers_stay_as_are_kept(config: Config) -> None:
    async def main() -> None:
        for version in (1, 2, 3, 4):
            await send(config, version)

    run(main())
    indexes = Path(config.folder).glob("*/index.json")
    assert [3, 4] == sorted(json.loads(path.read_text())["version"] for path in indexes)


def test_what_is_read_is_not_removed(config: Config) -> None:
    async def main() -> None:
        await send(config, 1)
        found = FileCheckpointEngine.newest(config)
        assert found is not None
        receiver = WeightReceiver(engine(config))
        async with aclosing(receiver.tensors(found.arguments, 1)) as stream:
            await anext(stream)
            for version in (2, 3, 4):
                await send(config, version)
            async for _ in stream:
                pass
        assert digests(1) == receiver.digests
        await send(config, 5)
        with pytest.raises(WeightsError) as caught:
            await receive(config, found)
        assert "weights.transfer" == caught.value.code

    run(main())


def test_the_files_are_what_everybody_reads(config: Config) -> None:
    run(send(config, 1))
    found = FileCheckpointEngine.newest(config)
    assert found is not None
    tensors: dict[str, torch.Tensor] = {}
    for path in (Path(config.folder) / found.arguments["transfer"]).glob("*.safetensors"):
        tensors |= load_file(path)
    assert digests(1) == {name: digest(tensor) for name, tensor in tensors.items()}


def test_a_damaged_file_is_noticed(config: Config) -> None:
    run(send(config, 1))
    found = FileCheckpointEngine.newest(config)
    assert found is not None
    first, *_, last = sorted((Path(config.folder) / found.arguments["transfer"]).glob("*.safetensors"))
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        run(receive(config, found))
    assert "weights.digest" == caught.value.code
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(WeightsError) as caught:
        run(receive(config, found))
    assert "weights.storage" == caught.value.code


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = Config(folder=str(tmp_path / "file" / "weights"))
    with pytest.raises(WeightsError) as caught:
        asyncio.run(engine(config, "sender").prepare())
    assert "weights.storage" == caught.value.code


def test_an_error_of_the_training_engine_is_not_one_of_the_folder(config: Config) -> None:
    async def main() -> None:
        sender = WeightSender(engine(config, "sender"))
        await sender.prepare()
        await sender.connect({"workers": 0}, 1)

        def failing() -> Any:
            yield "a", torch.ones(1000)
            yield "b", torch.ones(1000)
            raise OSError("the trainer's own")

        with pytest.raises(OSError, match="own"):
            await sender.send(failing())
        await sender.finalize()

    run(main())
    assert [] == list(Path(config.folder).glob("*/weights-*"))


def test_no_room_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as caught, guarded(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "weights.storage" == caught.value.code
    assert "bytes that are free" in str(caught.value)


def test_a_transfer_is_in_use_until_its_sender_lets_go(config: Config) -> None:
    async def main() -> None:
        sender = engine(config, "sender")
        folder = Path(config.folder) / (await sender.prepare()).metadata["transfer"]
        assert not abandoned(folder / "sender")
        await sender.finalize()
        assert abandoned(folder / "sender")
        assert not abandoned(folder / "another")  # there is no such file

    run(main())
