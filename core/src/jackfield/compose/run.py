"""From a configuration to a run: build every part, start them, train, and end what was started."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import traceback
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import attrs

from jackfield.clock import Clock
from jackfield.compose.checking import check_parts
from jackfield.compose.controller import apart
from jackfield.compose.crew import MakeCrew, crew_maker
from jackfield.compose.export import export_model
from jackfield.compose.inputs import Tasks, check_tokens, read_model, read_tasks
from jackfield.compose.mixing import check_rows, mixed_rows
from jackfield.compose.parts import Role
from jackfield.compose.recipe import Recipe
from jackfield.compose.resume import (
    DISK_ERRORS,
    StartingPoint,
    folder_lock,
    mark_finished,
    starting_point,
    storage_error,
    storage_errors,
)
from jackfield.compose.selection import check_plugins, import_plugins, manifests
from jackfield.compose.separate import ExplorerParts, RewardParts
from jackfield.compose.stopping import Stop
from jackfield.compose.training import TrainerParts
from jackfield.compose.workers import WorkerFactory
from jackfield.config import RunConfig, as_plain, show
from jackfield.errors import ConfigError, JackfieldError, RunError, WorkerLost
from jackfield.files import replace_file
from jackfield.imports import collection_paused
from jackfield.observe import observers
from jackfield.plugins import HookManager, Registry, discover, hook_manager, require_capability
from jackfield.plugins.hooks import RunEnded, RunStarted
from jackfield.runtime.control import ControlServer
from jackfield.runtime.replica_metrics import ReplicaMetrics
from jackfield.runtime.replicas import Replicas
from jackfield.runtime.workers import one_line
from jackfield.trainer import Progress, post_finished, trainer_finished

__all__ = [
    "Explored",
    "Rewarded",
    "RunResult",
    "explore",
    "explore_async",
    "reward",
    "reward_async",
    "run",
    "run_async",
]


@attrs.frozen
class _Prepared:
    """What a run has before it begins."""

    hooks: HookManager
    recipe: Recipe
    tasks: Tasks


@attrs.frozen(kw_only=True)
class RunResult:
    """What a run leaves behind."""

    folder: Path
    model: Path  #: a Hugging Face folder with the trained weights
    steps: int
    finished_before: bool = False  #: the folder held the finished run, and nothing was done
    stopped: bool = False  #: a signal has ended it before its last step; there is no model


@attrs.frozen(kw_only=True)
class Rewarded:
    """What rewards by themselves leave behind."""

    folder: Path
    groups: int  #: that were rewarded


@attrs.frozen(kw_only=True)
class Explored:
    """What an explorer leaves behind."""

    folder: Path
    version: int  #: of the newest weights that it had


def run(
    config: RunConfig,
    *,
    hooks: Sequence[object] = (),
    registry: Registry | None = None,
    role: Literal["all", "train"] = "all",
    stop: Stop | None = None,
) -> RunResult:
    """Do a run in this process.

    Args:
        config: what to do.
        hooks: further listeners, beside those of the configuration.
        registry: the installed plugins; discovered when not given.
        role: train: explorers are launched separately (:func:`explore`), and so is the queue's controller.
        stop: ends the run early; None: nothing does.

    Raises:
        JackfieldError: whatever ended the run; the folder keeps everything written before, and the same call goes on
            from the newest checkpoint.
        CancelledError: ``stop`` has ended it before a step was done.
    """
    stop = stop or Stop(config.checkpoint.grace)
    with asyncio.Runner() as runner:
        return runner.run(stop.bounded(run_async(config, hooks=hooks, registry=registry, role=role, stop=stop)))


async def run_async(
    config: RunConfig,
    *,
    hooks: Sequence[object] = (),
    registry: Registry | None = None,
    clock: Clock | None = None,
    role: Literal["all", "train"] = "all",
    stop: Stop | None = None,
) -> RunResult:
    """The same inside of a running event loop."""
    registry, clock, stop = registry or discover(), clock or Clock(), stop or Stop(config.checkpoint.grace)
    if role == "all" and config.queue.controller.rewards == "apart":
        raise ConfigError(
            "nobody scores the samples of a run in one process but that process",
            where="queue.controller.rewards",
            expected="train",
            found="apart",
            fix="remove the setting, or launch each role with --role",
        )
    config = config if role == "all" else apart(config, role)
    folder = Path(config.folder)
    prepared = _prepare(config, registry, [*observers(config.observe, folder, clock=clock), *hooks], role)
    _make_folder(folder)
    with storage_errors(folder), folder_lock(folder):
        start = starting_point(config, folder, prepared.tasks.digests)
        if start.finished:
            return RunResult(folder=folder, model=folder / "model", steps=start.step, finished_before=True)
        replace_file(folder / "config.yaml", show(config))
        async with AsyncExitStack() as processes:
            make = WorkerFactory(config=config, registry=registry, clock=clock)
            make_crew = crew_maker(make, processes)
            for _ in range(config.runtime.ray.recoveries):
                try:
                    return await _run(config, prepared, make_crew, clock, start, stop, role)
                except WorkerLost as error:
                    start = _recovery(config, folder, error)
            return await _run(config, prepared, make_crew, clock, start, stop, role)


def explore(
    config: RunConfig, *, hooks: Sequence[object] = (), registry: Registry | None = None, stop: Stop | None = None
) -> Explored:
    """Explore for a trainer in another process, until every batch of the schedule is trained on.

    Any number of processes may do so, and come and go. Each has a folder of its own in the run's.

    Args:
        config: the run's.
        hooks: further listeners, beside those of the configuration.
        registry: the installed plugins; discovered when not given.
        stop: ends it early; None: nothing does.

    Raises:
        JackfieldError: whatever ended it; what it had begun is made by others.
        CancelledError: ``stop`` has ended it.
    """
    stop = stop or Stop(config.checkpoint.grace)
    with asyncio.Runner() as runner:
        return runner.run(stop.bounded(explore_async(config, hooks=hooks, registry=registry, stop=stop)))


async def explore_async(
    config: RunConfig,
    *,
    hooks: Sequence[object] = (),
    registry: Registry | None = None,
    clock: Clock | None = None,
    stop: Stop | None = None,
) -> Explored:
    """The same inside of a running event loop."""
    registry, clock, stop = registry or discover(), clock or Clock(), stop or Stop(config.checkpoint.grace)
    name = f"explorer-{socket.gethostname()}-{os.getpid()}"
    folder = Path(config.folder) / "explorers" / name
    config = attrs.evolve(apart(config, "explore"), name=name, folder=str(folder))
    prepared = _prepare(config, registry, [*observers(config.observe, folder, clock=clock), *hooks], "explore")
    _make_folder(folder)
    with storage_errors(folder):
        replace_file(folder / "config.yaml", show(config))
        async with AsyncExitStack() as processes:
            make_crew = crew_maker(WorkerFactory(config=config, registry=registry, clock=clock), processes)
            hook = prepared.hooks.hook
            parts = ExplorerParts(config, prepared.recipe, prepared.tasks, make_crew, hook, clock, "explore")
            await _told(config, prepared.hooks, 0, parts.version, _explore(parts, stop), stop)
    return Explored(folder=folder, version=parts.version.value)


def reward(
    config: RunConfig, *, hooks: Sequence[object] = (), registry: Registry | None = None, stop: Stop | None = None
) -> Rewarded:
    """Reward for a trainer in another process, until it has done its last step.

    One process does so at a time; another one that comes after its death goes on where it was.

    Args:
        config: the run's, with ``queue.controller.rewards: apart``.
        hooks: further listeners, beside those of the configuration.
        registry: the installed plugins; discovered when not given.
        stop: ends it early; None: nothing does.

    Raises:
        RunError: ``run.folder-in-use``: another process rewards for this run.
        JackfieldError: whatever ended it.
        CancelledError: ``stop`` has ended it.
    """
    stop = stop or Stop(config.checkpoint.grace)
    with asyncio.Runner() as runner:
        return runner.run(stop.bounded(reward_async(config, hooks=hooks, registry=registry, stop=stop)))


async def reward_async(
    config: RunConfig,
    *,
    hooks: Sequence[object] = (),
    registry: Registry | None = None,
    clock: Clock | None = None,
    stop: Stop | None = None,
) -> Rewarded:
    """The same inside of a running event loop."""
    registry, clock, stop = registry or discover(), clock or Clock(), stop or Stop(config.checkpoint.grace)
    folder = Path(config.folder) / "rewards"
    config = attrs.evolve(apart(config, "reward"), name="rewards", folder=str(folder))
    prepared = _prepare(config, registry, [*observers(config.observe, folder, clock=clock), *hooks], "reward")
    _make_folder(folder)
    with storage_errors(folder), folder_lock(folder):
        replace_file(folder / "config.yaml", show(config))
        async with AsyncExitStack() as processes:
            make_crew = crew_maker(WorkerFactory(config=config, registry=registry, clock=clock), processes)
            hook = prepared.hooks.hook
            parts = RewardParts(config, prepared.recipe, prepared.tasks, make_crew, hook, clock, "reward")
            groups = await _told(config, prepared.hooks, 0, parts.steps_done, _reward(parts, stop), stop)
    return Rewarded(folder=folder, groups=groups)


async def _reward(parts: RewardParts, stop: Stop) -> None:
    """Build, reward until the trainer has finished; end everything in reverse order, whatever happens."""
    seconds = parts.config.deadlines.batch + parts.config.deadlines.engine
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        pipeline = await parts.build(stack)
        stop.begun()
        rewarding = tasks.create_task(pipeline.run())
        await trainer_finished(parts.queue, lambda: pipeline.groups, seconds)
        rewarding.cancel()
        parts.queue.done = True
    await parts.steps_done.advance(pipeline.groups)


async def _explore(parts: ExplorerParts, stop: Stop) -> None:
    """Build, follow the trainer's weights, explore; end everything in reverse order, whatever happens."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        run = await parts.build(stack)
        stop.begun()
        background = [tasks.create_task(part()) for part in (run.replicas.keep, run.weights.run)]
        await run.weights.first(parts.config.deadlines.batch)
        await _open_control(stack, parts.config, run.replicas, parts.clock)
        await run.explorer.run()
        parts.queue.done = True
        for task in background:
            task.cancel()


