"""The processes of engines, servers and TRL: their start, their deadline, and what they wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from jackfield.clock import too_late
from jackfield.errors import JackfieldError, RunError, WorkerLost, rebuilt_error
from jackfield.plugins.interpreters import environment_of, run_bounded
from jackfield_parity.batch import Batch, write_batch
from jackfield_parity.hosts import VARIABLES, Hosts
from jackfield_parity.subjects import Subject

if TYPE_CHECKING:
    from torch import Tensor

_HERE = Path(__file__).parent
_LAST_LINES = 8


@attrs.frozen(kw_only=True, eq=False)
class Played:
    """The results of the ranks of one engine."""

    start: dict[str, Tensor]  #: published weights before the first step
    parameters: dict[str, Tensor]  #: after the last
    gradients: dict[str, Tensor]
    training: list[Tensor]  #: log-probs of the first training pass, by row
    inference: dict[str, list[Tensor]]  #: log-probs by name of the batch, by row
    loss: float
    norms: tuple[float, ...]  #: gradient norms of the steps
    peft_config: Mapping[str, Any] | None = None


@attrs.frozen(kw_only=True)
class Process:
    """One process to start."""

    name: str  #: for errors
    python: str
    command: Sequence[str] = ()
    stage: Path  #: file that says what it is doing
    result: Path  #: file with its facts or its error


def play_engine(
    subject: Subject, batch: Batch, plan: Mapping[str, Any], folder: Path, seconds: float, hosts: Hosts
) -> Played:
    """Run all ranks of an engine on a batch and return their results, or raise the error of the first that failed.

    ``plan`` has ``model_path``, ``steps``, and ``rollouts``, files of further batches by name.
    """
    folder.mkdir(parents=True)
    write_batch(batch, folder / "batch.safetensors")
    content = {
        **_plan(subject, folder, plan["model_path"]),
        "optimizer": attrs.asdict(subject.optimizer_spec(batch.settings.optimizer)),
        "micro_batch_tokens": subject.cluster.micro_batch_tokens,
        "offload": subject.cluster.offload,
        "ranks": subject.ranks,
        "loss": batch.loss_spec(),
        "temperature": batch.settings.temperature,
        "steps": plan["steps"],
        "rollouts": plan["rollouts"],
    }
    (folder / "plan.json").write_text(json.dumps(content), encoding="utf-8")
    processes = [
        Process(
            name=f"rank {rank} of {subject.label}",
            python=subject.python,
            stage=folder / f"rank-{rank}.stage",
            result=folder / f"rank-{rank}.json",
        )
        for rank in range(subject.ranks)
    ]
    outputs = [folder / f"output-{rank}.txt" for rank in range(subject.ranks)]
    host = hosts.of(subject, plan["model_path"])
    codes: list[int | None] = []
    try:
        codes = host.run(folder / "plan.json", outputs, seconds)
    finally:
        if not codes or any(code != 0 for code in codes):
            hosts.drop(host)
    return _collected(_judged(processes, codes, folder, seconds), folder, len(batch))


def play_server(subject: Subject, batch: Batch, model_path: str, folder: Path, seconds: float) -> Batch:
    """Have a server generate; return the prompts with what it generated, its log-probs as ``old_log_probs``."""
    import torch
    from safetensors.torch import load_file

    folder.mkdir(parents=True)
    write_batch(batch, folder / "batch.safetensors")
    content = {**_plan(subject, folder, model_path), "temperature": batch.settings.temperature}
    (folder / "plan.json").write_text(json.dumps(content), encoding="utf-8")
    program, names = [str(_HERE / "server.py"), str(folder / "plan.json")], ("server.stage", "server.json")
    stage, result = (folder / name for name in names)
    process = Process(name=subject.label, command=program, python=subject.python, stage=stage, result=result)
    _alone(process, folder, seconds)
    tensors = load_file(folder / "generated.safetensors")
    sizes = tensors["response_lengths"].tolist()
    ids, log_probs = (list(tensors[name].split(sizes)) for name in ("response_ids", "log_probs"))
    if tensors["log_probs"].shape != tensors["response_ids"].shape:
        expected, found = list(tensors["response_ids"].shape), list(tensors["log_probs"].shape)
        message = "a server gives another number of log-probs than tokens"
        raise RunError(message, where=subject.label, expected=expected, found=found, fix="correct the server")
    return attrs.evolve(
        batch,
        response_ids=ids,
        response_mask=[torch.ones(size) for size in sizes],
        advantages=[torch.zeros(size) for size in sizes],
        old_log_probs=log_probs,
        ref_log_probs=None,
        results={},
    )


def play_trl(python: str, batch: Batch, model_path: str, folder: Path, seconds: float) -> tuple[Path, dict[str, Any]]:
    """Compute TRL's loss on a batch; return the file of its tensors, and its facts."""
    folder.mkdir(parents=True)
    write_batch(batch, folder / "batch.safetensors")
    settings = attrs.asdict(batch.settings)
    content = {"folder": str(folder), "batch": str(folder / "batch.safetensors"), "model_path": model_path, **settings}
    (folder / "plan.json").write_text(json.dumps(content), encoding="utf-8")
    command, stage = [str(_HERE / "trl_side.py"), str(folder / "plan.json")], folder / "trl.stage"
    process = Process(name="TRL", command=command, python=python, stage=stage, result=folder / "trl.json")
    return folder / "trl.safetensors", _alone(process, folder, seconds)


