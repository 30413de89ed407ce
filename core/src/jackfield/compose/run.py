"""Execution of a run or of one of its roles, and its folder."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import shutil
import socket
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from jackfield.clock import Clock
from jackfield.compose.builder import RunBuilder, Stop
from jackfield.compose.capabilities import check_capabilities
from jackfield.compose.checks import check_plugins, check_settings, hooks_of, prepare
from jackfield.compose.libraries import with_model_folders
from jackfield.compose.modes import check_stages
from jackfield.compose.workers import WorkerFactory
from jackfield.config import RunConfig, as_plain, plugin_settings, resolve_defaults, show
from jackfield.data.tasks import TaskSet
from jackfield.errors import ConfigError, JackfieldError, RunError, WorkerLost
from jackfield.files import replace_file
from jackfield.observe import observers
from jackfield.plugins import Registry, discover
from jackfield.plugins.hooks import RunEnded, RunStarted
from jackfield.queue.store import STORE_FILE, check_ledger
from jackfield.queue.transfer_queue import QueueServer
from jackfield.runtime.workers import one_line
from jackfield.sdk.archive import NAME_FILE
from jackfield.settings import flatten
from jackfield.trainer.checkpoint import FINISHED_FILE, Checkpoint, CheckpointStore, disk_error, is_finished
from jackfield.trainer.role import RoleName

#: Error numbers that come from a disk rather than from a connection or a program.
_DISK_ERRORS = frozenset({errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EROFS})

#: Settings that may change between two starts of a run, because they do not affect what is learnt. Paths of data may
#: change because the contents are compared.
_FREE = (
    "name folder observe deadlines reward_service checkpoint cluster environments checkpoint_engine log_prob_check "
    "schedule.steps schedule.until evaluation.every profile queue.address queue.archive queue.durable queue.host "
    "queue.max_bytes queue.max_samples queue.port queue.rewards transfer_queue data.train data.eval data.expert "
    "data.samples data.pipeline.maximum_set_aside"
)


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
    builder: Callable[..., RunBuilder] = RunBuilder,
) -> RunResult:
    """Execute a run, or one role of it, in this process.

    The role "all" is the whole run. Other roles share a run whose queue controller is in a separate process. "train"
    trains on the explorers' samples. "explore" makes samples until every batch is trained on; any number of processes
    may do it, and join or leave at any time. "reward" scores samples, in one process at a time. ``hooks`` are listeners
    in addition to those of the configuration. The registry has the installed plugins; by default they are discovered.
    ``stop`` requests an early end; without it, the run cannot be stopped early. ``builder`` makes what does the work.

    The error that ended the run is raised. The folder keeps what was written, and the same call resumes from the newest
    checkpoint. Other explorers take over the batches of one that failed. If ``stop`` ends the run before a step is
    completed, ``CancelledError`` is raised.
    """
    stop = stop or Stop(config.checkpoint.grace_seconds)
    with asyncio.Runner() as runner:
        return runner.run(stop.bounded(_run(config, role, hooks, registry or discover(), partial(builder, stop=stop))))


def run_stages(stages: Mapping[str, RunConfig], say: Callable[[str], None], **options: Any) -> RunResult:
    """Run stages in order with the ``options`` of :func:`run`, finished ones not again; ``say`` gets a line for each.

    Errors of all stages are raised before the first one starts, which is checked with the model that it starts from.
    """
    registry, (first, *later) = discover(), stages.values()

    def start(config: RunConfig) -> None:
        coming = config.model.path in {f"{each.folder}/model" for each in stages.values()}  # an earlier stage makes it
        model = attrs.evolve(config.model, path=first.model.path if coming else config.model.path)
        prepare(with_model_folders(attrs.evolve(config, model=model)), registry, (), "all", Clock())

    checks: Sequence[Callable[[RunConfig], object]] = (partial(check_settings, registry=registry), start)
    for check in checks if later else ():
        check_stages(stages, check)
    trained = ""  #: the model that a stage has just changed
    for number, (name, config) in enumerate(stages.items(), 1):
        if config.model.path == trained and Path(config.folder, "config.yaml").exists():
            what, fix = (
                "the stage began with an earlier model of the one before it",
                f"remove the folder {config.folder}",
            )
            raise RunError(what, code="run.changed", where=f"stage {name}", expected="a new folder", fix=fix)
        if later:
            say(f"stage {number} of {len(stages)}: {name}, in {config.folder}")
        if (result := run(config, registry=registry, **options)).stopped:
            break
        trained = "" if result.finished_before else f"{config.folder}/model"
    return result


async def _run(config: RunConfig, role: RoleName, hooks: Sequence[object], registry: Registry, build: Any) -> RunResult:
    clock, config = Clock(), with_model_folders(resolve_defaults(config).of_role(role))
    folder, trains, checkpoint = Path(config.folder), role in ("all", "train"), None
    prepared = prepare(config, registry, [*observers(config.observe, folder, clock=clock), *hooks], role, clock)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "choose another folder"
        raise ConfigError("the run's folder cannot be made", where="folder", found=error, fix=fix) from error
    with storage_errors(folder), nullcontext() if role == "explore" else folder_lock(folder):
        if trains:
            checkpoint = starting_point(config, prepared.tasks)
        if checkpoint is not None and is_finished(config, checkpoint):
            return RunResult(folder=folder, steps=checkpoint.step, finished_before=True)
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
                fresh = attrs.evolve(prepared)
                builder = build(role=fresh, factory=factory, make_workers=make_workers)
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
    return RunResult(folder=folder, steps=steps, stopped=trains and steps < fresh.schedule.steps)


@asynccontextmanager
async def serve_queue(config: RunConfig) -> AsyncIterator[tuple[QueueServer, Path]]:
    """Serve the controller of a run's queue, and yield the server and the file with its address.

    Raise a ``PluginError`` if the backend keeps values in a single process, ``run.folder-in-use`` if the controller is
    already served, and ``queue.store`` if the address is in use.
    """
    registry, clock, folder = discover(), Clock(), Path(config.folder) / "queue"
    check_plugins(served := config.with_address(), registry)
    plugin_settings(served, registry)
    check_capabilities(served, registry)
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


def starting_point(config: RunConfig, tasks: Mapping[str, TaskSet]) -> Checkpoint | None:
    """Return the newest undamaged checkpoint to resume from; remove unfinished ones.

    Without ``checkpoint.resume``, earlier state is removed without being read. Errors leave the folder unchanged:
    ``run.changed`` if it belongs to a different run, ``queue.ledger`` if the ledger is not the one that the checkpoint
    knows, and those of :meth:`CheckpointStore.newest`.
    """
    folder, served = Path(config.folder), config.queue.address is not None
    store = CheckpointStore(folder / "checkpoints", config.checkpoint.keep)
    if not config.checkpoint.resume:
        store.clean(everything=True)
        if not served and (folder / "queue").is_dir():  # a served controller uses the folder
            for path in (folder / "queue").iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != NAME_FILE:  # servers know the queue by this name
                    path.unlink()

    def check(found: Checkpoint) -> None:
        _check_same(found, config, tasks)
        if not served:
            check_ledger(folder / "queue" / STORE_FILE, found.folder / "queue" / STORE_FILE)

    checkpoint = store.newest(check=check) if store.folders() else None
    store.clean()
    if not is_finished(config, checkpoint):
        for name in (FINISHED_FILE, "error.txt"):
            (folder / name).unlink(missing_ok=True)
    return checkpoint


def _check_same(checkpoint: Checkpoint, config: RunConfig, tasks: Mapping[str, TaskSet]) -> None:
    """Raise if settings or data differ from those of the checkpoint's run."""
    state, steps, changed = checkpoint.state(), config.schedule.steps, list[tuple[str, str, str]]()
    before, now = flatten(state["config"]), flatten(as_plain(config))
    for path in {**before, **now}:
        old, new = before.get(path), now.get(path)
        corrects = path == "log_prob_check.on_mismatch" and "correct" in (old, new)  # this changes what is learnt
        free = not corrects and any(f"{path}.".startswith(f"{free}.") for free in _FREE.split())
        if old != new and not free:
            changed.append((path, repr(old), repr(new)))
    if checkpoint.step > steps:
        changed.append(("schedule.steps", f"{checkpoint.step} or more: so many are done", f"{steps}"))
    for which, digest in state["data"].items():
        if which in tasks and digest != tasks[which].digest:
            where = f"data.{which}" if hasattr(config.data, which) else f"evaluation.sets.{which}.file"
            changed.append((where, f"records of digest {digest}", tasks[which].digest))
    for path, expected, found in changed[:1]:
        what = "the folder holds a run with other settings, and results of both would be mixed"
        where, fix = f"{path}, {checkpoint.folder}", "give the run another folder, or the settings it had; "
        fix += "checkpoint.resume=false removes what is there and starts from the beginning"
        raise RunError(what, code="run.changed", where=where, expected=expected, found=found, fix=fix)


