"""From a configuration to a run: build every part, start them, train, and end what was started."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import attrs

from jackfield.algorithms import register_part
from jackfield.clock import Clock
from jackfield.compose.parts import Parts
from jackfield.config import RunConfig, as_plain, plugin_sections, show, validate_plugins
from jackfield.errors import JackfieldError, RunError
from jackfield.observe import listeners
from jackfield.plugins import Manifest, Registry, discover, hook_manager
from jackfield.plugins.hooks import RunEnded, RunStarted
from jackfield.runtime.engine_group import EngineGroup

__all__ = ["RunResult", "run", "run_async"]


@attrs.frozen(kw_only=True)
class RunResult:
    """What a run leaves behind."""

    folder: Path
    model: Path  #: a Hugging Face folder with the trained weights
    steps: int


def run(config: RunConfig, *, hooks: Sequence[object] = (), registry: Registry | None = None) -> RunResult:
    """Do a whole run in this process.

    Args:
        config: what to do.
        hooks: further listeners, beside those of the configuration.
        registry: the installed plugins; discovered when not given.

    Raises:
        JackfieldError: whatever ended the run; the folder keeps everything written before.
    """
    with asyncio.Runner() as runner:
        return runner.run(run_async(config, hooks=hooks, registry=registry))


async def run_async(
    config: RunConfig, *, hooks: Sequence[object] = (), registry: Registry | None = None, clock: Clock | None = None
) -> RunResult:
    """The same inside of a running event loop."""
    registry = registry or discover()
    validate_plugins(config, registry)
    _load_plugins(config, registry)
    clock = clock or Clock()
    _quiet_libraries()
    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(show(config), encoding="utf-8")
    manager = hook_manager([*listeners(config.observe, folder, clock=clock), *hooks], _manifests(config, registry))
    manager.hook.register_parts(register=register_part)
    failure: BaseException | None = None
    steps = 0
    started = RunStarted(
        name=config.name,
        folder=str(folder),
        total_steps=config.schedule.steps,
        first_step=0,
        config=as_plain(config),
    )
    manager.hook.run_started(event=started)
    try:
        with _one_compute_thread(config):
            steps = await _train(Parts(config, registry, manager.hook, clock), folder)
    except BaseException as error:
        failure = _first(error)
        text = "".join(traceback.format_exception(error))
        (folder / "error.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
        if failure is error:
            raise
        raise failure from error
    finally:
        manager.hook.run_ended(event=RunEnded(folder=str(folder), steps=steps, error=failure))
    return RunResult(folder=folder, model=folder / "model", steps=steps)


def _load_plugins(config: RunConfig, registry: Registry) -> None:
    """Gate 2 for every plugin of the run before anything is begun; those that import torch come last."""
    chosen = [(kind, getattr(config, section).name) for section, kind in plugin_sections().items()]
    for kind, name in sorted(chosen, key=lambda each: each[0] in ("engine", "rollout")):
        registry.load(kind, name)


async def _train(parts: Parts, folder: Path) -> int:
    """Build, start, train, save; end everything in reverse order, whatever happens."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        with (folder / "ledger.jsonl").open("w", encoding="utf-8") as ledger:
            run = await parts.build(stack, lambda entry: print(json.dumps(entry), file=ledger))
            background = [tasks.create_task(part.run()) for part in run.background]
            steps = await run.trainer.run()
            await _export(run.actor, folder / "model")
            for task in background:
                task.cancel()
    return steps


async def _export(actor: EngineGroup, model: Path) -> None:
    """Write the model beside its place, then put it there: an earlier run's model is replaced by a whole one."""
    partial = model.with_name(f"{model.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    await actor.save(str(partial), "huggingface")
    shutil.rmtree(model, ignore_errors=True)
    partial.replace(model)


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
