"""A listener that adds and removes replicas of the run that it listens to, as somebody in another process would.

The run needs ``cluster.metrics_port=0``.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from jackfield.compose import scale_replicas
from jackfield.plugins import hookimpl
from jackfield.trainer.trainer import Trainer


@attrs.define
class Scaling:
    """One change, and what came of it."""

    after: int  #: the step after which it is asked for
    count: int  #: of replicas
    by: int  #: the step after which the run waits for it
    replicas: list[int] = attrs.Factory(list)
    shown: list[int] = attrs.Factory(list)  #: replicas that Prometheus reads of afterwards
    future: Future[None] | None = None


class Scaler:
    """Scales a run as it is told, and holds it until that is done."""

    def __init__(self, folder: Path, scalings: Sequence[Sequence[int]]) -> None:
        self.folder = folder
        self.scalings = [Scaling(*each) for each in scalings]
        self._pool = ThreadPoolExecutor(1)
        self._release = Trainer.release_explorers
        scaler = self

        async def release(trainer: Trainer, steps_done: int) -> None:
            for scaling in scaler.scalings:
                if scaling.by == steps_done and scaling.future is not None:
                    await asyncio.wrap_future(scaling.future)
            await scaler._release(trainer, steps_done)

        Trainer.release_explorers = release  # type: ignore[method-assign]

    @hookimpl
    def step_ended(self, event: Any) -> None:
        for scaling in self.scalings:
            if scaling.after == event.step:
                scaling.future = self._pool.submit(self._scale, scaling)

    @hookimpl
    def run_ended(self, event: Any) -> None:
        Trainer.release_explorers = self._release  # type: ignore[method-assign]
        self._pool.shutdown(wait=False)

    def _scale(self, scaling: Scaling) -> None:
        scaling.replicas = [state.replica for state in scale_replicas(self.folder, scaling.count)]
        url = json.loads((self.folder / "control.json").read_text())["metrics"]
        with urllib.request.urlopen(url, timeout=60) as answer:
            shown = re.findall(r'jackfield_rollout_weight_version{replica="(\d+)"}', answer.read().decode())
        scaling.shown = sorted(map(int, shown))
        print(f"scaled to replicas {scaling.replicas}, Prometheus reads {scaling.shown}", file=sys.stderr)
        if (self.folder / "workers.json").is_file():
            workers = json.loads((self.folder / "workers.json").read_text())
            print("processes", *(worker["pid"] for worker in workers.values()), file=sys.stderr)
