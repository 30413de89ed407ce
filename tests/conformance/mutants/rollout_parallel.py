"""A server with two workers that have parts of tensors, and mutants of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

import attrs
from torch import Tensor

from jackfield.abc.engine import Box
from jackfield.abc.rollout import ServerInfo, UpdateWeightsRequest, WeightReceipt, WorkerReceipt
from jackfield.errors import WeightsError
from jackfield.sdk.slices import part_of, reopen_slice_receiver
from mutants.rollout_server import ReferenceServer


def part(whole: Box, worker: int) -> Box:
    """Half of the rows of a matrix; a vector is whole in both."""
    rows = whole.shape[0]
    if len(whole.shape) == 1:
        return whole
    start, end = rows * worker // 2, rows * (worker + 1) // 2
    return attrs.evolve(whole, start=(start, 0), length=(end - start, whole.shape[1]))


class TwoWorkers(ReferenceServer):
    """Its workers are tasks, which load what they have into one model."""

    async def start(self) -> ServerInfo:
        info = await super().start()
        self.wholes = {box.name: box for box in self.layout}
        self.layouts = tuple(tuple(part(box, worker) for box in self.layout) for worker in range(2))
        return attrs.evolve(info, workers=2, weight_layouts=self.layouts)

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        self.proofs: list[Mapping[str, str]] = [{}, {}]
        receipt = await super().update_weights(request)
        workers = tuple(WorkerReceipt(worker=number, digests=proofs) for number, proofs in enumerate(self.proofs))
        return attrs.evolve(receipt, workers=workers)

    async def receive(self, request: UpdateWeightsRequest) -> dict[str, str]:
        if request.version < self.version:
            raise WeightsError("weights go backwards", code="weights.version")
        try:
            async with asyncio.TaskGroup() as group:
                for worker in range(2):
                    group.create_task(self.load_parts(request, worker))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return {}

    async def load_parts(self, request: UpdateWeightsRequest, worker: int) -> None:
        receiver = reopen_slice_receiver(None, request, self.layouts[worker], worker)
        boxes, proofs = {box.name: box for box in self.layouts[worker]}, dict[str, str]()
        async with aclosing(receiver.tensors(request.version)) as tensors:
            async for name, tensor in tensors:
                place = part_of(self.model.state[name], self.wholes[name], boxes[name])
                self.copy_part(worker, place, tensor)
                proofs |= receiver.prove(name, place)
        self.proofs[worker] = proofs

    def copy_part(self, worker: int, place: Tensor, tensor: Tensor) -> None:
        place.copy_(tensor)


class LoadsOneWorkerOnly(TwoWorkers):
    def copy_part(self, worker: int, place: Tensor, tensor: Tensor) -> None:
        if worker == 0:
            place.copy_(tensor)


class LacksARow(TwoWorkers):
    async def start(self) -> ServerInfo:
        info = await super().start()
        name = "model.layers.0.self_attn.q_proj.weight"
        less = [
            attrs.evolve(box, length=(box.length[0] - 1, box.length[1])) if box.name == name else box
            for box in self.layouts[1]
        ]
        self.layouts = self.layouts[0], tuple(less)
        return attrs.evolve(info, weight_layouts=self.layouts)


class SignsForOneWorker(TwoWorkers):
    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        receipt = await super().update_weights(request)
        return attrs.evolve(receipt, workers=receipt.workers[:1])
