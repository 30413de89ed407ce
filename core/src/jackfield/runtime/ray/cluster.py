"""A Ray cluster: one that this process starts and ends, or one that it joins; and the actors in it."""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, PluginError, RunError
from jackfield.plugins.introduction import look
from jackfield.runtime.ray.actors import Actor, awaited
from jackfield.runtime.ray.host import Host, Place
from jackfield.sdk.ray_loopback import HOST, enter
from jackfield.sdk.ray_processes import see_gone, with_descendants

if TYPE_CHECKING:
    import psutil

_CONCURRENT_CALLS = 10_000
_REACH_SECONDS = 10.0  #: for the head of a cluster to accept a connection
_TOKEN, _MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"
#: Whether Ray prints which calls it makes again: those that wait for an actor. Who died is told anyway.
_QUIET = "RAY_enable_output_error_log_if_still_retry"


@attrs.frozen(kw_only=True)
class ClusterOptions:
    """Which cluster a run joins, or starts."""

    address: str | None = None  #: of one to join; None: start one on this machine
    num_cpus: int | None = None  #: of one that is started; None: what the machine has, or the run needs
    object_store_bytes: int | None = None  #: shared memory of one that is started; None: Ray's default


class Cluster:
    """Started by :meth:`open`; everything that it has started ends with :meth:`close`.

    Processes and places outlast the workers in them: after :meth:`rest`, a worker or a group of places of the same
    name is given what was there before.
    """

    def __init__(self, clock: Clock, start_seconds: float, heartbeat_seconds: float = 30.0) -> None:
        """
        Args:
            clock: through which every wait goes.
            start_seconds: for a worker, or a group of places, to be there.
            heartbeat_seconds: without a heartbeat of a worker, after which its process is killed.
        """
        self._clock = clock
        self._start_seconds = start_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._actors: list[Actor] = []
        self._spare: dict[str, Actor] = {}
        self._groups: dict[str, Any] = {}
        self._processes: list[psutil.Process] = []  # of a cluster that was started here; the others are below them

    async def open(self, options: ClusterOptions, needed_cpus: float) -> None:
        """Start or join a cluster.

        Raises:
            RunError: ``cluster.unavailable``.
        """
        _use_token(joins=options.address is not None)
        os.environ.setdefault(_QUIET, "0")
        ray = _ray()
        if ray.is_initialized():
            raise RunError(
                "this process is in a Ray cluster already",
                code="cluster.unavailable",
                fix="do the run in a process of its own, or call ray.shutdown() first",
            )
        own: dict[str, Any] = {}
        if options.address is None:
            own = {
                "num_cpus": options.num_cpus or max(os.cpu_count() or 1, round(needed_cpus + 0.5)),
                "object_store_memory": options.object_store_bytes,
                "include_dashboard": False,
                "_node_ip_address": HOST,
            }

        try:
            if options.address is not None:
                await self._clock.wait_for(_reach(options.address), _REACH_SECONDS, f"the cluster {options.address}")
            # in this thread: what Ray starts would end with another one, and Ray has deadlines of its own here
            self._processes = enter(options.address, own)
        except Exception as error:  # whatever Ray raises
            raise RunError(
                f"the Ray cluster at {options.address} cannot be joined" if options.address else "Ray cannot start",
                code="cluster.unavailable",
                where=options.address,
                expected=f"a cluster of Ray {version('ray')} and Python {platform.python_version()}, and its token",
                found=f"{type(error).__name__}: {error}",
                fix="look whether it runs (`ray status`), and set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to its token",
            ) from error

    async def places(self, count: int, resources: Mapping[str, float], what: str) -> Any:
        """A placement group of ``count`` bundles, each with ``resources``; one that is there for ``what``, if any.

        Raises:
            RunError: ``cluster.unavailable`` when the cluster cannot give them in time.
        """
        ray = _ray()
        from ray.util.placement_group import placement_group

        if what in self._groups:
            return self._groups[what]
        self._groups[what] = group = placement_group([dict(resources) for _ in range(count)], strategy="PACK")
        who = f"{count} places of {dict(resources)} for {what}"
        try:
            await self._clock.wait_for(awaited(group.ready()), self._start_seconds, who)
        except BaseException as error:
            self.give_back(what)
            if not isinstance(error, DeadlineExceeded):
                raise
            raise RunError(
                f"the cluster has no room for {what}",
                code="cluster.unavailable",
                expected=who,
                found=_free(ray.available_resources(), ray.cluster_resources(), resources),
                fix="raise cluster.ray.num_cpus, join a larger cluster, or ask for fewer or smaller workers",
            ) from error
        return group

    async def start(
        self,
        name: str,
        *,
        group: Any = None,
        bundle: int = 0,
        resources: Mapping[str, float] | None = None,
        python: str | None = None,
        restarts: int = 0,
        one_thread: bool = False,
    ) -> Actor:
        """Start an actor that will hold one worker, or take the one that an earlier worker of this name has left.

        Args:
            name: of the worker.
            group: of places; None: anywhere.
            bundle: in the group.
            resources: that it takes of the bundle.
            python: an interpreter of its own, looked at beforehand with :func:`check_interpreter`.
            restarts: how often Ray starts it again when its process dies.
            one_thread: see :class:`~jackfield.runtime.ray.host.Host`.

        """
        ray = _ray()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if name in self._spare:
            self._actors.append(self._spare.pop(name))
            return self._actors[-1]
        taken = dict(resources or {})
        options: dict[str, Any] = {
            "num_cpus": taken.pop("CPU", 0),
            "num_gpus": taken.pop("GPU", 0),
            "max_restarts": restarts,
            "max_concurrency": _CONCURRENT_CALLS,
            "scheduling_strategy": "SPREAD",
        }
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, bundle)
        if python is not None:
            options["runtime_env"] = {"py_executable": python}
        host = ray.remote(Host).options(**options)
        handle = host.remote(name, os.getcwd(), one_thread, self._heartbeat_seconds)
        self._actors.append(Actor(name, handle, self._clock, self._start_seconds))
        return self._actors[-1]

    async def place(self, actor: Actor) -> Place:
        """Where an actor lives; and the handshake with it.

        Raises:
            RunError: ``cluster.unavailable`` when it does not start, or has another version of Jackfield or Ray.
        """
        found = await actor.place()
        ours = {"jackfield": version("jackfield"), "ray": version("ray")}
        theirs = {package: found.versions[package] for package in ours}
        if theirs != ours:
            raise RunError(
                f"{actor.name} has other versions than the controller",
                code="cluster.unavailable",
                where=f"node {found.address}",
                expected=ours,
                found=theirs,
                fix="install the same versions on every node",
            )
        return found

    @staticmethod
    async def watch(actors: Sequence[Actor]) -> None:
        """Return never, or raise as soon as one of the actors dies.

        Raises:
            WorkerLost: naming it.
        """
        lives = {asyncio.shield(actor.connection.lost): actor for actor in actors}
        done, _ = await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
        raise lives[done.pop()].connection.error()

    async def end(self, actor: Actor) -> None:
        """Have one worker put its things away, and end its process."""
        await self._end(actor)
        self._actors.remove(actor)
        await actor.kill()

    def give_back(self, what: str) -> None:
        """Give back the places of ``what``, if it has any of its own; no worker is in them any more."""
        from ray.util.placement_group import remove_placement_group

        group = self._groups.pop(what, None)
        if group is not None:
            remove_placement_group(group)

    async def rest(self) -> None:
        """Have all workers put their things away; end the processes of those that cannot, and keep the others."""
        ended = await asyncio.gather(*(self._end(actor) for actor in reversed(self._actors)))
        for actor, well in zip(reversed(self._actors), ended, strict=True):
            if well:
                self._spare[actor.name] = actor
            else:
                await actor.kill()
        self._actors = []

    async def close(self) -> None:
        """End all actors, give their places back, and leave the cluster; end it, if it was started here.

        No process of a cluster that was started here is left. Ray itself only tells them to end.
        """
        ray = _ray()
        await self.rest()
        for actor in self._spare.values():
            await actor.kill()
        self._spare = {}
        for what in list(self._groups):
            self.give_back(what)
        family = {each for head in self._processes for each in with_descendants(head)}
        ray.shutdown()
        await asyncio.to_thread(see_gone, family)
        self._processes = []

    @staticmethod
    async def _end(actor: Actor) -> bool:
        """Whether a worker has ended well."""
        try:
            await actor.empty()
        except JackfieldError:
            return False
        return True


