"""Where a queue's controller lives: in the run's process, or in one of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import attrs

from jackfield.abc.transfer_queue import TransferQueueBackend
from jackfield.clock import Clock
from jackfield.compose.resume import folder_lock, storage_errors
from jackfield.compose.selection import check_distributed, check_plugins, manifests, register_parts
from jackfield.compose.worker_factory import WorkerFactory
from jackfield.config import RunConfig
from jackfield.errors import ConfigError
from jackfield.plugins import Registry, discover, hook_manager
from jackfield.queue import TransferQueue
from jackfield.queue.remote import QueueServer
from jackfield.queue.store import STORE_FILE


def address_file(config: RunConfig) -> Path:
    """Where a served controller says how to reach it."""
    return Path(config.queue.address or Path(config.folder) / "queue" / "address.json")


def distributed(config: RunConfig, role: str) -> RunConfig:
    """The configuration of a role that is launched separately: it names the controller.

    Raises:
        ConfigError: the run is one that roles cannot share.
    """
    if config.mode != "online":
        raise ConfigError(
            "there are roles where samples are explored", where="mode", expected="online", found=config.mode
        )
    if config.weights.kind != "full":
        raise ConfigError(
            "explorers that come and go get whole weights", where="weights.kind", expected="full", found="delta"
        )
    if role == "reward" and config.queue.rewards != "distributed":
        raise ConfigError(
            "the role train scores the samples of this run",
            where="queue.rewards",
            expected="distributed",
            found=config.queue.rewards,
            fix="set queue.rewards: distributed, for all roles",
        )
    return attrs.evolve(config, queue=attrs.evolve(config.queue, address=str(address_file(config).absolute())))


def local_queue(config: RunConfig, backend: TransferQueueBackend, clock: Clock) -> TransferQueue:
    """Make the queue of a run, with its controller in this process; not started."""
    return TransferQueue(
        backend,
        clock,
        store=Path(config.folder) / "queue" / STORE_FILE,
        durable=config.queue.durable,
        max_samples=config.queue.max_samples,
        max_bytes=config.queue.max_bytes,
        max_retries=config.schedule.max_retries,
    )


async def serve_queue(
    config: RunConfig,
    until: asyncio.Event,
    *,
    ready: Callable[[QueueServer, Path], None],
    registry: Registry | None = None,
    clock: Clock | None = None,
) -> None:
    """Serve the controller of a run's queue, and open its backend for others to join.

    Args:
        config: of the run.
        until: serve until it is set.
        ready: called with the server and its address file.
        registry: the installed plugins; discovered when not given.
        clock: through which every wait goes.

    Raises:
        PluginError: the backend keeps values in one process.
        RunError: ``run.folder-in-use``: one is served already.
        QueueError: ``queue.store``: the address is taken.
    """
    registry, clock, settings = registry or discover(), clock or Clock(), config.queue
    check_plugins(config, registry)
    check_distributed(config, registry, "the queue's controller is in a process of its own")
    register_parts(hook_manager([], manifests(config, registry)).hook)
    folder = Path(config.folder) / "queue"
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        stack.enter_context(folder_lock(folder))
        queue = local_queue(config, WorkerFactory(config=config, registry=registry, clock=clock).backend(), clock)
        stack.push_async_callback(queue.close)
        await queue.start()
        server = QueueServer(queue, clock, config.deadlines.heartbeat)
        stack.push_async_callback(server.close)
        address = await server.listen(settings.host, settings.port)
        file = folder / "address.json"
        address.write(file)
        stack.callback(file.unlink, missing_ok=True)
        ready(server, file)
        await until.wait()