def _plan(subject: Subject, folder: Path, model_path: str) -> dict[str, Any]:
    model = attrs.asdict(subject.model_spec(model_path))
    return {
        "name": subject.record.name,
        "settings": dict(subject.settings),
        "model": model,
        "folder": str(folder),
        "batch": str(folder / "batch.safetensors"),
        "device": subject.cluster.device,
        "seed": subject.cluster.seed,
        "threads": subject.cluster.threads,
        "preload": subject.preload,
    }


def _alone(process: Process, folder: Path, seconds: float) -> dict[str, Any]:
    """Run one process to its end and return its facts."""
    environment = {**environment_of(process.python), **VARIABLES}
    with (folder / "output-0.txt").open("wb") as output:
        code = run_bounded([process.python, *process.command], seconds, stdout=output, stderr=output, env=environment)
    return _judged([process], [code], folder, seconds)[0]


def _judged(
    processes: Sequence[Process], codes: Sequence[int | None], folder: Path, seconds: float
) -> list[dict[str, Any]]:
    """Return the facts of all processes, or raise: an error that one reported, a death, or the deadline."""
    facts: list[dict[str, Any]] = []
    errors: list[JackfieldError] = []
    late, dead = [], []
    for number, (process, code) in enumerate(zip(processes, codes, strict=True)):
        found = json.loads(process.result.read_text(encoding="utf-8")) if process.result.is_file() else None
        if found is not None and "error" in found:
            errors.append(rebuilt_error(found["error"], process.name))
        elif code is None:
            stage = process.stage.read_text(encoding="utf-8") if process.stage.is_file() else "starting"
            late.append(f"{process.name} ({stage})")
        elif found is None or code:
            said = _last_lines(folder / f"output-{number}.txt")
            details = {"expected": "exit status 0 and a result", "found": f"exit status {code}; {said}"}
            fix = "look at its output; lack of memory is a usual reason of a kill"
            dead.append(WorkerLost(f"{process.name} died", where=process.name, fix=fix, **details))
        else:
            facts.append(found)
    for error in (*errors, *dead):
        raise error
    if late:
        raise too_late(seconds, ", ".join(late))
    return facts


def _last_lines(file: Path) -> str:
    output = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return "\n".join(output.strip().splitlines()[-_LAST_LINES:])


def _collected(facts: Sequence[Mapping[str, Any]], folder: Path, rows: int) -> Played:
    """Join what the ranks wrote. Of ranks with the same data-parallel rank, the first output rank counts."""
    from safetensors.torch import load_file

    parts = [load_file(folder / f"rank-{rank}.safetensors") for rank in range(len(facts))]
    counting: dict[int, int] = {}
    for rank, fact in enumerate(facts):
        if fact["is_output_rank"]:
            counting.setdefault(fact["data_parallel_rank"], rank)
    found: dict[str, dict[int, Tensor]] = {}
    for rank in counting.values():
        for name, tensor in parts[rank].items():
            if name.startswith("log_probs/"):
                kind, _, row = name.removeprefix("log_probs/").rpartition("/")
                found.setdefault(kind, {})[int(row)] = tensor
    by_row = {kind: [each[row] for row in sorted(each)] for kind, each in found.items()}
    wanted = {"training/batch", "inference/batch", *by_row}
    if lost := sorted(kind for kind in wanted if sorted(found.get(kind, ())) != list(range(rows))):
        message = "the output ranks of an engine do not have all rows"
        held = ", ".join(map(str, sorted(found.get(lost[0], ())))) or "none"
        details = {"where": ", ".join(lost), "expected": f"{rows} rows", "found": f"rows {held}"}
        raise RunError(message, fix="correct the engine's layout", **details)

    def named(kind: str) -> dict[str, Tensor]:
        return {name.removeprefix(kind): one for name, one in parts[0].items() if name.startswith(kind)}

    prefix = "inference/"
    return Played(
        start=named("start/"),
        parameters=named("parameters/"),
        gradients=named("gradients/"),
        training=by_row["training/batch"],
        inference={n.removeprefix(prefix): each for n, each in by_row.items() if n.startswith(prefix)},
        loss=sum(facts[rank]["losses"][0] or 0.0 for rank in counting.values()),
        norms=tuple(facts[0]["norms"]),
        peft_config=facts[0]["peft_config"],
    )
