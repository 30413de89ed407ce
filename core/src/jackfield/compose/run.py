"""From a configuration to a run: build every part, start them, train, and end what was started."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import attrs

from jackfield.algorithms import register_part
from jackfield.clock import Clock
from jackfield.compose.export import export_model
from jackfield.compose.parts import Parts
from jackfield.compose.resume import StartingPoint, check_data, folder_lock, mark_finished, starting_point
from jackfield.config import RunConfig, as_plain, plugin_sections, show, validate_plugins
from jackfield.errors import JackfieldError, RunError
from jackfield.observe import listeners
from jackfield.plugins import Manifest, Registry, discover, hook_manager
from jackfield.plugins.hooks import RunEnded, RunStarted
from jackfield.trainer import Ledger

__all__ = ["RunResult", "run", "run_async"]


@attrs.frozen(kw_only=True)
class RunResult:
    """What a run leaves behind."""

    folder: Path
    model: Path  #: a Hugging Face folder with the trained weights
    steps: int
    finished_before: bool = False  #: the folder held the finished run, and nothing was done


def run(config: RunConfig, *, hooks: Sequence[object] = (), registry: Registry | None = None) -> RunResult:
    """Do a whole run in this process.

    Args:
        config: what to do.
        hooks: further listeners, beside those of the configuration.
        registry: the installed plugins; discovered when not given.

    Raises:
        JackfieldError: whatever ended the run; the folder keeps everything written before, and the same call goes on
            from the newest checkpoint.
    """
    with asyncio.Runner() as runner:
        return runner.run(run_async(config, hooks=hooks, registry=registry))


async def run_async(
    config: RunConfig, *, hooks: Sequence[object] = (), registry: Registry | None = None, clock: Clock | None = None
) -> RunResult:
    """The same inside of a running event loop."""
    registry = registry or discover()
    validate_plugins(config, registry)
    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder):
        start = starting_point(config, folder)
        if start.finished:
            return RunResult(folder=folder, model=folder / "model", steps=start.step, finished_before=True)
        _load_plugins(config, registry)
        (folder / "config.yaml").write_text(show(config), encoding="utf-8")
        return await _run(config, hooks, registry, clock or Clock(), start)


async def _run(
    config: RunConfig, hooks: Sequence[object], registry: Registry, clock: Clock, start: StartingPoint
) -> RunResult:
    """Tell the hooks of beginning and end, and leave the traceback of a failure in the folder."""
    folder = Path(config.folder)
    _quiet_libraries()
    manager = hook_manager([*listeners(config.observe, folder, clock=clock), *hooks], _manifests(config, registry))
    manager.hook.register_parts(register=register_part)
    parts: Parts | None = None
    failure: BaseException | None = None
    started = RunStarted(
        name=config.name,
        folder=str(folder),
        total_steps=config.schedule.steps,
        first_step=start.step,
        config=as_plain(config),
    )
    manager.hook.run_started(event=started)
    try:
        parts = Parts(config, registry, manager.hook, clock, start.store)
        with _one_compute_thread(config):
            await _train(parts, folder, start)
    except BaseException as error:
        failure = _first(error)
        text = "".join(traceback.format_exception(error))
        with suppress(OSError):  # a full disk must not hide what failed
            (folder / "error.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
        if failure is error:
            raise
        raise failure from error
    finally:
        steps = start.step if parts is None else max(start.step, parts.steps_done.value)
        manager.hook.run_ended(event=RunEnded(folder=str(folder), steps=steps, error=failure))
    return RunResult(folder=folder, model=folder / "model", steps=steps)


def _load_plugins(config: RunConfig, registry: Registry) -> None:
    """Gate 2 for every plugin of the run before anything is begun; those that import torch come last."""
    chosen = [(kind, getattr(config, section).name) for section, kind in plugin_sections().items()]
    for kind, name in sorted(chosen, key=lambda each: each[0] in ("engine", "rollout")):
        registry.load(kind, name)


async def _train(parts: Parts, folder: Path, start: StartingPoint) -> None:
    """Build, start or go on, train, save; end everything in reverse order, whatever happens."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        ledger = Ledger(folder / "ledger.jsonl", resume=start.checkpoint is not None)
        stack.callback(ledger.close)
        run = await parts.build(stack, ledger)
        restored = None
        if start.checkpoint is not None:
            check_data(start.checkpoint, run.data)
            restored = await run.checkpointer.load(start.checkpoint)
        await run.trainer.begin(start.step, restored)
        background = [tasks.create_task(part.run()) for part in run.background]
        steps = await run.trainer.run(start.step)
        await export_model(run.actor, folder / "model")
        mark_finished(folder, steps)
        for task in background:
            task.cancel()


@contextmanager
def _one_compute_thread(config: RunConfig) -> Iterator[None]:
    """Engine and replicas share one device: their work goes through one thread, so that it never competes for cores."""
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


def _first(error: BaseException) -> BaseException:
    """The error to show: task groups wrap what their tasks raised."""
    while isinstance(error, BaseExceptionGroup):
        ours = [inner for inner in error.exceptions if isinstance(inner, JackfieldError | BaseExceptionGroup)]
        error = (ours or list(error.exceptions))[0]
    if isinstance(error, Exception) and not isinstance(error, JackfieldError):
        wrapped = RunError(f"{type(error).__name__}: {error}", fix="the traceback is in error.txt in the run's folder")
        wrapped.__cause__ = error
        return wrapped
    return error


def _manifests(config: RunConfig, registry: Registry) -> list[Manifest]:
    return [registry.find(kind, getattr(config, section).name) for section, kind in plugin_sections().items()]
