"""From a configuration to a run, or to one of its roles: refuse what can be refused, start, recover, end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import attrs

from jackfield.clock import Clock
from jackfield.compose.builder import RunBuilder
from jackfield.compose.checking import check_parts
from jackfield.compose.controller import distributed
from jackfield.compose.inline_workers import workers_maker
from jackfield.compose.inputs import Tasks, check_tokens, read_model, read_tasks
from jackfield.compose.mixing import check_rows
from jackfield.compose.resume import (
    DISK_ERRORS,
    StartingPoint,
    folder_lock,
    starting_point,
    storage_error,
    storage_errors,
)
from jackfield.compose.selection import check_plugins, import_plugins, manifests
from jackfield.compose.stopping import Stop
from jackfield.compose.worker_factory import WorkerFactory
from jackfield.config import RunConfig, as_plain, resolve_defaults, show
from jackfield.errors import ConfigError, JackfieldError, RunError, WorkerLost
from jackfield.files import replace_file
from jackfield.imports import collection_paused
from jackfield.observe import observers
from jackfield.plugins import Registry, discover, hook_manager, require_capability
from jackfield.plugins.hooks import RunEnded, RunStarted
from jackfield.runtime.workers import one_line
from jackfield.trainer import CheckpointStore, Role, RoleName


@attrs.frozen(kw_only=True)
class RunResult:
    """What a run, or one role of it, leaves behind."""

    folder: Path
    #: completed steps; of the role explore the newest weight version that it had, of the role reward the groups
    steps: int
    finished_before: bool = False  #: the folder held the finished run, and nothing was done
    stopped: bool = False  #: a signal has ended it before its last step; there is no model

    @property
    def model(self) -> Path:
        """A Hugging Face folder with the trained weights."""
        return self.folder / "model"


def run(
    config: RunConfig,
    *,
    role: RoleName = "all",
    hooks: Sequence[object] = (),
    registry: Registry | None = None,
    stop: Stop | None = None,
) -> RunResult:
    """Do a run, or one role of it, in this process.

    Args:
        config: what to do.
        role: all: the whole run. The others share a run whose queue has a controller in a process of its own. train:
            train on what explorers make. explore: make samples until every batch is trained on; any number of
            processes may do so, and come and go. reward: score samples; one process at a time does so.
        hooks: further listeners, beside those of the configuration.
        registry: the installed plugins; discovered when not given.
        stop: ends the run early; None: nothing does.

    Raises:
        JackfieldError: the error that ended the run. The folder keeps everything that was written before, and the
            same call goes on from the newest checkpoint; what an explorer had begun is made by others.
        CancelledError: ``stop`` has ended it before a step was done.
    """
    stop = stop or Stop(config.checkpoint.grace_seconds)
    with asyncio.Runner() as runner:
        return runner.run(stop.bounded(run_async(config, role=role, hooks=hooks, registry=registry, stop=stop)))


async def run_async(
    config: RunConfig,
    *,
    role: RoleName = "all",
    hooks: Sequence[object] = (),
    registry: Registry | None = None,
    clock: Clock | None = None,
    stop: Stop | None = None,
) -> RunResult:
    """Do the same inside of a running event loop."""
    registry, clock, stop = registry or discover(), clock or Clock(), stop or Stop(config.checkpoint.grace_seconds)
    config = _role_config(resolve_defaults(config), role)
    folder, trains = Path(config.folder), role in ("all", "train")
    hooks = [*observers(config.observe, folder, clock=clock), *hooks]
    prepared, tasks = _prepare(config, registry, hooks, role, clock)
    _make_folder(folder)
    with storage_errors(folder), nullcontext() if role == "explore" else folder_lock(folder):
        start = StartingPoint(store=CheckpointStore(folder / "checkpoints"), checkpoint=None, finished=False)
        if trains:
            start = starting_point(config, folder, tasks.digests)
        if start.finished:
            return RunResult(folder=folder, steps=start.step, finished_before=True)
        replace_file(folder / "config.yaml", show(config))
        async with AsyncExitStack() as processes:
            make_workers = workers_maker(WorkerFactory(config=config, registry=registry, clock=clock), processes)
            for left in reversed(range(config.checkpoint.max_recoveries + 1)):
                try:
                    steps = await _execute(RunBuilder(attrs.evolve(prepared), tasks, stop, make_workers), start)
                    break
                except WorkerLost as error:
                    if not left or not trains:
                        raise
                    start = _recovery(config, folder, error)
    return RunResult(folder=folder, steps=steps, stopped=trains and steps < config.schedule.steps)


async def _execute(builder: RunBuilder, start: StartingPoint) -> int:
    """Run the role once; hooks are notified of its start and end."""
    with _reported(builder, start.step), _one_compute_thread(builder.config):
        return await builder.execute(start)


@contextmanager
def _reported(builder: RunBuilder, first_step: int) -> Iterator[None]:
    """Notify the hooks of start and end, and leave the traceback of a failure in the folder.

    Raises:
        CancelledError: a signal has ended the run, or a worker, which had perhaps received the same signal, died
            after it.
    """
    config, hook, folder = builder.config, builder.role.hooks, Path(builder.config.folder)
    failure, stopped = None, False
    started = RunStarted(
        name=config.name,
        folder=str(folder),
        total_steps=config.schedule.steps,
        first_step=first_step,
        config=as_plain(config),
    )
    hook.run_started(event=started)
    try:
        yield
    except asyncio.CancelledError:
        stopped = True  # by a signal, or by the caller: nothing has failed
        raise
    except BaseException as error:
        failure = _first(error, folder)
        if builder.stop.code is not None and isinstance(failure, WorkerLost):
            failure, stopped = None, True
            raise asyncio.CancelledError from error
        text = "".join(traceback.format_exception(error))
        with suppress(OSError):  # a full disk must not hide what failed
            (folder / "error.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
        if failure is error:
            raise
        raise failure from error
    finally:
        steps = max(first_step, builder.role.progress.value)
        hook.run_ended(event=RunEnded(folder=str(folder), steps=steps, error=failure, stopped=stopped))


def _recovery(config: RunConfig, folder: Path, error: WorkerLost) -> StartingPoint:
    """Find where a run goes on, in this process, after the death of a worker that had state.

    Raises:
        WorkerLost: there is no checkpoint.
    """
    start = starting_point(attrs.evolve(config, checkpoint=attrs.evolve(config.checkpoint, resume=True)), folder)
    if start.checkpoint is None:
        raise error
    logging.getLogger("jackfield").warning("%s; the run goes on after step %d", one_line(error), start.step)
    return start


def _role_config(config: RunConfig, role: RoleName) -> RunConfig:
    """The configuration of a role: where its controller is, and a folder of its own within the run's."""
    if role == "all":
        if config.queue.rewards == "distributed":
            raise ConfigError(
                "in a run in one process, that process scores the samples",
                where="queue.rewards",
                expected="train",
                found="distributed",
                fix="remove the setting, or launch each role with --role",
            )
        return config
    config = distributed(config, role)
    if role == "explore":
        name = f"explorer-{socket.gethostname()}-{os.getpid()}"
        return attrs.evolve(config, name=name, folder=str(Path(config.folder) / "explorers" / name))
    if role == "reward":
        return attrs.evolve(config, name="rewards", folder=str(Path(config.folder) / "rewards"))
    return config


