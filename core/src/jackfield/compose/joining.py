"""How a replica gets weights that joins a run, or was made anew."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from jackfield.runtime.engine_group import EngineGroup
from jackfield.runtime.ray.replica import LastingReplica
from jackfield.runtime.replicas import Joining
from jackfield.runtime.shared_device import SharedDevice
from jackfield.trainer import PlacementLease, Stages, Trainer, WeightSubscriber
from jackfield.weights import Replica, WeightSynchronizer

__all__ = ["following", "joining"]


def joining(
    synchronizer: WeightSynchronizer,
    shared: SharedDevice | None,
    trainer: Trainer,
    actor: EngineGroup,
    placement: PlacementLease,
    stages: Stages,
) -> Joining:
    """What :class:`~jackfield.runtime.replicas.Replicas` needs of the run.

    Args:
        synchronizer: of all replicas.
        shared: the device, where engine and replicas take turns on it; None: they do not.
        trainer: knows which version of the weights the engine has.
        actor: the engine.
        placement: of the trainer: who holds it keeps the engine from training and everybody from synchronising.
        stages: measure how long it takes.
    """

    async def catch_up(replica: Replica) -> None:
        if trainer.updated:  # else they are those of the model's folder, which it has loaded
            async with actor.reading:
                await synchronizer.catch_up(replica, trainer.updated)

    async def join(replica: Replica) -> None:
        async with stages.measure("load_weights", "weights", trainer.updated):
            await catch_up(replica)
            if shared is not None:
                await shared.join(replica, trainer.updated)

    async def bring_up(server: LastingReplica) -> None:
        assert server.info is not None
        async with stages.measure("load_weights", "weights", trainer.updated), placement.hold("rollout", joins=True):
            if server.behind:  # else it was given those of a synchronisation meanwhile
                await catch_up(Replica(server, server.info))
                await server.admit()

    return Joining(
        hold=partial(placement.hold, "rollout"),
        join=join,
        catch_up=catch_up,
        bring_up=bring_up,
        takes_turns=shared is not None,
    )


def following(subscriber: WeightSubscriber, placement: PlacementLease, stages: Stages) -> Joining:
    """The same where the engine is in another process: replicas get the newest weights that it has published.

    Args:
        subscriber: of these weights.
        placement: of the explorer.
        stages: measure how long it takes.
    """

    @asynccontextmanager
    async def hold() -> AsyncIterator[None]:
        async with placement.hold("rollout"), subscriber.loading:  # else it would miss weights that come meanwhile
            yield

    async def join(replica: Replica) -> None:
        async with stages.measure(
            "load_weights", "weights", 0 if subscriber.newest is None else subscriber.newest.version
        ):
            await subscriber.load(replica)

    async def bring_up(server: LastingReplica) -> None:
        assert server.info is not None
        async with subscriber.loading:
            await join(Replica(server, server.info))
        await server.admit()

    return Joining(
        hold=hold,
        join=join,
        catch_up=subscriber.load,
        bring_up=bring_up,
        takes_turns=False,
    )
