"""What a checkpoint of a run holds, and how a run is put back to where one was cut."""

from __future__ import annotations

import asyncio
import base64
import platform
import random
import shutil
import sys
from collections.abc import Mapping
from typing import Any

import attrs

from jackfield import __version__
from jackfield.errors import JackfieldError, RunError, WorkerLost
from jackfield.plugins.hooks import CheckpointSaved
from jackfield.runtime.engine_group import EngineGroup
from jackfield.runtime.samples import TRAIN
from jackfield.trainer.checkpoint_store import Checkpoint, CheckpointStore
from jackfield.trainer.role import Role


@attrs.define(kw_only=True, eq=False)
class Checkpointer:
    """Saves and loads everything that a run consists of: engines, queue, random state."""

    role: Role
    store: CheckpointStore
    engines: Mapping[str, EngineGroup]  #: by role: those that are trained
    description: Mapping[str, Any]  #: of the run, for who resumes it: configuration, digests of the data
    saved: int = attrs.field(default=0, init=False)  #: steps in the newest checkpoint
    _random: Mapping[str, Any] = attrs.field(factory=dict, init=False)  #: at the end of the last step

    def is_due(self, steps_done: int) -> bool:
        """Return whether a checkpoint is written after ``steps_done`` steps."""
        settings, schedule = self.role.config.checkpoint, self.role.schedule
        return schedule.is_due(settings.every, steps_done) or (settings.at_end and steps_done == schedule.steps)

    def note_random_state(self) -> None:
        """Remember this process's generators as they are at the end of a step, before the next one is begun."""
        self._random = random_state()

    async def save(self, steps: int, trainer: Mapping[str, Any], *, again_from: int | None = None) -> None:
        """Write a checkpoint after ``steps`` completed steps; then it is durable, and their acks are final.

        Args:
            steps: that it contains.
            trainer: the trainer's own state, plain values.
            again_from: the first ticket that is saved as if nothing of it had been made; with it, generators are
                saved as they were noted. None: as everything is now.

        Raises:
            RunError: ``run.checkpoint-write``; earlier checkpoints are as before.
            WorkerLost: a rank, or the storage, died meanwhile.
            QueueError: ``queue.session``: the queue's controller died meanwhile.
        """
        async with self.role.stages.measure("checkpoint", "trainer", steps - 1):
            try:
                saved = await self._write(steps, trainer, again_from)
            except (JackfieldError, OSError) as error:
                free = shutil.disk_usage(self.store.folder.parent).free  # before the half that was written goes
                await asyncio.to_thread(self.store.discard, steps)
                if isinstance(error, WorkerLost) or getattr(error, "code", None) == "queue.session":
                    raise  # whose process has ended is named; the disk is well
                raise self._failure(steps, error, free) from error
            await self.role.queue.commit(steps - 1)
            await asyncio.to_thread(self.store.prune)
        self.saved = steps
        self.role.hooks.checkpoint_saved(event=CheckpointSaved(step=steps, folder=str(saved.folder), bytes=saved.bytes))

    async def _write(self, steps: int, trainer: Mapping[str, Any], again_from: int | None) -> Checkpoint:
        folder = await asyncio.to_thread(self.store.begin, steps)
        for role, engine in self.engines.items():
            await engine.save(str(folder / role), "native")
        state: dict[str, Any] = {
            "step": steps,
            "trainer": dict(trainer),
            "versions": {"jackfield": __version__, "python": platform.python_version()},
            "random": random_state() if again_from is None else self._random,
            **self.description,
        }
        await self.role.queue.checkpoint(folder / "queue", {} if again_from is None else {TRAIN: again_from})
        return await asyncio.to_thread(self.store.commit, steps, state)

    def _failure(self, steps: int, error: Exception, free: int) -> RunError:
        earlier = self.store.folders()
        again = f"it goes on after step {max(earlier)}" if earlier else "it starts again"
        return RunError(
            "a checkpoint could not be written",
            code="run.checkpoint-write",
            where=f"{self.store.folder}, step {steps}",
            expected="room on the disk, and permission to write",
            found=f"{_cause(error)} ({free >> 20} MB of the disk were free)",
            fix=f"look at the disk's room and permissions, then give the same command: {again}",
        )

    async def load(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Put engines, queue and random state back to where ``checkpoint`` was cut; the trainer's own state.

        The checkpoint is whole (:meth:`CheckpointStore.newest`), consumers of the queue are registered, and no
        worker has begun.

        Raises:
            RunError: ``run.checkpoint-damaged``.
            EngineError: when an engine cannot read its part.
            QueueError: when the queue cannot, or the ledger is not the one that the checkpoint knows.
        """
        state = checkpoint.state()
        for role, engine in self.engines.items():
            await engine.load(str(checkpoint.folder / role))
        await self.role.queue.restore(checkpoint.folder / "queue", checkpoint.step - 1)
        load_random_state(state["random"])
        self.saved = checkpoint.step
        trainer: dict[str, Any] = state["trainer"]
        return trainer


def _cause(error: Exception) -> str:
    """One line; what an error of ours found says more than what it was about."""
    if not isinstance(error, JackfieldError):
        return f"{type(error).__name__}: {error}"
    return error.message if error.found is None else f"{error.message}: {error.found}"


def random_state() -> dict[str, Any]:
    """This process's generators (Python's, and numpy's and torch's where they are loaded) as plain values.

    Engines and rollout servers have generators of their own.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(words), gauss]}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, [int(key) for key in keys], *rest]
    if "torch" in sys.modules:
        values = sys.modules["torch"].get_rng_state()
        state["torch"] = base64.b64encode(bytes(values.tolist())).decode("ascii")
    return state


def load_random_state(state: Mapping[str, Any]) -> None:
    """Go on where :func:`random_state` was taken; what this process has not loaded, it does not draw from."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in state and "numpy" in sys.modules:
        import numpy as np

        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    if "torch" in state and "torch" in sys.modules:
        import torch

        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["torch"])), dtype=torch.uint8))