def _recovery(config: RunConfig, folder: Path, error: WorkerLost) -> StartingPoint:
    """Where a run goes on, in this process, after the death of a worker that had state.

    Raises:
        WorkerLost: there is no checkpoint.
    """
    start = starting_point(attrs.evolve(config, checkpoint=attrs.evolve(config.checkpoint, resume=True)), folder)
    if start.checkpoint is None:
        raise error
    logging.getLogger("jackfield").warning("%s; the run goes on after step %d", one_line(error), start.step)
    return start


async def _run(
    config: RunConfig,
    prepared: _Prepared,
    make_crew: MakeCrew,
    clock: Clock,
    start: StartingPoint,
    stop: Stop,
    role: Literal["all", "train"],
) -> RunResult:
    folder, hooks = Path(config.folder), prepared.hooks
    parts = TrainerParts(config, prepared.recipe, prepared.tasks, make_crew, hooks.hook, clock, start.store, stop, role)
    steps = await _told(config, hooks, start.step, parts.steps_done, _train(parts, folder, start), stop)
    return RunResult(folder=folder, model=folder / "model", steps=steps, stopped=steps < config.schedule.steps)


async def _told(
    config: RunConfig,
    manager: HookManager,
    first_step: int,
    done: Progress,
    work: Coroutine[Any, Any, None],
    stop: Stop,
) -> int:
    """Tell the hooks of beginning and end, and leave the traceback of a failure in the folder; the steps done.

    Raises:
        CancelledError: a signal has ended it, or a worker, which had perhaps got the same signal, died after it.
    """
    folder, failure, stopped = Path(config.folder), None, False
    started = RunStarted(
        name=config.name,
        folder=str(folder),
        total_steps=config.schedule.steps,
        first_step=first_step,
        config=as_plain(config),
    )
    manager.hook.run_started(event=started)
    try:
        with _one_compute_thread(config):
            await work
    except asyncio.CancelledError:
        stopped = True  # by a signal, or by the caller: nothing has failed
        raise
    except BaseException as error:
        failure = _first(error, folder)
        if stop.code is not None and isinstance(failure, WorkerLost):
            failure, stopped = None, True
            raise asyncio.CancelledError from error
        text = "".join(traceback.format_exception(error))
        with suppress(OSError):  # a full disk must not hide what failed
            (folder / "error.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
        if failure is error:
            raise
        raise failure from error
    finally:
        steps = max(first_step, done.value)
        manager.hook.run_ended(event=RunEnded(folder=str(folder), steps=steps, error=failure, stopped=stopped))
    return steps


@collection_paused()
def _prepare(config: RunConfig, registry: Registry, hooks: Sequence[object], role: Role) -> _Prepared:
    """Everything that can be refused while the run's folder is as it was; what loads torch comes last."""
    check_plugins(config, registry)
    if role != "all":
        engine = registry.find("checkpoint_engine", config.checkpoint_engine.name)
        require_capability(engine, "late", "explorers come and go (--role)")
    here = config.runtime.name == "inline"  # else what runs in other processes is looked at there
    if here:
        import_plugins(config, registry, heavy=False)
    manager = hook_manager(hooks, manifests(config, registry))
    recipe = check_parts(config, registry, manager)
    tasks, model = read_tasks(config, recipe), read_model(config)
    _quiet_libraries()
    if here:
        check_tokens(config, tasks, model)
        import_plugins(config, registry, heavy=True)
    check_rows(config.queue, explores=config.mode == "both")
    return _Prepared(manager, recipe, tasks)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "the run's folder cannot be made", where="folder", found=error, fix="choose another folder"
        ) from error


