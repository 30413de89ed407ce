"""The ranks of an engine: their process group, and the random numbers of each."""

from __future__ import annotations

import base64
import functools
import itertools
import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from jackfield.abc.engine import EngineContext
from jackfield_engine_fsdp.mesh import Mesh
from jackfield_engine_fsdp.presence import Presence
from jackfield_engine_fsdp.sizes import Sizes
from jackfield_engines.groups import GroupHold, backends, require_meeting_place

_made = itertools.count(1)  # engines that this process has made; ranks make them in the same order


def device_of(context: EngineContext) -> torch.device:
    """Return this rank's device; ``cuda`` without a number means that of its local rank.

    On a GPU, the process gets no more than ``memory_fraction`` of its memory.
    """
    device = torch.device(context.device)
    if device.type == "cuda":
        device = torch.device("cuda", context.local_rank if device.index is None else device.index)
        torch.cuda.set_device(device)
        if context.memory_fraction is not None:  # it has a process of its own then
            torch.cuda.set_per_process_memory_fraction(context.memory_fraction, device)
    return device


class Ranks:
    """One engine's hold on the default process group.

    The first engine creates the group unless the process already has one. The last engine that is closed destroys
    it, if an engine created it. A group of another rank or size is refused (``engine.state``), and so are several ranks
    without ``init_method`` (``config.invalid-value``).
    """

    def __init__(self, context: EngineContext, device: torch.device, timeout: float, sizes: Sizes) -> None:
        self._hold = GroupHold(context, functools.partial(_make_group, context, timeout))
        self._presence = _presence(context, timeout)
        self.rank = context.rank
        self.size = context.world_size
        self.device = device
        try:
            with self.during("making the process groups"):
                self.mesh = Mesh.make(sizes, device, self._presence.operation)
        except BaseException:
            self.leave()
            raise

    def during(self, operation: str) -> AbstractContextManager[None]:
        """Run a collective operation; if it fails because of other ranks, name them (``engine.absent``)."""
        return self._presence.during(operation)

    def maximum(self, value: int, operation: str = "an agreement of all ranks") -> int:
        """Return the largest ``value`` of all ranks."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.int64, device=self.device)
        with self.during(operation):
            dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return int(shared.item())

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks, in place."""
        if self.size > 1:
            with self.during("a sum over all ranks"):
                dist.all_reduce(value)
        return value

    def barrier(self) -> None:
        """Wait until every rank is here (bounded by the group's timeout)."""
        self.maximum(0)

    def leave(self) -> None:
        """Release the group; may be called again."""
        self._hold.leave()


def _presence(context: EngineContext, timeout: float) -> Presence:
    store = PrefixStore(f"jackfield/{next(_made)}", _get_default_store())
    return Presence(store, context.rank, context.world_size, timeout)


def _make_group(context: EngineContext, timeout: float) -> None:
    require_meeting_place(context)
    rank, size = context.rank, context.world_size
    store = _store(context.init_method, rank, size, timedelta(seconds=timeout))
    presence = Presence(PrefixStore("jackfield", store), rank, size, timeout)
    presence.join()
    with presence.during("making the process group"):
        dist.init_process_group(backends(), store=store, rank=rank, world_size=size, timeout=presence.operation)


def _store(url: str | None, rank: int, size: int, timeout: timedelta) -> Store:
    """Return the store of a meeting place, without waiting for other ranks than the one that has it."""
    if url is None:
        return HashStore()
    parts = urlsplit(url)
    if parts.scheme == "tcp" and parts.hostname and parts.port:
        return TCPStore(parts.hostname, parts.port, size, rank == 0, timeout, wait_for_workers=False)
    store, _, _ = next(rendezvous(url, rank, size, timeout=timeout))
    meeting: Store = store
    return meeting


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
