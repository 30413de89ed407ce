"""The default process group, which all engines of a process share."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from jackfield.abc.engine import EngineContext
from jackfield.errors import EngineError

_lock = threading.Lock()
_users = 0  # engines of this process that use a group which one of them created
_ours = False


class GroupHold:
    """One engine's hold on the default process group.

    The first engine creates the group by ``make`` unless the process already has one. The last engine that leaves
    destroys it, if an engine created it. A group of another rank or size is refused (``engine.state``).
    """

    def __init__(self, context: EngineContext, make: Callable[[], None]) -> None:
        global _users, _ours
        self._held = False
        with _lock:
            if not dist.is_initialized():
                make()
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
            self._held = True

    def leave(self, before_end: Callable[[], None] = lambda: None) -> None:
        """Release the group; may be called again. ``before_end`` is called if the group is then destroyed."""
        global _users, _ours
        with _lock:
            if not self._held:
                return
            self._held = False
            _users -= 1
            if _users == 0 and _ours:
                _ours = False
                before_end()
                if dist.is_initialized():
                    dist.destroy_process_group()
                # the meshes in torch's sharding caches would keep the ended group's sockets open
                _clear_sharding_prop_cache()
                DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached.cache_clear()
                gc.collect()


def backends() -> str:
    """Return gloo for CPUs and, if there are GPUs, NCCL too: a later engine may be on another device."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def require_meeting_place(context: EngineContext) -> None:
    """Refuse several ranks without ``init_method`` (``config.invalid-value``)."""
    if context.init_method is None and context.world_size > 1:
        raise EngineError(
            f"{context.world_size} ranks have no place to meet",
            code="config.invalid-value",
            where="EngineContext.init_method",
            expected="a torch.distributed URL",
            found=None,
            fix="give every rank the same tcp://HOST:PORT or file:///PATH",
        )


def make_group(context: EngineContext, seconds: float) -> None:
    """Create the default group; its operations fail after ``seconds``."""
    require_meeting_place(context)
    dist.init_process_group(
        backends(),
        init_method=context.init_method,
        store=dist.HashStore() if context.init_method is None else None,  # type: ignore[attr-defined]
        rank=context.rank,
        world_size=context.world_size,
        timeout=timedelta(seconds=seconds),
    )
