"""What makes the workers of a run in the actors of a Ray cluster, from the run's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import cast

from jackfield.abc.rollout import BaseRolloutServer
from jackfield.algorithms import register_part
from jackfield.clock import Clock
from jackfield.compose.inputs import check_tokens, read_model, read_tasks
from jackfield.compose.recipe import make_recipe
from jackfield.compose.workers import Needs, RankPlace, WorkerFactory
from jackfield.config import RunConfig, plugin_sections
from jackfield.plugins import hook_manager, installed
from jackfield.queue import Values
from jackfield.runtime.advantages import AdvantageWorker
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.engine_rank import EngineRank
from jackfield.runtime.ray import (
    RemoteBackend,
    RemoteServer,
    Storage,
)
from jackfield.runtime.ray.host import interface_of
from jackfield.runtime.reward_worker import RewardWorker
from jackfield.workers.router import Generates

__all__ = ["make_agent_worker", "make_engine_rank", "make_replica", "make_reward_worker", "make_storage"]


def _factory(config: RunConfig) -> WorkerFactory:
    """An interpreter of a worker's own need not have the plugins of the others."""
    registry = installed()
    chosen = {kind: getattr(config, section).name for section, kind in plugin_sections().items()}
    here = [record.manifest for record in registry.records() if record.name == chosen[record.kind]]
    hook_manager([], [manifest for manifest in here if manifest is not None]).hook.register_parts(
        register=register_part
    )
    return WorkerFactory(config=config, registry=registry, clock=Clock())


def _use_threads(config: RunConfig) -> None:
    import torch

    if config.cluster.threads is not None:
        torch.set_num_threads(config.cluster.threads)


def make_storage(config: RunConfig, needs: Needs) -> Storage:
    """The queue's backend, and the estimator beside it."""
    _use_threads(config)  # and import torch now, rather than at the first row
    backend = _factory(config).backend()
    return Storage(backend, AdvantageWorker(Values(backend), needs.plan))


def make_engine_rank(
    config: RunConfig, needs: Needs, backend: RemoteBackend, role: str, place: RankPlace
) -> EngineRank:
    """A rank of actor, reference or critic."""
    _use_threads(config)
    if interface := interface_of(place.host):  # gloo would take the address of the machine's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return _factory(config).engine_rank(Values(backend), role, needs, place)


def make_replica(config: RunConfig, number: int, *, host: str) -> BaseRolloutServer:
    """A replica; not started."""
    _use_threads(config)
    return _factory(config).rollout_server(number, host=host)


def make_agent_worker(
    config: RunConfig, backend: RemoteBackend, servers: Mapping[int, RemoteServer] | None, number: int
) -> AgentWorker:
    """A worker that runs agents on the replicas; the first one looks whether data, tokenizer and model fit."""
    factory = _factory(config)
    if number == 0:
        recipe = make_recipe(config, factory.registry.find("rollout", config.rollout.name))
        check_tokens(config, read_tasks(config, recipe), read_model(config))
    return factory.agent_worker(
        Values(backend), cast("Mapping[int, Generates] | None", servers), request_prefix=f"{config.name}-{number}"
    )


async def make_reward_worker(config: RunConfig, backend: RemoteBackend, number: int) -> RewardWorker:
    """A worker with a started reward agent."""
    return await _factory(config).reward_worker(Values(backend), number)
