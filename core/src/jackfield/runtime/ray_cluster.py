"""A Ray cluster that this process starts or joins, and the processes in it.

Ray places and starts each process as an actor; everything else goes over a connection to it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs

from jackfield.clock import Clock
from jackfield.config.sections import RayConfig
from jackfield.errors import DeadlineExceeded, JackfieldError, PluginError, RunError
from jackfield.imports import LOG_LEVEL
from jackfield.plugins.interpreters import look
from jackfield.runtime.process import (
    RAY_HOST,
    MakeWorker,
    Place,
    RayHost,
    connect_worker,
    death,
    given_gpus,
    kill_if_stopped,
)
from jackfield.sdk.ray_loopback import HOST, enter
from jackfield.sdk.rpc import Address, Connection, stub

_REACH_SECONDS = 10.0  #: for the head node to accept a connection
_SILENT_SECONDS = 60.0  #: for a node whose processes have died to run a task
_END_SECONDS = 15.0  #: for a worker to close its resources, or a process to be killed
_TOKEN, _MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"


unavailable = partial(RunError, code="cluster.unavailable")


@attrs.frozen(kw_only=True)
class Node:
    """A living node of the cluster and its resources, as Ray names them."""

    name: str  #: Ray's id
    total: Mapping[str, float]
    free: Mapping[str, float]


@attrs.frozen(kw_only=True)
class Bundles:
    """The resources that Ray has reserved on nodes."""

    group: Any  #: Ray's placement group
    gpus: Sequence[Sequence[str]]  #: by bundle: names of its GPUs in ``CUDA_VISIBLE_DEVICES``


@attrs.frozen(kw_only=True)
class WorkerSpec:
    """Describes which worker to start, and where."""

    name: str
    worker: Any = None  #: for the owner of the cluster
    group: Any = None  #: Ray placement group; None: anywhere
    bundle: int = 0  #: index of the bundle in the group
    cpus: float = 0.0  #: what it takes from the bundle
    gpus: Sequence[str] | None = None  #: the only GPUs that its process sees; None: as Ray decides
    python: str | None = None  #: another interpreter, which :func:`check_interpreter` has accepted
    restarts: bool = False  #: a call that finds the worker dead restarts it; it is not watched otherwise


@attrs.define(eq=False)
class Actor:
    """A process of the cluster, in which one worker can follow another."""

    spec: WorkerSpec
    handle: Any  #: Ray's actor handle
    address: Address  #: where the process is served
    connection: Connection
    place: Place = attrs.field(init=False)
    made: bool = attrs.field(default=False, init=False)  #: whether it should have its worker

    @property
    def lives(self) -> bool:
        """Return whether the process is alive."""
        return not self.connection.lost.done()

    def host(self, seconds: float) -> RayHost:
        """Return a stub of the host in the process."""
        return stub(self.connection, "host", RAY_HOST, RayHost, seconds)


@attrs.define(eq=False)
class Cluster:
    """A Ray cluster and its actors; :meth:`close` ends what this process has started.

    Processes and placement groups outlive their workers: after :meth:`rest`, a worker or placement group of the same
    name reuses them.
    """

    _clock: Clock
    _make: MakeWorker  #: makes each worker in its process
    _start_seconds: float  #: deadline for a worker or a placement group
    _heartbeat_seconds: float = 30.0  #: a worker's process is killed after this long without a heartbeat
    actors: dict[str, Actor] = attrs.field(factory=dict, init=False)  #: by name of the worker, also of one that ended
    _groups: dict[str, Bundles] = attrs.field(factory=dict, init=False)
    _leave: Callable[[], None] = attrs.field(init=False)

    async def open(self, options: RayConfig, needed_cpus: float) -> None:
        """Start or join a cluster, or raise ``cluster.unavailable``."""
        try:
            import ray
        except ImportError as error:
            fix = "pip install 'jackfield[ray]'"
            raise PluginError("the Ray runtime needs Ray", where="cluster.name", fix=fix, found=error) from error
        _use_token(joins=options.address is not None)
        if ray.is_initialized():
            fix = "do the run in a process of its own, or call ray.shutdown() first"
            raise unavailable("this process is in a Ray cluster already", fix=fix)
        own = {
            "num_cpus": options.num_cpus or max(os.cpu_count() or 1, round(needed_cpus + 0.5)),
            "num_gpus": options.num_gpus,
            "object_store_memory": options.object_store_bytes,
            "include_dashboard": False,
            "_node_ip_address": HOST,
        }
        try:
            if options.address is not None:  # connect to the head node once, because Ray itself retries for minutes
                address, _, port = options.address.rpartition(":")
                opening = asyncio.open_connection(address.strip("[]"), int(port))
                who = f"the cluster {options.address}"
                (await self._clock.wait_for(opening, _REACH_SECONDS, who))[1].close()
            # in this thread: Ray's processes would end with any other thread, and Ray has its own deadlines here
            self._leave = enter(options.address, {} if options.address else own)
        except Exception as error:  # Ray raises many kinds
            raise unavailable(
                f"the Ray cluster at {options.address} cannot be joined" if options.address else "Ray cannot start",
                where=options.address,
                expected=f"a cluster of Ray {version('ray')} and Python {platform.python_version()}, and its token",
                found=f"{type(error).__name__}: {error}",
                fix="look whether it runs (`ray status`), and set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to its token",
            ) from error

    def nodes(self) -> list[Node]:
        """Return the living nodes, this one first."""
        import ray
        from ray._private.state import available_resources_per_node

        here, free = ray.get_runtime_context().get_node_id(), available_resources_per_node()  # type: ignore[no-untyped-call]
        alive = [(each["NodeID"], each["Resources"]) for each in ray.nodes() if each["Alive"]]  # type: ignore[no-untyped-call]
        found = [Node(name=name, total=total, free=free.get(name, total)) for name, total in alive]
        return sorted(found, key=lambda node: (node.name != here, node.name))

    async def answers(self, node: str) -> bool:
        """Return whether a task runs on a node; Ray itself needs up to a minute to note the death of a node."""
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(given_gpus).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        try:
            await self._clock.wait_for(task.remote(), min(_SILENT_SECONDS, self._start_seconds), f"node {node}")
        except (RayError, DeadlineExceeded):
            return False
        return True

    async def places(self, bundles: Sequence[tuple[str, Mapping[str, float]]], what: str) -> Bundles:
        """Return the bundles of ``what``, or reserve them: the id of a node, and resources there.

        Raises ``cluster.unavailable`` if the cluster cannot provide it in time.
        """
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if what in self._groups:
            return self._groups[what]
        nodes, resources = zip(*bundles, strict=True)
        selectors = [{"ray.io/node-id": node} for node in nodes]
        group = placement_group(list(map(dict, resources)), strategy="PACK", bundle_label_selector=selectors)
        self._groups[what] = Bundles(group=group, gpus=())
        who = f"{', '.join(str(dict(each)) for each in resources)} for {what}"
        look, gpus = ray.remote(given_gpus), [int(each.get("GPU", 0)) for each in resources]
        try:
            await self._clock.wait_for(group.ready(), self._start_seconds, who)
            asked = [
                look.options(
                    num_cpus=0, num_gpus=count, scheduling_strategy=PlacementGroupSchedulingStrategy(group, at)
                )
                for at, count in enumerate(gpus)
            ]
            names = asyncio.gather(*(each.remote() for each, count in zip(asked, gpus, strict=True) if count))
            found = iter(await self._clock.wait_for(names, self._start_seconds, f"Ray to name the GPUs of {what}"))
        except BaseException as error:
            self.give_back(what)
            if not isinstance(error, DeadlineExceeded):
                raise
            free, total = ray.available_resources(), ray.cluster_resources()  # type: ignore[no-untyped-call]
            parts = (f"{name}: {free.get(name, 0):g} of {total.get(name, 0):g} free" for name in resources[0])
            raise unavailable(
                f"the cluster has no room for {what}",
                expected=who,
                found=f"in the whole cluster {', '.join(parts)}",
                fix="wait for other users of the cluster to leave, join a larger one, or ask for fewer workers",
            ) from error
        self._groups[what] = Bundles(group=group, gpus=[next(found) if count else () for count in gpus])
        return self._groups[what]

    def give_back(self, what: str) -> None:
        """Release the bundles of ``what``, if there are any."""
        from ray.util.placement_group import remove_placement_group

        if what in self._groups:
            remove_placement_group(self._groups.pop(what).group)

    async def start(self, spec: WorkerSpec) -> Actor:
        """Start a process for a worker, or reuse the process of an earlier worker of this name, which is ended.

        Raises ``cluster.unavailable`` if it has other versions.
        """
        actor = self.actors.get(spec.name)
        if actor is not None and actor.made:
            await self._empty(actor)
        if actor is None or not actor.lives:
            actor = self.actors[spec.name] = await self._started(spec)
        actor.spec = spec
        actor.place = place = await actor.host(self._start_seconds).place()
        ours = {package: version(package) for package in place.versions}
        if place.versions != ours:
            raise unavailable(
                f"{spec.name} has other versions than the controller",
                where=f"node {place.address}",
                expected=ours,
                found=place.versions,
                fix="install the same versions on every node",
            )
        return actor

    async def _started(self, spec: WorkerSpec) -> Actor:
        import ray
        from ray.exceptions import RayActorError
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        environment: dict[str, Any] = {} if spec.python is None else {"py_executable": spec.python}
        if LOG_LEVEL in os.environ:  # a cluster that was running before does not have it
            environment["env_vars"] = {LOG_LEVEL: os.environ[LOG_LEVEL]}
        strategy = "SPREAD" if spec.group is None else PlacementGroupSchedulingStrategy(spec.group, spec.bundle)
        options = {
            "num_cpus": spec.cpus,
            "num_gpus": 0,  # its bundle has them, which several processes can share
            "scheduling_strategy": strategy,
            "runtime_env": environment or None,
        }
        host: Any = ray.remote(RayHost).options(**options)
        gpus, folder = None if spec.gpus is None else ",".join(spec.gpus), os.getcwd()
        handle = host.remote(self._make, spec.name, folder, spec.group is not None, self._heartbeat_seconds, gpus)
        try:
            address = await self._clock.wait_for(handle.listen.remote(), self._start_seconds, f"{spec.name} to start")
        except RayActorError as error:
            raise death(spec.name, spec.name, _reason(str(error))) from None
        connection = await connect_worker(address, spec.name, "the controller", self._clock, kills=True)
        actor = Actor(spec, handle, address, connection)

        def note_death(lost: asyncio.Future[str]) -> None:
            if actor.made and actor.spec.restarts:  # the death of a watched worker is reported elsewhere
                text = f"{spec.name} ({address.process}) died: it {lost.result()}"
                logging.getLogger("jackfield").warning("%s", text)

        connection.lost.add_done_callback(note_death)
        return actor

    async def make(self, actor: Actor, worker: Any) -> None:
        """Make a worker in an actor from its description in plain values, or raise the error of making it."""
        await actor.host(self._start_seconds).make(worker)
        actor.made = True

    @staticmethod
    async def watch(actors: Sequence[Actor]) -> None:
        """Wait until one of the actors dies, and raise ``WorkerLost``, which names it."""
        lives = {asyncio.shield(actor.connection.lost): actor for actor in actors}
        done, _ = await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
        raise lives[done.pop()].connection.error()

    async def _empty(self, actor: Actor) -> None:
        """End a worker. Keep its process for another one, or kill it if the worker does not end."""
        actor.made = False
        try:
            await actor.host(_END_SECONDS).end()
        except JackfieldError:
            await self._kill(actor)

    async def _kill(self, actor: Actor) -> None:
        """End the process; a stopped one cannot react to Ray, so it is killed on its node."""
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor.connection.end("was ended")
        process = actor.address.process
        if process.is_near:
            kill_if_stopped(process)
        elif hasattr(actor, "place"):
            strategy = NodeAffinitySchedulingStrategy(actor.place.node, soft=False)
            task = ray.remote(kill_if_stopped).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
            with suppress(RayError, DeadlineExceeded):  # the node may be gone
                await self._clock.wait_for(task.remote(process), _END_SECONDS, f"{process} to be killed")
        ray.kill(actor.handle, no_restart=True)

    async def end(self, name: str) -> None:
        """End one worker, if there is one of this name, and its process."""
        if actor := self.actors.pop(name, None):
            await self._empty(actor)
            await self._kill(actor)

    async def rest(self) -> None:
        """End all workers. Their processes are kept for other workers if they still respond."""
        await asyncio.gather(*map(self._empty, reversed(self.actors.values())))

    async def close(self) -> None:
        """End all actors and placement groups; leave the cluster, or end it if started here."""
        await self.rest()
        await asyncio.gather(*map(self._kill, self.actors.values()))
        for what in list(self._groups):
            self.give_back(what)
        self._leave()


def check_interpreter(python: str, what: str, seconds: float = 30.0) -> None:
    """Refuse an interpreter in which Ray could not start an actor but would wait for ever.

    The error, ``plugin.interpreter`` or ``plugin.requirement``, names ``what``.
    """
    report = look(python, seconds=seconds)
    report.check()
    pairs = (version("ray"), platform.python_version()), (report.versions["ray"], report.python)
    ours, theirs = (f"Ray {ray} on Python {'.'.join(str(python).split('.')[:2])}" for ray, python in pairs)
    if ours != theirs:
        message, fix = f"{what} cannot run in {report.path}", f"{report.path} -m pip install ray=={version('ray')}"
        details = {"where": report.path, "expected": f"{ours}, as in the cluster", "found": theirs}
        raise PluginError(message, code="plugin.interpreter", fix=fix, **details)


def _use_token(*, joins: bool) -> None:
    """Set up Ray's authentication token in this process's environment. Ray reads it once.

    To start a cluster, generate a token, which Ray would otherwise write into the home folder. To join one, use the
    token that exists; given an address, Ray would not send it by itself.
    """
    there = any(name in os.environ for name in (_TOKEN, "RAY_AUTH_TOKEN_PATH"))
    if joins:
        there |= (Path.home() / ".ray" / "auth_token").is_file()
        if there and _MODE not in os.environ:
            os.environ[_MODE] = "token"
            if "ray" in sys.modules:  # Ray has already read its settings
                sys.modules["ray._raylet"].Config.initialize("")
    elif not there:
        os.environ[_TOKEN] = secrets.token_hex(32)


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "exit" in line.lower() or "dead" in line.lower()]
    return (lines[-1:] if "creation task" in text else telling or lines or ["no reason is known"])[0][:300]
