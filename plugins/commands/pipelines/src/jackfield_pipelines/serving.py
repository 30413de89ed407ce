"""The service behind ``jackfield data serve``."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import msgspec
import xxhash
import yaml
from attrs.validators import ge, gt, le

from jackfield.clock import Clock
from jackfield.compose.run import folder_lock
from jackfield.config import RunConfig, make_config
from jackfield.data.formats import TaskFormat
from jackfield.errors import ConfigError, DataError, OperatorError
from jackfield.files import replace_file
from jackfield.plugins import discover
from jackfield.plugins.registry import Registry
from jackfield.sdk import option
from jackfield.sdk.rpc import Connection, Server, Service, caller
from jackfield.settings import structure
from jackfield_pipelines.experiences import ExperiencePipeline
from jackfield_pipelines.instances import Instance, Room
from jackfield_pipelines.loops import LoopThread
from jackfield_pipelines.made import makes_samples
from jackfield_pipelines.pipeline import FilePipeline, Step
from jackfield_pipelines.process_operators import INTERPRETER
from jackfield_pipelines.protocol import (
    ADDRESS_FILE,
    CONTRACT,
    FRAME_BYTES,
    NAME,
    SERVICE,
    ExperienceJob,
    Opened,
    PipelineService,
    ShapeRequest,
    SourceFile,
    TaskJob,
    Told,
    digest_of,
    encode,
)
from jackfield_pipelines.row_sets import FILES, MANIFEST, RowSet
from jackfield_pipelines.served_asks import ServedAsks
from jackfield_pipelines.tasks import steps_of

_DIGEST, _NAME = re.compile(r"[0-9a-f]{12,32}"), re.compile(r"\d+-[A-Za-z0-9_-]+")
_FILE = re.compile("|".join(map(re.escape, (*FILES, MANIFEST))))


@attrs.frozen(kw_only=True)
class ServeConfig:
    """Settings of the service."""

    folder: str = option("pipelines", "folder for the address, the files of runs, and the rows after each stage")
    host: str = option("127.0.0.1", "address to listen on; beyond this machine, connections are encrypted")
    port: int = option(0, "port; 0: a free one, or on this machine a socket without a port", [ge(0), le(65535)])
    asks: Mapping[str, Any] = option(
        factory=dict,
        help="what operators may ask or use, as sections of a run's file: model and rollout for the policy, models, "
        "reward, environments",
    )
    heartbeat_seconds: float = option(30.0, "silence after which a run takes the service for dead", gt(0.0))


def load(file: Path) -> ServeConfig:
    """Read the file of a service; raise a ``ConfigError``, which names the setting."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        what, fix = "the configuration file cannot be read as YAML", "check the path and the file"
        raise ConfigError(what, code="config.unreadable", where=str(file), found=error, fix=fix) from error
    config = structure(ServeConfig, {} if values is None else values)
    if config.host in ("0.0.0.0", "::"):
        fix = "give the address by which the runs reach this machine"
        details: Any = {"where": "host", "expected": "an address of this machine", "found": config.host, "fix": fix}
        raise ConfigError("runs cannot connect to every address", **details)
    asked_of(config)
    return config


def asked_of(config: ServeConfig) -> RunConfig:
    """Return the configuration of what operators may ask; raise a ``ConfigError`` if it is wrong."""
    without = {} if "model" in config.asks else {"model": {"path": "none"}}
    return make_config({"folder": config.folder, **config.asks, **without})


@attrs.define(eq=False)
class _Work:
    """Stages that are computed for one or several runs."""

    task: asyncio.Task[None]
    told: list[Told] = attrs.field(factory=list)
    waiters: int = 0
    changed: asyncio.Event = attrs.field(factory=asyncio.Event)


