"""Two ranks of an engine in processes of their own; as a script, one of them.

``python -m jackfield_conformance.support.engine_ranks SETTINGS.json`` trains one step on its share of the rows and
writes ``rank-N.safetensors`` and ``rank-N.json`` beside the settings.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from jackfield_conformance.subject import Subject
from jackfield_conformance.support import engine as support

__all__ = ["RANKS", "Played", "play"]

RANKS = 2
_SECONDS = 90.0  #: for both processes, imports included

_PLAYED: dict[tuple[type, str], Played] = {}


@attrs.frozen(eq=False)
class Played:
    """What the ranks saw."""

    folder: Path
    facts: tuple[Mapping[str, Any], ...]  #: by rank

    def tensors(self, rank: int, kind: str) -> dict[str, torch.Tensor]:
        """The ``gradient``, ``weight`` or ``log_probs`` tensors of a rank, by name."""
        from safetensors.torch import load_file

        kept = load_file(self.folder / f"rank-{rank}.safetensors")
        return {name.removeprefix(f"{kind}:"): t for name, t in kept.items() if name.startswith(f"{kind}:")}

    def log_probs(self) -> list[torch.Tensor]:
        """By row, from the ranks whose results count."""
        found: dict[int, torch.Tensor] = {}
        for rank, fact in enumerate(self.facts):
            if fact["is_output_rank"]:
                found |= {int(row): tensor for row, tensor in self.tensors(rank, "log_probs").items()}
        return [found[index] for index in range(len(found))]


def play(subject: Subject) -> Played:
    """Run two ranks of the plugin to their end, once per plugin and process.

    Raises:
        AssertionError: a rank failed or did not end in time; with what it said.
    """
    key = (subject.cls, repr(subject.config))
    if key not in _PLAYED:
        number = len(_PLAYED)
        folder = support.temporary_root() / f"ranks-{number}-{os.getpid()}"
        folder.mkdir()
        _PLAYED[key] = _run(subject, folder)
    return _PLAYED[key]


def _run(subject: Subject, folder: Path) -> Played:
    processes = []
    for rank in range(RANKS):
        settings = {
            "path": [entry for entry in sys.path if entry],
            "class": [subject.cls.__module__, subject.cls.__qualname__],
            "config_class": [subject.config_class.__module__, subject.config_class.__qualname__],
            "settings": dict(subject.settings),
            "fixture": {name: subject.fixture[name] for name in ("device",) if name in subject.fixture},
            "model": str(support.model_folder()),
            "rank": rank,
        }
        path = folder / f"settings-{rank}.json"
        path.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "jackfield_conformance.support.engine_ranks", str(path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (folder / f"log-{rank}.txt").open("w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    codes = _ended(processes)
    said = "\n".join((folder / f"log-{rank}.txt").read_text()[-1500:] for rank in range(RANKS))
    late = f" (ended after {_SECONDS:g} s)" if any(code is None for code in codes) else ""
    assert codes == [0] * RANKS, f"the ranks end with {codes}{late}:\n{said}"
    return Played(folder, tuple(json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)))


def _ended(processes: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """The exit codes; None of a process that had to be killed. When one fails, the others are not waited for long."""
    deadline = time.monotonic() + _SECONDS
    codes: list[int | None] = []
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(deadline - time.monotonic(), 0.0))
            if process.returncode:
                deadline = min(deadline, time.monotonic() + 5.0)
    finally:
        for process in processes:
            codes.append(process.poll())
            process.kill()
            process.wait()
    return codes


def _play_rank(settings: Mapping[str, Any], folder: Path) -> None:
    from safetensors.torch import save_file

    from jackfield.abc.engine import SaveCheckpointRequest
    from jackfield.structuring import structure

    cls, config_class = (_load(*settings[name]) for name in ("class", "config_class"))
    config = structure(config_class, settings["settings"])
    subject = Subject(
        kind="engine", name="rank", cls=cls, config=config, config_class=config_class, settings=settings["settings"],
        fixture=settings["fixture"], folder=folder,
    )  # fmt: skip
    rank = settings["rank"]
    place = {"rank": rank, "local_rank": rank, "world_size": RANKS, "init_method": f"file://{folder}/meeting"}
    with support.opened(subject, Path(settings["model"]), micro_batch_tokens=support.SMALL, **place) as engine:
        layout = engine.layout
        chosen = list(range(len(support.LENGTHS)))[layout.data_parallel_rank :: layout.data_parallel_size]
        with engine.train_mode():
            engine.optimizer_zero_grad()
            data = support.batch([support.make_rows()[index] for index in chosen])
            output = engine.forward_backward_batch(data, support.Loss())
            tensors = {f"gradient:{name}": tensor for name, tensor in support.held_gradients(engine).items()}
            norm = engine.optimizer_step()
            engine.lr_scheduler_step()
        assert output.log_probs is not None, "a training pass of an actor has no log_probs"
        results = zip(chosen, output.log_probs.unbind(), strict=True)
        tensors |= {f"log_probs:{index}": row.clone() for index, row in results}
        tensors |= {f"weight:{name}": tensor for name, tensor in support.weights(engine).items()}
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(folder / "native")))
    facts = {
        "norm": norm,
        "loss": output.loss,
        "data_parallel_rank": layout.data_parallel_rank,
        "data_parallel_size": layout.data_parallel_size,
        "is_output_rank": layout.is_output_rank,
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / f"rank-{rank}.safetensors")
    (folder / f"rank-{rank}.json").write_text(json.dumps(facts))


def _load(module: str, qualname: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _main(path: Path) -> None:
    settings = json.loads(path.read_text())
    sys.path.extend(entry for entry in settings["path"] if entry not in sys.path)
    torch.set_num_threads(1)
    _play_rank(settings, path.parent)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
