"""A run whose controller cannot import what tensors are made of, and that kills its own workers; for test_ray.py.

    python ray_run.py FILE '{"kill": {"1": ["agent worker 0"]}}' [key.path=value ...]

After step 1 the agent worker is killed. Prints the pids of all workers that were seen.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

HEAVY = ("numpy", "safetensors", "tensordict", "torch", "transformers")


class Refuse:
    """An import system without tensors."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in HEAVY:
            raise ImportError(f"the controller imports {name}")


class Killer:
    """Ends workers by ``kill -9``."""

    def __init__(self, folder: Path, kill: dict[str, list[str]]) -> None:
        self.folder, self.kill = folder, kill

    def step_ended(self, event: Any) -> None:
        workers = json.loads((self.folder / "workers.json").read_text())
        for name in self.kill.pop(str(event.step), ()):
            os.kill(workers[name]["pid"], signal.SIGKILL)


def main() -> None:
    sys.meta_path.insert(0, Refuse())  # type: ignore[arg-type]
    from jackfield.compose import run
    from jackfield.config import load_config
    from jackfield.plugins import hookimpl

    Killer.step_ended = hookimpl(Killer.step_ended)  # type: ignore[method-assign]
    config = load_config(sys.argv[1], sys.argv[3:])
    try:
        run(config, hooks=[Killer(Path(config.folder), json.loads(sys.argv[2])["kill"])])
    finally:
        assert not [name for name in HEAVY if name in sys.modules]


if __name__ == "__main__":
    main()