def check_interpreter(python: str, what: str, seconds: float = 30.0) -> None:
    """Refuse an interpreter in which Ray could not start an actor: Ray itself would wait for ever.

    Raises:
        PluginError: ``plugin.interpreter`` or ``plugin.requirement``, naming what was to run there.
    """
    report = look(python, seconds=seconds)
    report.check()
    ours = {"ray": version("ray"), "python": ".".join(platform.python_version_tuple()[:2])}
    theirs = {"ray": report.versions["ray"], "python": ".".join((report.python or "").split(".")[:2])}
    if ours != theirs:
        raise PluginError(
            f"{what} cannot run in the interpreter {report.path}",
            code="plugin.interpreter",
            where=report.path,
            expected=f"Ray {ours['ray']} on Python {ours['python']}, as in the cluster",
            found=f"Ray {theirs['ray']} on Python {theirs['python']}",
            fix=f"{report.path} -m pip install ray=={ours['ray']}",
        )


def _use_token(*, joins: bool) -> None:
    """Have a token in this process's environment, for good: Ray reads it once.

    For a cluster that is started it is a new one, which Ray would otherwise write into the home folder. For one that
    is joined it is whatever is there; Ray, given an address, would not show it.
    """
    there = any(name in os.environ for name in (_TOKEN, "RAY_AUTH_TOKEN_PATH"))
    if joins:
        there |= (Path.home() / ".ray" / "auth_token").is_file()
        if there and _MODE not in os.environ:
            os.environ[_MODE] = "token"
            if "ray" in sys.modules:  # it has read its settings
                sys.modules["ray._raylet"].Config.initialize("")
    elif not there:
        os.environ[_TOKEN] = secrets.token_hex(32)


def _free(available: Mapping[str, float], total: Mapping[str, float], names: Iterable[str]) -> str:
    """What is left in all nodes together; places that are taken are taken whole."""
    parts = (f"{name}: {available.get(name, 0):g} of {total.get(name, 0):g} free" for name in names)
    return f"in the whole cluster {', '.join(parts)}"


async def _reach(address: str) -> None:
    """Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.close()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise PluginError(
            "the Ray runtime needs Ray", where="cluster.name", fix="pip install 'jackfield[ray]'", found=error
        ) from error
    return ray
