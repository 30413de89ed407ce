"""A worker that looks at its GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from jackfield.sdk.rpc import Contract, Service


class DeviceReport:
    """A worker that looks at its device as torch would on a machine with GPUs, whose names Ray has given out."""

    def __init__(self, device: str) -> None:
        self.device = device

    async def see(self) -> list[str]:
        """Return its own GPU and then all that it sees, each as NODE/NAME."""
        import ray

        visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        index = int(self.device.removeprefix("cuda:"))
        assert index < len(visible), "invalid device ordinal"
        node = ray.get_runtime_context().get_node_id()
        return [f"{node}/{each}" for each in (visible[index], *visible)]


DEVICE = Contract(DeviceReport)


async def make(worker: dict[str, Any], stack: AsyncExitStack) -> Mapping[str, Service]:
    """Make the worker."""
    return {"DeviceReport": Service(target=DeviceReport(worker["device"]), contract=Contract(DeviceReport))}
