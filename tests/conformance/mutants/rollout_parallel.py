"""A server with two workers that have parts of tensors, and mutants of it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import attrs
from torch import Tensor

from jackfield.abc.engine import Box
from jackfield.abc.rollout import ServerInfo, UpdateWeightsRequest, WeightReceipt, WorkerReceipt
from jackfield.errors import WeightsError
from jackfield.sdk.slices import SliceReceiver, part_of, reopen_slice_receiver
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
        self.proofs: list[dict[str, str]] = [{}, {}]
        receipt = await super().update_weights(request)
        workers = tuple(WorkerReceipt(worker=number, digests=proofs) for number, proofs in enumerate(self.proofs))
        return attrs.evolve(receipt, workers=workers)

    async def receive(self, request: UpdateWeightsRequest) -> dict[str, str]:
        if request.version < self.version:
            raise WeightsError("weights go backwards", code="weights.version")
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.parts(request, worker)) for worker in range(2)]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        for worker, task in enumerate(tasks):  # at once: no step sees some of them
            self.load_parts(worker, *task.result())
        return {}

    async def parts(self, request: UpdateWeightsRequest, worker: int) -> tuple[SliceReceiver, dict[str, Tensor]]:
        receiver = reopen_slice_receiver(None, request, self.layouts[worker], worker)
        async with aclosing(receiver.tensors(request.version)) as tensors:
            return receiver, {name: tensor.clone() async for name, tensor in tensors}

    def load_parts(self, worker: int, receiver: SliceReceiver, parts: dict[str, Tensor]) -> None:
        for box in self.layouts[worker]:
            place = part_of(self.model.state[box.name], self.wholes[box.name], box)
            self.copy_part(worker, place, parts[box.name])
            self.proofs[worker] |= receiver.prove(box.name, place)

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
