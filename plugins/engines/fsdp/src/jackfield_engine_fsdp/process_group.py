"""The ranks of an engine: their process group, and the random numbers of each."""

from __future__ import annotations

import base64
import gc
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from jackfield.abc.engine import EngineContext
from jackfield.errors import EngineError

_lock = threading.Lock()
_users = 0  # engines of this process that use a group which one of them created
_ours = False


class Ranks:
    """One engine's hold on the default process group.

    The first engine creates the group unless the process already has one. The last engine that is closed destroys
    it, if an engine created it. A group of another rank or size is refused (``engine.state``), and so are several ranks
    without ``init_method`` (``config.invalid-value``).
    """

    def __init__(self, context: EngineContext, device: torch.device, timeout: float) -> None:
        _join(context, timeout)
        self._held = True
        self.rank = context.rank
        self.size = context.world_size
        self.device = device
        self.mesh: DeviceMesh = init_device_mesh(device.type, (self.size,), mesh_dim_names=("data",))

    def maximum(self, value: int) -> int:
        """Return the largest ``value`` of all ranks."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return int(shared.item())

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def barrier(self) -> None:
        """Wait until every rank is here (bounded by the group's timeout)."""
        self.maximum(0)

    def leave(self) -> None:
        """Release the group; may be called again."""
        global _users, _ours
        with _lock:
            if not self._held:
                return
            self._held = False
            _users -= 1
            if _users == 0 and _ours:
                _ours = False
                if dist.is_initialized():
                    dist.destroy_process_group()
                # the meshes in torch's sharding caches would keep the ended group's sockets open
                _clear_sharding_prop_cache()
                DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached.cache_clear()
                gc.collect()


def _join(context: EngineContext, timeout: float) -> None:
    global _users, _ours
    with _lock:
        if not dist.is_initialized():
            _make_group(context, timeout)
            _ours = True
        found, expected = (dist.get_rank(), dist.get_world_size()), (context.rank, context.world_size)
        if found != expected:
            raise EngineError(
                "the process group of this process has another rank or size",
                code="engine.state",
                where="EngineContext.rank, EngineContext.world_size",
                expected="rank {} of {}".format(*expected),
                found="rank {} of {}".format(*found),
                fix="give all engines of one process the same rank and world size",
            )
        _users += 1


def _make_group(context: EngineContext, timeout: float) -> None:
    # both backends if there are GPUs: the first engine may be on the CPU, and a later one on a GPU
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    deadline = timedelta(seconds=timeout)
    rank, size = context.rank, context.world_size
    if context.init_method is None:
        if size > 1:
            raise EngineError(
                f"{size} ranks have no place to meet",
                code="config.invalid-value",
                where="EngineContext.init_method",
                expected="a torch.distributed URL",
                found=None,
                fix="give every rank the same tcp://HOST:PORT or file:///PATH",
            )
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=deadline)
    else:
        dist.init_process_group(backend, init_method=context.init_method, rank=rank, world_size=size, timeout=deadline)


class RandomStreams:
    """The states of torch's, numpy's and Python's generators, swapped in while the engine computes.

    So two engines in one process, or an engine and a sampler, do not disturb each other, and the engine's checkpoint is
    complete.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        outside = self._read()
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        self._inside = self._read()
        self._write(outside)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw random numbers from this engine's streams inside the block."""
        outside = self._read()
        self._write(self._inside)
        try:
            yield
        finally:
            self._inside = self._read()
            self._write(outside)

    def state(self) -> dict[str, Any]:
        """Return the streams as JSON-ready values."""
        inside = self._inside
        kind, keys, position, has_gauss, gauss = inside["numpy"]
        version, words, next_gauss = inside["python"]
        return {
            "torch": _encode(inside["torch"]),
            "accelerator": None if inside["accelerator"] is None else _encode(inside["accelerator"]),
            "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
            "python": [version, list(words), next_gauss],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore streams from :meth:`state`."""
        kind, keys, position, has_gauss, gauss = state["numpy"]
        version, words, next_gauss = state["python"]
        accelerator = state["accelerator"]
        if self._inside["accelerator"] is None or accelerator is None:
            accelerator = self._inside["accelerator"]
        else:
            accelerator = _decode(accelerator)
        self._inside = {
            "torch": _decode(state["torch"]),
            "accelerator": accelerator,
            "numpy": (kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss),
            "python": (version, tuple(words), next_gauss),
        }

    def _read(self) -> dict[str, Any]:
        accelerator = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return {
            "torch": torch.get_rng_state(),
            "accelerator": accelerator,
            "numpy": np.random.get_state(),
            "python": random.getstate(),
        }

    def _write(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        if state["accelerator"] is not None:
            torch.cuda.set_rng_state(state["accelerator"], self._device)
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
