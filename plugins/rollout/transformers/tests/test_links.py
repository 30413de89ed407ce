"""Weights that come from every rank of the engine, each of which has rows of each tensor."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest
import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.abc.engine import Box
from jackfield.clock import Clock
from jackfield.plugins import load_plugin
from jackfield.weights import Replica, WeightSender, WeightSynchronizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_two_ranks_are_put_together(
    serve: Any, named_weights: Any, other_model: Any, dtype: torch.dtype
) -> None:
    """Every piece is proved, where it lies in a parameter or, if it was cast, as it came; again in a second version."""
    weights = {name: tensor.to(dtype) for name, tensor in named_weights(other_model).items()}

    def sender(rank: int = 0, source: Any = None) -> WeightSender:
        def rows() -> Generator[tuple[Box, torch.Tensor], None, None]:
            for name, tensor in weights.items():
                part, shape = tensor.chunk(2)[rank], tuple(tensor.shape)
                start = (rank * len(tensor.chunk(2)[0]), *[0] * (len(shape) - 1))
                yield Box(name=name, shape=shape, start=start, length=tuple(part.shape)), part

        context = CheckpointEngineContext(end="sender", deadline_seconds=20.0)
        engine: Any = load_plugin("checkpoint_engine", "in_process").build({}, context)
        return WeightSender(engine, source, local=rows, make=lambda source: sender(source=source))

    async def main() -> None:
        async with serve(start=False) as server:
            replica, senders = Replica(server, await server.start()), [sender(0), sender(1)]
            synchronizer = WeightSynchronizer(senders, [replica], "in_process", Clock(), deadline_seconds=20.0)
            for version in (1, 2):
                for tensor in weights.values():
                    tensor.mul_(version)
                report = await synchronizer.sync(version)  # compares every digest, and raises
            assert {"0-0", "1-0"} == report.link_bytes.keys()
            assert sum(tensor.nbytes for tensor in weights.values()) == report.sent_bytes
            for name, parameter in server._model.module.named_parameters():
                assert torch.equal(weights[name].float(), parameter)

    asyncio.run(main())
