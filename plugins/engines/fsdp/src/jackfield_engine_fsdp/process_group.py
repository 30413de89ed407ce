"""The process group in which the ranks of all engines of a process meet."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from jackfield.abc.engine import EngineContext
from jackfield.errors import EngineError

_lock = threading.Lock()
_users = 0  # engines of this process that use a group which one of them has made
_ours = False


class Ranks:
    """One engine's hold on the default process group.

    The first engine makes the group unless the process already has one; the last engine that is closed destroys
    it, if an engine made it.

    Raises:
        EngineError: ``engine.state`` when the existing group has another rank or size, ``config.invalid-value``
            when several ranks have no place to meet.
    """

    def __init__(self, context: EngineContext, device: torch.device, timeout: float) -> None:
        _join(context, timeout)
        self._held = True
        self.rank = context.rank
        self.size = context.world_size
        self.device = device
        self.mesh: DeviceMesh = init_device_mesh(device.type, (self.size,), mesh_dim_names=("data",))

    def maximum(self, value: int) -> int:
        """The largest ``value`` over the ranks."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return int(shared.item())

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def barrier(self) -> None:
        """Wait until every rank is here (bounded by the group's timeout)."""
        self.maximum(0)

    def leave(self) -> None:
        """Give up the hold; can be repeated."""
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
                _forget_meshes()


def _forget_meshes() -> None:
    """Clear torch's caches of shardings: by their meshes they would keep the sockets of the group that has ended."""
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
    # both where there are GPUs: an engine on the CPU may be first, and one on a GPU come later
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
