"""Execution of a run or of one of its roles: check, start, recover and end."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path

import attrs

from jackfield.clock import Clock
from jackfield.compose.builder import RunBuilder, Stop
from jackfield.compose.checks import check_plugins, hooks_of, prepare
from jackfield.compose.folder import (
    DISK_ERRORS,
    folder_lock,
    is_finished,
    starting_point,
    storage_error,
    storage_errors,
)
from jackfield.compose.workers import WorkerFactory
from jackfield.config import RunConfig, as_plain, resolve_defaults, show
from jackfield.errors import ConfigError, JackfieldError, RunError, WorkerLost
from jackfield.files import replace_file
from jackfield.observe import observers
from jackfield.plugins import Registry, discover
from jackfield.plugins.hooks import RunEnded, RunStarted
from jackfield.queue.transfer_queue import QueueServer
from jackfield.runtime.workers import one_line
from jackfield.trainer.checkpoint import Checkpoint
from jackfield.trainer.role import RoleName


@attrs.frozen(kw_only=True)
class RunResult:
    """The outcome of a run or of one of its roles."""

    folder: Path
    #: completed steps; for the role explore its newest weight version, for the role reward the number of groups
    steps: int
    finished_before: bool = False  #: the run had already finished, and nothing was done
    stopped: bool = False  #: a signal ended the run before its last step, so there is no model

    @property
    def model(self) -> Path:
        """The Hugging Face folder with the trained weights."""
        return self.folder / "model"


def run(
    config: RunConfig,
    *,
    role: RoleName = "all",
    hooks: Sequence[object] = (),
    registry: Registry | None = None,
    stop: Stop | None = None,
) -> RunResult:
    """Execute a run, or one role of it, in this process.

    The role "all" is the whole run. Other roles share a run whose queue controller is in a separate process. "train"
    trains on the explorers' samples. "explore" makes samples until every batch is trained on; any number of processes
    may do it, and join or leave at any time. "reward" scores samples, in one process at a time. ``hooks`` are listeners
    in addition to those of the configuration. The registry has the installed plugins; by default they are discovered.
    ``stop`` requests an early end; without it, the run cannot be stopped early.

    The error that ended the run is raised. The folder keeps what was written, and the same call resumes from the newest
    checkpoint. Other explorers take over the batches of one that failed. If ``stop`` ends the run before a step is
    completed, ``CancelledError`` is raised.
    """
    stop = stop or Stop(config.checkpoint.grace_seconds)
    with asyncio.Runner() as runner:
        return runner.run(stop.bounded(_run(config, role, hooks, registry or discover(), stop)))


async def _run(config: RunConfig, role: RoleName, hooks: Sequence[object], registry: Registry, stop: Stop) -> RunResult:
    clock, config = Clock(), resolve_defaults(config).of_role(role)
    folder, trains, checkpoint = Path(config.folder), role in ("all", "train"), None
    hooks = [*observers(config.observe, folder, clock=clock), *hooks]
    prepared = prepare(config, registry, hooks, role, clock)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "choose another folder"
        raise ConfigError("the run's folder cannot be made", where="folder", found=error, fix=fix) from error
    with storage_errors(folder), nullcontext() if role == "explore" else folder_lock(folder):
        if trains:
            checkpoint = starting_point(config, prepared.tasks)
        if is_finished(config, checkpoint):
            return RunResult(folder=folder, steps=config.schedule.steps, finished_before=True)
        replace_file(folder / "config.yaml", show(config))
        async with AsyncExitStack() as processes:
            factory = WorkerFactory(config=config, registry=registry, clock=clock)
            make_workers = factory.make
            if config.cluster.name == "ray":
                from jackfield.compose.ray_workers import RayWorkers

                workers = RayWorkers(factory)
                processes.push_async_callback(workers.close)
                make_workers = workers.make
            for left in reversed(range(config.checkpoint.max_recoveries + 1)):
                attempt = attrs.evolve(prepared)
                builder = RunBuilder(role=attempt, stop=stop, factory=factory, make_workers=make_workers)
                try:
                    with _reported(builder, checkpoint):
                        steps = await builder.execute(checkpoint)
                    break
                except WorkerLost as error:
                    resumed = attrs.evolve(config, checkpoint=attrs.evolve(config.checkpoint, resume=True))
                    checkpoint = starting_point(resumed, prepared.tasks) if left and trains else None
                    if checkpoint is None:
                        raise
                    what = "%s; the run goes on after step %d"
                    logging.getLogger("jackfield").warning(what, one_line(error), checkpoint.step)
    return RunResult(folder=folder, steps=steps, stopped=trains and steps < config.schedule.steps)


@asynccontextmanager
async def serve_queue(config: RunConfig) -> AsyncIterator[tuple[QueueServer, Path]]:
    """Serve the controller of a run's queue, and yield the server and the file with its address.

    Raise a ``PluginError`` if the backend keeps values in a single process, ``run.folder-in-use`` if the controller is
    already served, and ``queue.store`` if the address is in use.
    """
    registry, clock, folder = discover(), Clock(), Path(config.folder) / "queue"
    check_plugins(config.with_address(), registry)
    hooks_of(config, registry)
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        stack.enter_context(folder_lock(folder))
        factory, file = WorkerFactory(config=config, registry=registry, clock=clock), folder / "address.json"
        queue = factory.queue(factory.backend())
        stack.push_async_callback(queue.close)
        await queue.start()
        server = QueueServer(queue, clock, config.deadlines.heartbeat)
        stack.push_async_callback(server.close)
        (await server.listen(config.queue.host, config.queue.port)).write(file)
        stack.callback(file.unlink, missing_ok=True)
        yield server, file


@contextmanager
def _reported(builder: RunBuilder, checkpoint: Checkpoint | None) -> Iterator[None]:
    """Notify the hooks of start and end, and write the traceback of a failure into the folder.

    A worker that died after a signal may have received the same signal, so this is no failure (``CancelledError``).
    """
    role, config, folder = builder.role, builder.role.config, Path(builder.role.config.folder)
    failure, stopped, first_step = None, False, 0 if checkpoint is None else checkpoint.step
    steps, plain = config.schedule.steps, as_plain(config)
    started = RunStarted(name=config.name, folder=str(folder), total_steps=steps, first_step=first_step, config=plain)
    role.hooks.emit(started)
    try:
        yield
    except asyncio.CancelledError:
        stopped = True  # by a signal or by the caller; this is no failure
        raise
    except BaseException as error:
        failure = _first(error, folder)
        if builder.stop.code is not None and isinstance(failure, WorkerLost):
            failure, stopped = None, True
            raise asyncio.CancelledError from error
        text = "".join(traceback.format_exception(error))
        with suppress(OSError):  # a full disk must not hide the failure
            (folder / "error.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
        if failure is error:
            raise
        raise failure from error
    finally:
        steps = max(first_step, role.progress.value)
        role.hooks.emit(RunEnded(folder=str(folder), steps=steps, error=failure, stopped=stopped))


def _first(error: BaseException, folder: Path) -> BaseException:
    """Return the error to show, taken from the exception groups in which task groups wrap it."""
    if isinstance(error, BaseExceptionGroup) and (lost := error.subgroup(WorkerLost)) is not None:
        error = lost  # other errors are consequences of that worker's death
    while isinstance(error, BaseExceptionGroup):
        ours = [inner for inner in error.exceptions if isinstance(inner, JackfieldError | BaseExceptionGroup)]
        error = (ours or list(error.exceptions))[0]
    if not isinstance(error, Exception) or isinstance(error, JackfieldError):
        return error
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        wrapped = storage_error(folder, error)
    else:
        fix = "the traceback is in error.txt in the run's folder"
        wrapped = RunError(f"{type(error).__name__}: {error}", fix=fix)
    wrapped.__cause__ = error
    return wrapped