@contextmanager
def folder_lock(folder: Path, user: str = "run") -> Iterator[None]:
    """Lock the folder for this process, or raise ``run.folder-in-use`` with the process that holds it.

    The lock ends with the process, even if it is killed.
    """
    with (folder / ".lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read() or "a process that does not say who it is"
            what, fix = (
                f"another {user} is using this folder",
                f"wait for it, end it, or give this {user} another folder",
            )
            raise RunError(what, code="run.folder-in-use", where=str(folder), found=holder, fix=fix) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


@contextmanager
def _reported(builder: RunBuilder, checkpoint: Checkpoint | None) -> Iterator[None]:
    """Notify the hooks of start and end, and write the traceback of a failure into the folder.

    A worker that died after a signal may have received the same signal, so this is no failure (``CancelledError``).
    """
    role, config, folder = builder.role, builder.role.config, Path(builder.role.config.folder)
    failure, stopped, first_step = None, False, 0 if checkpoint is None else checkpoint.step
    plain, steps = as_plain(config), config.schedule.steps
    sets = role.tasks.items()
    notes = tuple(f"{name} tasks: {note}" for name, each in sets for note in each.notes)
    shown: dict[str, Any] = {"first_step": first_step, "config": plain, "notes": notes}
    started = RunStarted(name=config.name, folder=str(folder), total_steps=steps, **shown)
    role.hooks.emit(started)
    try:
        yield
        stopped = role.trains and max(first_step, role.steps_done.value) < role.schedule.steps
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
        steps = max(first_step, (role.version if role.name == "explore" else role.steps_done).value)
        counted = "groups scored" if role.name == "reward" else "steps"
        role.hooks.emit(RunEnded(folder=str(folder), steps=steps, counted=counted, error=failure, stopped=stopped))


def _first(error: BaseException, folder: Path) -> BaseException:
    """Return the error to show, taken from the exception groups in which task groups wrap it."""
    if isinstance(error, BaseExceptionGroup) and (lost := error.subgroup(WorkerLost)) is not None:
        error = lost  # other errors are consequences of that worker's death
    while isinstance(error, BaseExceptionGroup):
        ours = [inner for inner in error.exceptions if isinstance(inner, JackfieldError | BaseExceptionGroup)]
        error = (ours or list(error.exceptions))[0]
    if not isinstance(error, Exception) or isinstance(error, JackfieldError):
        return error
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        wrapped = storage_error(folder, error)
    else:
        fix = "the traceback is in error.txt in the run's folder"
        wrapped = RunError(f"{type(error).__name__}: {error}", fix=fix)
    wrapped.__cause__ = error
    return wrapped


def storage_error(folder: Path, error: OSError) -> RunError:
    """Return the error ``run.storage`` for a disk that fails."""
    how = "goes on from the newest checkpoint; or choose another folder"
    return disk_error("the run's folder cannot be written", "run.storage", folder, error, how)


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turn an ``OSError`` into ``run.storage``."""
    try:
        yield
    except OSError as error:
        raise storage_error(folder, error) from error
