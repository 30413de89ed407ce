"""Two ranks of an engine in separate processes.

Each trains one step on its share of the rows and writes ``rank-N.safetensors`` and ``rank-N.json``. Each is forked from
its own host, which has imported the libraries, so ranks share neither random state nor the order of sets.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec
import torch

from jackfield.abc.engine import Box
from jackfield_conformance.registry import Subject
from jackfield_conformance.support import engine as support
from jackfield_conformance.support import expecting
from jackfield_conformance.support.processes import hosts

RANKS = 2
_SECONDS = 90.0  #: for both processes, imports included

_PLAYED: dict[tuple[type, str], Played | AssertionError] = {}


@attrs.frozen(eq=False)
class Played:
    """The results of the ranks."""

    folder: Path
    facts: tuple[Mapping[str, Any], ...]  #: by rank

    def tensors(self, rank: int, kind: str) -> dict[str, torch.Tensor]:
        """Return the ``gradient``, ``weight`` or ``log_probs`` tensors of a rank, by name."""
        from safetensors.torch import load_file

        kept = load_file(self.folder / f"rank-{rank}.safetensors")
        return {name.removeprefix(f"{kind}:"): t for name, t in kept.items() if name.startswith(f"{kind}:")}

    def local(self, rank: int) -> list[tuple[Box, torch.Tensor]]:
        """Return what a rank has of the weights."""
        boxes = [msgspec.convert(box, Box) for box in self.facts[rank]["boxes"]]
        tensors = self.tensors(rank, "local")
        return [(box, tensors[str(number)]) for number, box in enumerate(boxes)]

    def log_probs(self) -> list[torch.Tensor]:
        """Return log-probabilities by row, from the ranks whose results count."""
        found: dict[int, torch.Tensor] = {}
        for rank, fact in enumerate(self.facts):
            if fact["is_output_rank"]:
                found |= {int(row): tensor for row, tensor in self.tensors(rank, "log_probs").items()}
        return [found[index] for index in range(len(found))]


def play(subject: Subject) -> Played:
    """Run two ranks of the plugin to their end, once per plugin and process; if one fails, always raise its message."""
    key = (subject.cls, repr(subject.config))
    if key not in _PLAYED:
        folder = expecting.temporary_root() / f"ranks-{len(_PLAYED)}-{os.getpid()}"
        folder.mkdir()
        try:
            _PLAYED[key] = _run(subject, folder)
        except AssertionError as error:
            _PLAYED[key] = error
    played = _PLAYED[key]
    if isinstance(played, AssertionError):
        raise AssertionError(*played.args)
    return played


def _run(subject: Subject, folder: Path) -> Played:
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = hosts(RANKS, f"{__name__}:_play", ["transformers.models.qwen3.modeling_qwen3"], environment)
    order = {"subject": subject.plain(), "model": str(support.model_folder()), "folder": str(folder)}
    for rank, host in enumerate(ranks):
        host.order({**order, "rank": rank})
    deadline = time.monotonic() + _SECONDS
    answers: list[tuple[int, str] | None] = []
    for host in ranks:
        answers.append(host.answer(deadline - time.monotonic()))
        if answers[-1] is None:
            host.end()
        elif answers[-1][0] != 0:
            deadline = min(deadline, time.monotonic() + 5.0)  # the other one may wait for it
    codes = [None if answer is None else answer[0] for answer in answers]
    said = "\n".join(answer[1] for answer in answers if answer)
    late = f" (ended after {_SECONDS:g} s)" if any(code is None for code in codes) else ""
    assert codes == [0] * RANKS, f"the ranks end with {codes}{late}:\n{said}"
    return Played(folder, tuple(json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)))


def _play(settings: Mapping[str, Any]) -> None:
    """Run one rank, in a child of a host."""
    from safetensors.torch import save_file

    from jackfield.abc.engine import SaveCheckpointRequest

    torch.set_num_threads(1)
    torch.seed()  # the host's state is in every child
    folder = Path(settings["folder"])
    subject = Subject.of_plain(settings["subject"], folder)
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
        boxes = []
        for number, (box, tensor) in enumerate(engine.get_local_param() or ()):
            boxes.append(attrs.asdict(box))
            tensors[f"local:{number}"] = tensor.detach().cpu().clone()
        again = [attrs.asdict(box) for box, _ in engine.get_local_param() or ()]
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(folder / "native")))
    facts = {
        "boxes": boxes,
        "boxes_change": boxes != again,
        "norm": norm,
        "loss": output.loss,
        "data_parallel_rank": layout.data_parallel_rank,
        "data_parallel_size": layout.data_parallel_size,
        "is_output_rank": layout.is_output_rank,
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / f"rank-{rank}.safetensors")
    (folder / f"rank-{rank}.json").write_text(json.dumps(facts))
