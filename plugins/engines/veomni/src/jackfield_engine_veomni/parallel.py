"""The ranks of an engine: their process group, and VeOmni's parallel state over it."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from veomni.distributed.parallel_state import (
    ParallelState,
    clear_parallel_state,
    init_parallel_state,
    use_parallel_state,
)

from jackfield.abc.engine import EngineContext, EngineLayout
from jackfield_engine_veomni.config import Config
from jackfield_engine_veomni.sizes import data_parallel_sizes
from jackfield_engines.groups import GroupHold, make_group


class Ranks:
    """One engine's hold on the default process group, and its parallel state.

    The first engine creates the group unless the process already has one. The last engine that is closed destroys
    it, if an engine created it. A group of another rank or size is refused (``engine.state``), and so are several ranks
    without ``init_method`` and sizes that do not divide (``config.invalid-value``).
    """

    def __init__(self, context: EngineContext, config: Config, device: torch.device) -> None:
        data, shard = data_parallel_sizes(config, context.world_size)
        self._hold = GroupHold(context, functools.partial(make_group, context, config.collective_timeout))
        self.rank, self.size, self.device = context.rank, context.world_size, device
        self.sequence_size, self.expert_size = config.sequence_parallel, config.expert_parallel
        try:
            with _quiet():
                self.state: ParallelState = init_parallel_state(
                    dp_size=data,
                    dp_replicate_size=data // shard,
                    dp_shard_size=shard,
                    ulysses_size=config.sequence_parallel,
                    extra_parallel_sizes=(config.expert_parallel,),
                    device_type=device.type,
                    name=None,  # engines of one process may differ, and each enters its own
                )
        except BaseException:
            self.leave()
            raise
        self.layout = EngineLayout(
            data_parallel_rank=self.rank // self.sequence_size,  # ranks of a sequence are neighbours in VeOmni's mesh
            data_parallel_size=data,
            is_output_rank=self.rank % self.sequence_size == 0,
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have VeOmni's functions use this engine's parallel state inside the block."""
        with _quiet(), use_parallel_state(self.state):
            yield

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
        self.__dict__.pop("state", None)
        self._hold.leave(clear_parallel_state)


@contextmanager
def _quiet() -> Iterator[None]:
    """Let VeOmni log errors alone inside the block: it writes its progress to standard output.

    It also slices flattened meshes, of which this version of torch warns.
    """
    logger = logging.getLogger("veomni")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)
            yield
    finally:
        logger.setLevel(level)