@attrs.define(eq=False)
class Pipelines(PipelineService):
    """Computes the stages of runs. What is computed for a connection ends with it."""

    config: ServeConfig
    registry: Registry
    clock: Clock
    _works: dict[str, _Work] = attrs.field(factory=dict, init=False)
    _rooms: dict[str, Room] = attrs.field(factory=dict, init=False)
    _instances: dict[Connection, tuple[Room, Instance]] = attrs.field(factory=dict, init=False)
    _added: dict[Connection, list[bytes]] = attrs.field(factory=dict, init=False)

    async def size(self, digest: str) -> int:
        """Return how many bytes of a file are there."""
        file = self._file(digest)
        return file.stat().st_size if file.exists() else 0

    async def upload(self, digest: str, offset: int, part: bytes) -> int:
        """Append a part of a file if ``offset`` is its size; return the size."""
        file = self._file(digest)
        file.parent.mkdir(exist_ok=True)
        with file.open("ab") as opened:
            if opened.tell() == offset:
                opened.write(part)
            return opened.tell()

    def _file(self, digest: str) -> Path:
        return Path(self.config.folder, "files", f"{_checked(digest, _DIGEST)}.jsonl")

    async def prepare(self, job: TaskJob, beat: float) -> AsyncIterator[Told]:
        """Apply operators to files; yield each complete stage, and a sign of life every ``beat`` seconds."""
        key, seen = xxhash.xxh3_128_hexdigest(encode(job)), 0
        if (work := self._works.get(key)) is None:
            work = self._works[key] = _Work(asyncio.ensure_future(self._stages(job, key)))
            work.task.add_done_callback(lambda done: done.cancelled() or done.exception())  # the run may be gone
        work.waiters += 1
        try:
            while True:
                ended = work.task.done()
                for told in work.told[seen:]:
                    seen += 1
                    yield told
                if ended and seen == len(work.told):
                    work.task.result()  # raises what ended it
                    return
                changed = asyncio.ensure_future(work.changed.wait())
                await asyncio.wait((work.task, changed), timeout=beat, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if seen == len(work.told):
                    yield Told()
        finally:
            work.waiters -= 1
            if not work.waiters:
                work.task.cancel()
            if (work.task.done() or not work.waiters) and self._works.get(key) is work:
                del self._works[key]

    async def _stages(self, job: TaskJob, key: str) -> None:
        """Compute stages in a thread of their own, one after the other with others of the same files."""
        work, loop, thread = self._works[key], asyncio.get_running_loop(), LoopThread("stages")
        chain = xxhash.xxh3_64_hexdigest(repr([(file.stem, file.digest) for file in job.files]).encode())[:12]
        folder = Path(self.config.folder, "tasks", chain)

        def put(told: Told) -> None:
            work.told.append(told)
            work.changed.set()
            work.changed = asyncio.Event()

        def tell(made: RowSet, was_there: bool) -> None:
            place: Any = {"chain": chain, "place": str(made.folder.absolute()), "was_there": was_there}
            loop.call_soon_threadsafe(put, Told(name=made.folder.name, digest=made.digest, **place))

        try:
            await thread.do(self._compute(job, folder, tell))
        finally:
            thread.end()

    async def _compute(self, job: TaskJob, folder: Path, tell: Any) -> None:
        asks = self._asks(job.form)
        try:
            steps = self._steps(job.operators, "data.pipeline.tasks")
            asks.check(steps, "data.pipeline.tasks")
            pipeline = FilePipeline(
                folder=folder,
                steps=steps,
                seed=job.seed,
                limits=job.limits,
                rows=job.rows,
                seconds=job.seconds,
                concurrent=job.concurrent,
                before=job.before,
                context=lambda context: attrs.evolve(context, columns=job.columns),
                services=asks,
                tell=tell,
            )
            with ExitStack() as stack:
                files = [(stack.enter_context(self._whole(each)), each.name, each.stem) for each in job.files]
                await pipeline.run(*files[0], files[1:])
        finally:
            await asks.close()

    def _whole(self, given: SourceFile) -> BinaryIO:
        """Open a file that has come. If it has other bytes, remove it, so that the run sends it again."""
        file = self._file(given.digest).open("rb")
        digest = digest_of(file)
        if digest != given.digest:
            file.close()
            self._file(given.digest).unlink()
            details: Any = {"where": given.name, "expected": given.digest, "found": digest}
            raise DataError(
                "a file has come with other bytes", code="data.row-set", fix="start the run again", **details
            )
        return file

    def _steps(self, operators: Sequence[Mapping[str, Any]], where: str) -> list[Step]:
        """Return the operators that a run names. It may name environments of this service alone, and no paths."""
        config = asked_of(self.config)
        for number, each in enumerate(operators):
            if (given := each.get(INTERPRETER)) is not None and given not in config.environments:
                known = ", ".join(config.environments) or "none"
                fix = "name an environment under asks.environments in the service's file"
                details: Any = {"where": f"{where}[{number}].{INTERPRETER}", "expected": known, "found": repr(given)}
                raise ConfigError("the pipeline service has no such environment", fix=fix, **details)
        return steps_of(operators, self.registry, where, config)

    def _asks(self, form: TaskFormat) -> ServedAsks:
        asked: Any = {"config": asked_of(self.config), "has": frozenset(self.config.asks)}
        return ServedAsks(**asked, registry=self.registry, clock=Clock(), form=form)

    async def read(self, chain: str, name: str, file: str, offset: int) -> AsyncIterator[bytes]:
        """Yield a file of a set from an offset on, in frames."""
        folder = Path(self.config.folder, "tasks", _checked(chain, _DIGEST), _checked(name, _NAME))
        with (folder / _checked(file, _FILE)).open("rb") as opened:
            opened.seek(offset)
            while part := opened.read(FRAME_BYTES):
                yield part

    async def open(self, job: ExperienceJob, restores: bool) -> Opened:
        """Make the operators of this connection, in the place of earlier ones."""
        connection = caller()
        added = b"".join(self._added.pop(connection, ()))
        states: list[Any] | None = msgspec.msgpack.decode(added) if restores else None
        await self._left(connection)
        key = xxhash.xxh3_128_hexdigest(encode(job))
        if (room := self._rooms.get(key)) is None:
            steps = partial(self._steps, job.operators, "data.pipeline.experiences")
            room = self._rooms[key] = Room(job=job, steps=steps, asks=partial(self._asks, TaskFormat()))
        room.users += 1
        instance = Instance(pipeline=ExperiencePipeline(stages=(), steps=job.steps, set_aside=job.set_aside))
        try:
            await room.open(instance, states)
        except BaseException:
            await self._leave(room, instance)
            raise
        self._instances[connection] = room, instance
        stages = instance.pipeline.stages
        return Opened(
            reads=sorted(instance.pipeline.reads),
            states=None if restores else instance.states,
            operators=[stage.about for stage in stages],
            samples=[stage.name for stage in stages if makes_samples(stage.operator)],
        )

    async def add(self, part: bytes, further: bool) -> None:
        """Keep a part of what the next call needs; ``further`` ones follow others."""
        self._added[caller()] = [*(self._added.get(caller(), ()) if further else ()), part]

    async def shape(self) -> AsyncIterator[bytes]:
        """Process the request that was added; yield the encoded reply in frames."""
        content = b"".join(self._added.pop(caller(), ()))
        if caller() not in self._instances:
            raise OperatorError("a run sends experiences and has not opened its pipeline", where=caller().name)
        room, instance = self._instances[caller()]
        reply = encode(await room.shape(instance, msgspec.msgpack.decode(content, type=ShapeRequest)))
        for offset in range(0, len(reply), FRAME_BYTES):
            yield reply[offset : offset + FRAME_BYTES]

    async def overview(self) -> list[dict[str, Any]]:
        """Return a row for each pipeline that is in use."""
        stages = [
            {"pipeline": "tasks", "operators": "", "runs": work.waiters, "stages": len(work.told)}
            for work in self._works.values()
        ]
        rooms = [
            {
                "pipeline": "experiences",
                "operators": ", ".join(str(each.get("name")) for each in room.job.operators),
                "runs": room.users,
                "requests": room.requests,
            }
            for room in self._rooms.values()
        ]
        return [*stages, *rooms]

    async def left(self, connection: Connection, reason: str) -> None:
        """Drop what a run had that has ended."""
        self._added.pop(connection, None)
        await self._left(connection)

    async def _left(self, connection: Connection) -> None:
        if (had := self._instances.pop(connection, None)) is not None:
            await self._leave(*had)

    async def _leave(self, room: Room, instance: Instance) -> None:
        room.users -= 1
        if last := not room.users:  # a run that opens it meanwhile starts another
            self._rooms = {key: each for key, each in self._rooms.items() if each is not room}
        await room.close(instance, everything=last)

    async def close(self) -> None:
        """End all work."""
        tasks = [work.task for work in self._works.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._instances):
            await self._left(connection)


def _checked(text: str, pattern: re.Pattern[str]) -> str:
    """Return a part of a path that a run has given, which leads out of no folder."""
    if not pattern.fullmatch(text):
        raise DataError("this is not the name of a file of rows", code="data.missing", where=NAME, found=repr(text))
    return text


@asynccontextmanager
async def serving(config: ServeConfig, clock: Clock | None = None) -> AsyncIterator[tuple[Server, Path]]:
    """Serve pipelines; yield the server and the file with its address.

    Raise ``run.folder-in-use`` if the folder is served already, and ``rpc.address`` if the address is in use.
    """
    clock, folder = clock or Clock(), Path(config.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        details: Any = {"where": "folder", "expected": "a folder, or a path where one can be made", "found": error}
        fix = "remove the file that is in its place, or name another folder in the service's file"
        raise ConfigError("the service's folder cannot be made", fix=fix, **details) from error
    async with AsyncExitStack() as stack:
        stack.enter_context(folder_lock(folder, "service"))
        pipelines, file = Pipelines(config, discover(), clock), folder / ADDRESS_FILE
        stack.push_async_callback(pipelines.close)
        services = {SERVICE: Service(target=pipelines, contract=CONTRACT)}
        options: Any = {"on_end": pipelines.left, "watches": False}
        server = Server(NAME, services, clock, config.heartbeat_seconds, **options)
        stack.push_async_callback(server.close)
        server.address = attrs.evolve(await server.listen(config.host, config.port), secret=_secret(folder))
        server.address.write(file)
        stack.callback(file.unlink, missing_ok=True)
        yield server, file


def _secret(folder: Path) -> str:
    """Return the token that both ends prove to know, which stays the same over restarts."""
    file = folder / "token"
    if not file.is_file():
        replace_file(file, f"{secrets.token_hex(32)}\n", mode=0o600)
    return file.read_text(encoding="utf-8").strip()
