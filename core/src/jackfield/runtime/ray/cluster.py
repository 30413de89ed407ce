"""A Ray cluster that this process starts or joins, and the actors in it."""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs

from jackfield.clock import Clock
from jackfield.config.sections import RayConfig
from jackfield.errors import DeadlineExceeded, JackfieldError, PluginError, WorkerLost
from jackfield.plugins.interpreters import look
from jackfield.rpc import Contract
from jackfield.runtime.ray.actors import Actor, Host, WorkerSpec, unavailable
from jackfield.sdk.ray_loopback import HOST, enter
from jackfield.sdk.ray_processes import see_gone, with_descendants

if TYPE_CHECKING:
    import psutil

T = TypeVar("T")

_REACH_SECONDS = 10.0  #: for the head node to accept a connection
_TOKEN, _MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"


@attrs.define(eq=False)
class Cluster:
    """A Ray cluster and its actors; :meth:`close` ends what this process has started.

    Processes and placement groups outlive their workers: after :meth:`rest`, a worker or placement group of the same
    name reuses them.
    """

    _clock: Clock
    _start_seconds: float  #: deadline for a worker or a placement group
    _heartbeat_seconds: float = 30.0  #: a worker's process is killed after this long without a heartbeat
    actors: dict[str, Actor] = attrs.field(factory=dict, init=False)  #: actors that have a worker, by its name
    _spare: dict[str, Actor] = attrs.field(factory=dict, init=False)  #: processes without a worker
    _groups: dict[str, Any] = attrs.field(factory=dict, init=False)
    _restarting: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)
    #: top processes of a cluster that was started here; its other processes descend from them
    _processes: list[psutil.Process] = attrs.field(factory=list, init=False)

    async def open(self, options: RayConfig, needed_cpus: float) -> None:
        """Start or join a cluster.

        Raises:
            RunError: ``cluster.unavailable`` if it cannot be started or joined.
        """
        _use_token(joins=options.address is not None)
        if _ray().is_initialized():
            fix = "do the run in a process of its own, or call ray.shutdown() first"
            raise unavailable("this process is in a Ray cluster already", fix=fix)
        own = {
            "num_cpus": options.num_cpus or max(os.cpu_count() or 1, round(needed_cpus + 0.5)),
            "object_store_memory": options.object_store_bytes,
            "include_dashboard": False,
            "_node_ip_address": HOST,
        }
        try:
            if options.address is not None:
                await self._clock.wait_for(_reach(options.address), _REACH_SECONDS, f"the cluster {options.address}")
            # in this thread: Ray's processes would end with any other thread, and Ray has its own deadlines here
            self._processes = enter(options.address, {} if options.address else own)
        except Exception as error:  # Ray raises many kinds
            raise unavailable(
                f"the Ray cluster at {options.address} cannot be joined" if options.address else "Ray cannot start",
                where=options.address,
                expected=f"a cluster of Ray {version('ray')} and Python {platform.python_version()}, and its token",
                found=f"{type(error).__name__}: {error}",
                fix="look whether it runs (`ray status`), and set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to its token",
            ) from error

    async def places(self, count: int, resources: Mapping[str, float], what: str) -> Any:
        """Return the placement group of ``what``, or create one of ``count`` equal bundles.

        Raises:
            RunError: ``cluster.unavailable`` if the cluster cannot provide it in time.
        """
        from ray.util.placement_group import placement_group

        ray = _ray()
        if what in self._groups:
            return self._groups[what]
        self._groups[what] = group = placement_group([dict(resources) for _ in range(count)], strategy="PACK")
        who = f"{count} places of {dict(resources)} for {what}"
        try:
            await self._clock.wait_for(group.ready(), self._start_seconds, who)
        except BaseException as error:
            self.give_back(what)
            if not isinstance(error, DeadlineExceeded):
                raise
            free, total = ray.available_resources(), ray.cluster_resources()
            parts = (f"{name}: {free.get(name, 0):g} of {total.get(name, 0):g} free" for name in resources)
            raise unavailable(
                f"the cluster has no room for {what}",
                expected=who,
                found=f"in the whole cluster {', '.join(parts)}",
                fix="raise cluster.ray.num_cpus, join a larger cluster, or ask for fewer or smaller workers",
            ) from error
        return group

    def give_back(self, what: str) -> None:
        """Remove the placement group of ``what``, if there is one."""
        from ray.util.placement_group import remove_placement_group

        if what in self._groups:
            remove_placement_group(self._groups.pop(what))

    async def start(self, spec: WorkerSpec) -> Actor:
        """Start a process for a worker, or reuse the process of an earlier worker of this name.

        Raises:
            RunError: ``cluster.unavailable`` if it does not start or has other versions.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if spec.name in self._spare:
            handle = self._spare.pop(spec.name).handle
        else:
            strategy: Any = "SPREAD"
            if spec.group is not None:
                strategy = PlacementGroupSchedulingStrategy(spec.group, spec.bundle)
            options = {
                "num_cpus": spec.resources.get("CPU", 0),
                "num_gpus": spec.resources.get("GPU", 0),
                "scheduling_strategy": strategy,
                "runtime_env": None if spec.python is None else {"py_executable": spec.python},
            }
            one_thread = spec.group is not None
            host: Any = ray.remote(Host).options(**options)
            handle = host.remote(spec.name, os.getcwd(), one_thread, self._heartbeat_seconds)
        self.actors[spec.name] = actor = Actor(spec, handle, self._clock, self._start_seconds)
        await actor.find()
        return actor

    async def restart(self, name: str) -> Actor:
        """Make a worker again, in its process if that still works, otherwise in a new one."""
        await self._empty(self.actors[name])
        actor = await self.start(self.actors[name].spec)
        await actor.make()
        return actor

    def restarting_stub(
        self, name: str, stub_of: Callable[[Actor], T], contract: Contract, begin: Callable[[Actor], Awaitable[object]]
    ) -> T:
        """Return a stub of a stateless worker, which is restarted when a call finds it dead.

        Args:
            name: Name of the worker.
            stub_of: Makes a stub of the worker in an actor.
            contract: Methods of the stub.
            begin: Called after each restart of the worker.
        """

        async def call(method: str, *arguments: Any, **keywords: Any) -> Any:
            try:
                return await getattr(stub_of(self.actors[name]), method)(*arguments, **keywords)
            except WorkerLost:
                with suppress(WorkerLost):  # the next call tries again
                    async with self._restarting:
                        if not self.actors[name].lives:
                            await begin(await self.restart(name))
                raise

        return cast(T, SimpleNamespace(**{method.name: partial(call, method.name) for method in contract}))

    @staticmethod
    async def watch(actors: Sequence[Actor]) -> None:
        """Wait until one of the actors dies, and raise its error. This never returns.

        Raises:
            WorkerLost: When an actor dies; it is named.
        """
        lives = {asyncio.shield(actor.connection.lost): actor for actor in actors}
        done, _ = await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
        raise lives[done.pop()].connection.error()

    async def _empty(self, actor: Actor) -> None:
        """End a worker. Keep its process for another one, or kill it if the worker does not end."""
        try:
            await actor.empty()
        except JackfieldError:
            await actor.kill()
        else:
            self._spare[actor.spec.name] = actor

    async def end(self, name: str) -> None:
        """End one worker, if there is one of this name, and its process."""
        if name in self.actors:
            await self._empty(self.actors.pop(name))
        if name in self._spare:
            await self._spare.pop(name).kill()

    async def rest(self) -> None:
        """End all workers. Their processes are kept for other workers if they still respond."""
        actors, self.actors = self.actors, {}
        await asyncio.gather(*map(self._empty, reversed(actors.values())))

    async def close(self) -> None:
        """End all actors and placement groups; leave the cluster, or end it if started here.

        Ray only asks processes to end; this waits until no process of a cluster started here is left.
        """
        import ray

        await self.rest()
        for name in list(self._spare):
            await self.end(name)
        for what in list(self._groups):
            self.give_back(what)
        family = {each for head in self._processes for each in with_descendants(head)}
        ray.shutdown()
        await asyncio.to_thread(see_gone, family)
        self._processes = []


def check_interpreter(python: str, what: str, seconds: float = 30.0) -> None:
    """Refuse an interpreter in which Ray could not start an actor but would wait for ever.

    Raises:
        PluginError: ``plugin.interpreter`` or ``plugin.requirement`` if it is not suitable. The error names ``what``.
    """
    report = look(python, seconds=seconds)
    report.check()
    ours, theirs = (
        f"Ray {ray} on Python {'.'.join(str(python).split('.')[:2])}"
        for ray, python in ((version("ray"), platform.python_version()), (report.versions["ray"], report.python))
    )
    if ours != theirs:
        raise PluginError(
            f"{what} cannot run in the interpreter {report.path}",
            code="plugin.interpreter",
            where=report.path,
            expected=f"{ours}, as in the cluster",
            found=theirs,
            fix=f"{report.path} -m pip install ray=={version('ray')}",
        )


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


async def _reach(address: str) -> None:
    """Connect to the head node once, because Ray itself retries for minutes."""
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.close()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        fix = "pip install 'jackfield[ray]'"
        raise PluginError("the Ray runtime needs Ray", where="cluster.name", fix=fix, found=error) from error
    return ray
