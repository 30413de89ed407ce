"""The run's end of a pipeline service: it waits for a service that died, and asks again for what has no answer."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import attrs

from jackfield.clock import Clock
from jackfield.compose.rewards import run_id
from jackfield.config import RunConfig
from jackfield.errors import ConfigError, DeadlineExceeded, RpcError
from jackfield.sdk.rpc import Address, Connection, connect, stub
from jackfield_pipelines.guards import disk_errors, locked
from jackfield_pipelines.protocol import (
    ADDRESS_FILE,
    CONTRACT,
    FRAME_BYTES,
    NAME,
    SERVICE,
    PipelineService,
    SourceFile,
    TaskJob,
    Told,
    digest_of,
)
from jackfield_pipelines.row_sets import FILES, MANIFEST, RowSet

T = TypeVar("T")
_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  #: seconds between attempts to connect, at first and at most
_START_SECONDS = 30.0  #: at most, for the first connection
_BEAT_SECONDS = 10.0  #: at most, between two signs of life of a service that computes stages
_LOSSES = 10  #: connections that a request may lose, while nothing new comes
_LOCK_SECONDS = 3600.0  #: for another process of the run that takes the same sets


@attrs.define(eq=False, kw_only=True)
class PipelineClient:
    """Calls a service over as many connections as it takes. It belongs to one event loop."""

    place: Path  #: the service's folder, or the file with its address
    run: str  #: name of the run, for the service
    seconds: float  #: longest time without an answer
    clock: Clock
    links: bool = True  #: whether sets that this machine sees are linked, and not copied
    connection: Connection | None = attrs.field(default=None, init=False)  #: the one that is used
    _was_there: bool = attrs.field(default=False, init=False)

    @property
    def who(self) -> str:
        """The service, for errors."""
        return f"{NAME} at {self.place}"

    async def call(self, work: Callable[[PipelineService], Awaitable[T]], progress: Callable[[], int] = int) -> T:
        """Return what ``work`` returns; start it again after each lost connection.

        ``progress`` grows with what has come. ``deadline`` if the service does not answer in time.
        """
        losses, before = 0, progress()
        while True:
            connection = await self._connected()
            try:
                return await work(stub(connection, SERVICE, CONTRACT, PipelineService, self.seconds))
            except DeadlineExceeded as error:
                fix = "look at what the service does, or raise deadlines.batch"
                late, what = error.message, f"{self.who} did not answer in time"
                raise DeadlineExceeded(what, where="data.pipeline.service", found=late, fix=fix) from error
            except RpcError as error:
                if error.code != "rpc.lost" or not connection.lost.done():
                    raise
                losses, before = losses + 1 if progress() == before else 1, progress()
                if losses == _LOSSES:
                    fix, found = "look at what the service prints", error.found
                    what = f"{self.who} has ended {_LOSSES} times in the middle of one request"
                    raise RpcError(what, code="rpc.lost", found=found, fix=fix) from error

    async def close(self) -> None:
        """Close the connection."""
        if self.connection is not None:
            await self.connection.close()
            self.connection = None
            for _ in range(3):  # the task that watches the connection ends in these turns of the event loop
                await asyncio.sleep(0)

    async def _connected(self) -> Connection:
        if self.connection is None or self.connection.lost.done():
            self.connection = await self._connect(
                self.seconds if self._was_there else min(self.seconds, _START_SECONDS)
            )
            self._was_there = True
        return self.connection

    async def _connect(self, seconds: float) -> Connection:
        until, pause, last = self.clock.time() + seconds, _PAUSE, "it has not answered"
        while (left := until - self.clock.time()) > 0:
            try:
                return await self.clock.wait_for(self._open(), left, self.who)
            except DeadlineExceeded:
                break
            except RpcError as error:
                if error.code not in ("rpc.lost", "rpc.address") or "proved" in str(error.found):
                    error.where = error.where or self.who
                    raise
                last = f"{error.message}: {error.found}"
            await self.clock.sleep(pause * random.uniform(0.5, 1.0))  # runs do not move in step
            pause = min(2.0 * pause, _LONGEST_PAUSE)
        fix = "start `jackfield data serve` again, or correct data.pipeline.service"
        details: Any = {"expected": "`jackfield data serve` at work there", "found": last, "fix": fix}
        raise DeadlineExceeded(f"waited {seconds:g} s for {self.who}", where="data.pipeline.service", **details)

    async def _open(self) -> Connection:
        """Connect once. The file is read at each attempt: a service that has started again writes another one."""
        file = self.place / ADDRESS_FILE if self.place.is_dir() else self.place
        try:
            address = Address.read(file)
        except RpcError as error:
            if not file.is_file():
                raise
            fix = "give the folder of `jackfield data serve`, or the address.json in it"
            details: Any = {
                "where": str(file),
                "expected": "the address of a service",
                "found": error.found,
                "fix": fix,
            }
            raise ConfigError("data.pipeline.service names another file", **details) from error
        try:
            return await connect(address, self.run, self.clock, {SERVICE: CONTRACT}, kills=False)
        except RpcError as error:
            if "proved" in str(error.found):
                fix = "give the address file that the service has written; it has a secret"
                what, found = f"{self.who} has another token than the file", error.found
                raise RpcError(what, code="rpc.authentication", found=found, fix=fix) from error
            raise

    async def prepare(
        self,
        job: TaskJob,
        files: Sequence[BinaryIO],
        folder: Path,
        tell: Callable[[RowSet, bool], None],
    ) -> list[RowSet]:
        """Have the service compute the stages of files; return their sets, which are then in ``folder``."""
        told, sent = dict[str, bool](), 0

        async def work(service: PipelineService) -> list[RowSet]:
            nonlocal sent
            found = list[RowSet]()
            for about, file in zip(job.files, files, strict=True):
                sent = max(sent, await _upload(service, about, file))
            async for each in service.prepare(job, min(_BEAT_SECONDS, self.seconds / 4)):
                if each.name:
                    found.append(await self._taken(service, each, folder))
                    if each.name not in told:
                        tell(found[-1], each.was_there)
                    told[each.name] = True
            return found

        with disk_errors(folder):
            async with locked(folder, self.clock, _LOCK_SECONDS):
                return await self.call(work, lambda: len(told) + sent)

    async def _taken(self, service: PipelineService, told: Told, folder: Path) -> RowSet:
        """Link a set into a folder, or copy it; one that is there stays."""
        local, there = folder / told.name, Path(told.place)
        if (found := RowSet.open(local)) is not None and found.digest == told.digest:
            return found
        partial = folder / f".{told.name}.partial"
        if self.links and (seen := RowSet.open(there)) is not None and seen.digest == told.digest:
            shutil.rmtree(partial, ignore_errors=True)
            partial.unlink(missing_ok=True)
            partial.symlink_to(there, target_is_directory=True)
        else:
            partial.mkdir(exist_ok=True)
            for name in (*FILES, MANIFEST):
                with (partial / name).open("ab") as file:
                    async for part in service.read(told.chain, told.name, name, file.tell()):
                        file.write(part)
        partial.replace(local)
        made = RowSet.open(local)
        assert made is not None, local
        return made


async def _upload(service: PipelineService, about: SourceFile, file: BinaryIO) -> int:
    """Send what the service does not have of a file; return its size."""
    size = await service.size(about.digest)
    while True:
        file.seek(size)
        part = file.read(FRAME_BYTES)
        if not part and size:
            return size
        size = await service.upload(about.digest, size, part)
        if not part:
            return size


def client_of(config: RunConfig, clock: Clock, worker: str = "") -> PipelineClient:
    """Return a client of the service of a run."""
    assert config.data.pipeline.service is not None
    place = Path(config.data.pipeline.service).expanduser()
    return PipelineClient(place=place, run=run_id(config) + worker, seconds=config.deadlines.batch, clock=clock)


async def prepare(
    config: RunConfig, job: TaskJob, files: Sequence[BinaryIO], folder: Path, tell: Callable[[RowSet, bool], None]
) -> list[RowSet]:
    """Have the service of a run compute the stages of its tasks."""
    client = client_of(config, Clock())
    try:
        return await client.prepare(job, files, folder, tell)
    finally:
        await client.close()


def sources_of(files: Sequence[tuple[BinaryIO, str, str]]) -> list[SourceFile]:
    """Return what the service needs to know of opened files, their names and their stems."""
    return [SourceFile(digest=digest_of(file), name=name, stem=stem) for file, name, stem in files]
