"""The ranks of an engine: the default process group, and Megatron-Core's groups, which are one per process."""

from __future__ import annotations

import gc
import math
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from jackfield.abc.engine import EngineContext
from jackfield.errors import EngineError
from jackfield_engine_megatron.architecture import invalid
from jackfield_engine_megatron.config import Config
from jackfield_engine_megatron.quiet import quiet

with quiet(imports=True):
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

_lock = threading.Lock()
_users = 0  # engines of this process
_ours = False  # whether an engine made the default group
_sizes: tuple[int, ...] | None = None  # of Megatron's groups


class Ranks:
    """One engine's hold on the process groups. The last engine that is closed destroys what engines have made.

    All engines of a process have the same sizes of parallelism (``engine.state``).
    """

    def __init__(self, config: Config, context: EngineContext, device: torch.device) -> None:
        self.device, self.rank, self.size = device, context.rank, context.world_size
        _join(config, context)
        self._held = True
        state = parallel_state
        self.tensor: Any = state.get_tensor_model_parallel_group()
        self.pipeline: Any = state.get_pipeline_model_parallel_group()
        self.context: Any = state.get_context_parallel_group()
        self.expert: Any = state.get_expert_model_parallel_group()
        self.data: Any = state.get_data_parallel_group(with_context_parallel=True)
        self.expert_data: Any = state.get_expert_data_parallel_group()
        self.data_rank = int(state.get_data_parallel_rank())
        self.data_size = int(state.get_data_parallel_world_size())

    @property
    def is_last_stage(self) -> bool:
        """Return whether this rank has the output layer."""
        return bool(self.pipeline.rank() == self.pipeline.size() - 1)

    def maximum(self, value: int) -> int:
        """Return the largest ``value`` of all ranks."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return int(shared.item())

    def sum(self, value: torch.Tensor, group: Any = None) -> torch.Tensor:
        """Sum a tensor over a group's ranks, in place; over all without a group."""
        if (self.size if group is None else group.size()) > 1:
            dist.all_reduce(value, group=group)
        return value

    def barrier(self) -> None:
        """Wait until every rank is here (bounded by the group's timeout)."""
        self.maximum(0)

    def leave(self) -> None:
        """Release the groups; may be called again."""
        global _users, _ours, _sizes
        with _lock:
            if not self._held:
                return
            self._held = False
            _users -= 1
            for name in ("tensor", "pipeline", "context", "expert", "data", "expert_data"):
                self.__dict__.pop(name, None)
            if _users == 0:
                _sizes = None
                groups = parallel_state._global_process_group_list or []
                parallel_state.destroy_model_parallel()
                parallel_state._global_process_group_list = None
                parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None  # destroy_model_parallel keeps it
                for group in groups[1:] if dist.is_initialized() else ():  # the first stands for the default group
                    dist.destroy_process_group(group)
                del groups
                RotaryEmbedding.forward.cache_clear()  # it holds groups
                if _ours and dist.is_initialized():
                    dist.destroy_process_group()
                _ours = False
                gc.collect()


def _join(config: Config, context: EngineContext) -> None:
    global _users, _ours, _sizes
    with _lock:
        wanted = (
            config.tensor_parallel,
            config.pipeline_parallel,
            config.context_parallel,
            config.expert_parallel,
            config.virtual_pipeline_stages,
        )
        if _sizes is not None and _sizes != wanted:
            raise EngineError(
                "the engines of one process have the same sizes of parallelism",
                code="engine.state",
                where="engine",
                expected="tensor, pipeline, context, expert, virtual: {}, {}, {}, {}, {}".format(*_sizes),
                found="{}, {}, {}, {}, {}".format(*wanted),
                fix="give all roles of a process the same sizes",
            )
        if not dist.is_initialized():
            _make_group(context, config.collective_timeout)
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
        if _sizes is None:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=config.tensor_parallel,
                pipeline_model_parallel_size=config.pipeline_parallel,
                virtual_pipeline_model_parallel_size=virtual(config),
                context_parallel_size=config.context_parallel,
                expert_model_parallel_size=config.expert_parallel,
                expert_tensor_parallel_size=1,
                distributed_timeout_minutes=max(1, math.ceil(config.collective_timeout / 60)),
                create_gloo_process_groups=False,
            )
            tensor_parallel.model_parallel_cuda_manual_seed(context.seed)
            _sizes = wanted
        _users += 1


def virtual(config: Config) -> int | None:
    """Return Megatron's number of virtual stages, which is None for one."""
    return config.virtual_pipeline_stages if config.virtual_pipeline_stages > 1 else None


def _make_group(context: EngineContext, timeout: float) -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    deadline, rank, size = timedelta(seconds=timeout), context.rank, context.world_size
    if context.init_method is None:
        if size > 1:
            raise invalid(
                f"{size} ranks have no place to meet",
                where="EngineContext.init_method",
                expected="a torch.distributed URL",
                found=None,
                fix="give every rank the same tcp://HOST:PORT or file:///PATH",
            )
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=deadline)
    else:
        dist.init_process_group(backend, init_method=context.init_method, rank=rank, world_size=size, timeout=deadline)