@collection_paused()
def _prepare(
    config: RunConfig, registry: Registry, hooks: Sequence[object], role: RoleName, clock: Clock
) -> tuple[Role, Tasks]:
    """Refuse what can be refused while the run's folder is as it was; what loads torch comes last."""
    check_plugins(config, registry)
    if role != "all":
        engine = registry.find("checkpoint_engine", config.checkpoint_engine.name)
        require_capability(engine, "retains_weights", "explorers come and go (--role)")
    here = config.cluster.name == "inline"  # else what runs in other processes is looked at there
    if here:
        import_plugins(config, registry, heavy=False)
    manager = hook_manager(hooks, manifests(config, registry))
    algorithm = check_parts(config, registry, manager)
    tasks, model = read_tasks(config, algorithm), read_model(config)
    _quiet_libraries()
    if here:
        check_tokens(config, tasks, model)
        import_plugins(config, registry, heavy=True)
    check_rows(config.mixing, explores=config.mode == "online")
    return Role(config=config, name=role, algorithm=algorithm, clock=clock, hooks=manager.hook), tasks


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "the run's folder cannot be made", where="folder", found=error, fix="choose another folder"
        ) from error


@contextmanager
def _one_compute_thread(config: RunConfig) -> Iterator[None]:
    """Engine and replicas share one device: their work goes through one thread, so that it never competes for cores."""
    if config.cluster.name != "inline":
        yield
        return
    import torch

    before = torch.get_num_threads()
    if config.cluster.threads is not None:
        torch.set_num_threads(config.cluster.threads)
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jackfield-compute")
    asyncio.get_running_loop().set_default_executor(pool)  # the loop shuts it down at its end
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _quiet_libraries() -> None:
    """What other libraries print beside a run's progress and tells its reader nothing."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # bars, which a log cannot show
    # every nested tensor that is made from its values asks for a deprecated flag of torch.fx
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def _first(error: BaseException, folder: Path) -> BaseException:
    """The error to show: task groups wrap what their tasks raised."""
    if isinstance(error, BaseExceptionGroup) and (lost := error.subgroup(WorkerLost)) is not None:
        error = lost  # what else failed missed that worker
    while isinstance(error, BaseExceptionGroup):
        ours = [inner for inner in error.exceptions if isinstance(inner, JackfieldError | BaseExceptionGroup)]
        error = (ours or list(error.exceptions))[0]
    if isinstance(error, Exception) and not isinstance(error, JackfieldError):
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            wrapped = storage_error(folder, error)
        else:
            text = f"{type(error).__name__}: {error}"
            wrapped = RunError(text, fix="the traceback is in error.txt in the run's folder")
        wrapped.__cause__ = error
        return wrapped
    return error
