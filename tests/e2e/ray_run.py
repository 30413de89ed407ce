"""``jackfield run`` without what tensors are made of in the controller, which kills its workers or itself; for
test_ray.py.

    python ray_run.py '{"workers": {"step 1": ["agent worker 0"]}, "scale": [], "all": null}' ARGUMENT ...

After step 1 the agent worker is killed; ``"checkpoint 1"`` is the moment at which the checkpoint after step 1 has been
saved, ``"next_batch 0"`` the end of that stage of the first step; ``"storage unit 2"`` is one of the queue's, of the
backend zmq. ``"scale": [[1, 2, 3]]``: after step 1 two replicas are asked for, and the run waits for them after step 3.
``"all": ["anywhere", 40]`` ends the controller at this moment (see ``killed_runs.py``), and with an even number
all of its workers just before it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

HEAVY = ("numpy", "safetensors", "tensordict", "torch", "transformers")


class Refuse:
    """An import system without tensors."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in HEAVY:
            raise ImportError(f"the controller imports {name}")


class Workers:
    """The processes of this run's workers; not those of an earlier run in the same folder, whose numbers are free."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "workers.json"
        self.earlier = self.read()

    def read(self) -> str:
        return self.file.read_text() if self.file.is_file() else "{}"

    def pids(self) -> dict[str, int]:
        text = self.read()
        return {name: worker["pid"] for name, worker in json.loads(text).items() if text != self.earlier}


class WorkerKiller:
    """Ends workers by ``kill -9``."""

    def __init__(self, workers: Workers, kill: dict[str, list[str]]) -> None:
        self.workers, self.kill = workers, kill

    def stage_ended(self, event: Any) -> None:
        self._kill(f"{event.name} {event.step}")

    def step_ended(self, event: Any) -> None:
        self._kill(f"step {event.step}")

    def checkpoint_saved(self, event: Any) -> None:
        self._kill(f"checkpoint {event.step}")

    def _kill(self, moment: str) -> None:
        for name in self.kill.pop(moment, ()):
            os.kill(self._pid(name), signal.SIGKILL)
            print(f"killed {name}", file=sys.stderr)

    def _pid(self, name: str) -> int:
        if name.startswith("storage unit"):
            units = json.loads((self.workers.file.parent / "queue" / "units.json").read_text())["units"]
            pid: int = units[int(name.split()[-1])][1]
            return pid
        return self.workers.pids()[name]


def killers(folder: Path, kill: dict[str, Any]) -> list[object]:
    """Listeners that do what ``kill`` says."""
    from killed_runs import Killer
    from scaling import Scaler

    from jackfield.plugins import hookimpl

    workers = Workers(folder)

    class RunKiller(Killer):
        """Ends the controller, and every other time the workers, too, which Ray would end a little later."""

        def end(self) -> None:
            if kill["all"][1] % 2 == 0:
                for pid in workers.pids().values():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            super().end()

    for name in ("stage_ended", "step_ended", "checkpoint_saved"):
        setattr(WorkerKiller, name, hookimpl(getattr(WorkerKiller, name)))
    listeners: list[object] = [WorkerKiller(workers, kill["workers"]), Scaler(folder, kill["scale"])]
    return listeners if kill["all"] is None else [*listeners, RunKiller(str(folder), *kill["all"])]


def main() -> None:
    sys.meta_path.insert(0, Refuse())  # type: ignore[arg-type]
    from jackfield.cli import main as command

    running = importlib.import_module("jackfield.compose.run")
    kill, run = json.loads(sys.argv[1]), running.run
    running.run = lambda config, **how: run(config, hooks=killers(Path(config.folder), kill), **how)
    try:
        command(["run", *sys.argv[2:]])
    finally:
        assert not [name for name in HEAVY if name in sys.modules]


if __name__ == "__main__":
    main()
