"""The description of a worker in plain values, from which its process makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import attrs

from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.config.sections import RunConfig

Kind: TypeAlias = Literal["engine", "rollout", "agent", "reward"]

#: The name of each kind of worker, and the plugins that it loads.
KINDS: Mapping[Kind, tuple[str, tuple[str, ...]]] = {
    "engine": ("the {role} engine, rank {number}", ("transfer_queue", "engine", "checkpoint_engine")),
    "rollout": ("rollout replica {number}", ("rollout",)),
    "agent": ("agent worker {number}", ("transfer_queue", "agent")),
    "reward": ("reward worker {number}", ("transfer_queue", "reward")),
}


@attrs.frozen(kw_only=True)
class Worker:
    """Describes a worker in plain values, from which ``make_worker`` makes it in its process."""

    kind: Kind
    number: int = 0  #: also the rank of an engine's rank
    role: str = ""  #: role of an engine
    config: RunConfig
    algorithm: ResolvedAlgorithm | None = None  #: not for replicas
    generates: bool = True  #: whether the run has replicas
    arrays: bool = False  #: whether samples have ``multi_modal_inputs``
    queue: str | None = None  #: the queue's folder, in a cluster; its workers join the backend there
    host: str = "127.0.0.1"  #: address of its node
    world_size: int = 1  #: number of its engine's ranks
    local_rank: int = 0  #: number of the rank among those on its node
    device: str = "cpu"  #: the process's own; the first of several
    memory_fraction: float | None = None  #: what it may use of each device's memory
    init_method: str | None = None  #: where the ranks find each other; None: there is one

    @property
    def name(self) -> str:
        """Return the name of the worker for messages."""
        return KINDS[self.kind][0].format(number=self.number, role=self.role)