async def _train(parts: TrainerParts, folder: Path, start: StartingPoint) -> None:
    """Build, start or go on, train, save; end everything in reverse order, whatever happens."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        run = await parts.build(stack)
        watching = [tasks.create_task(part()) for part in run.watch]
        restored, mixed = None, mixed_rows(parts.config.queue, parts.queue)
        if start.checkpoint is None:
            await parts.queue.clear(folder / "queue" / "empty")
            for rows in mixed:
                await rows.put()
        else:
            restored = await run.checkpointer.load(start.checkpoint)
        await run.trainer.begin(start.step, restored)
        if run.replicas is not None:
            await _open_control(stack, parts.config, run.replicas, parts.clock)
        loops = (*run.background, *(rows.keep for rows in mixed))
        background = [tasks.create_task(part()) for part in loops]
        with parts.stop.boundary("with a checkpoint after this step"):
            steps = await run.trainer.run(start.step)
            if steps == parts.config.schedule.steps:
                await export_model(run.actor, folder / "model")
                if parts.role == "train":
                    await post_finished(parts.queue, steps)
                mark_finished(folder, steps)
                parts.queue.done = True
        for task in (*background, *watching):
            task.cancel()


async def _open_control(stack: AsyncExitStack, config: RunConfig, replicas: Replicas, clock: Clock) -> None:
    """Let other processes ask for the replicas."""
    told, port = {}, config.runtime.metrics_port
    if port is not None:
        metrics = ReplicaMetrics(replicas, port)
        stack.push_async_callback(metrics.close)
        told["metrics"] = await metrics.open()
    control = ControlServer(Path(config.folder), replicas, clock)
    stack.push_async_callback(control.close)
    await control.open(**told)


@contextmanager
def _one_compute_thread(config: RunConfig) -> Iterator[None]:
    """Engine and replicas share one device: their work goes through one thread, so that it never competes for cores."""
    if config.runtime.name != "inline":
        yield
        return
    import torch

    before = torch.get_num_threads()
    if config.runtime.threads is not None:
        torch.set_num_threads(config.runtime.threads)
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
