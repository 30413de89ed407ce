"""The ranks of an engine: ``python rank.py ENGINE MODEL_TYPE [PRELOAD]``.

It runs in the engine's own interpreter, which need not have ``jackfield-parity``: it imports no module of this package.
The process imports libraries and forks a child for each rank, which writes ``rank-N.safetensors`` and ``rank-N.json``
into the plan's folder; ``rank-N.stage`` says what it is doing.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from jackfield.abc.engine import BaseEngine, EngineContext, ModelSpec, OptimizerSpec
from jackfield.algorithms import LossSpec, resolve_loss
from jackfield.errors import error_fields
from jackfield.plugins import discover
from jackfield.sdk.jagged import jagged
from jackfield.settings import structure

_COLUMNS = ("prompt_ids", "response_ids", "response_mask", "advantages", "old_log_probs", "ref_log_probs")


class Rank:
    """A rank and what it has written so far."""

    def __init__(self, plan: dict[str, Any], rank: int) -> None:
        self._plan, self._rank, self._folder = plan, rank, Path(plan["folder"])
        self._tensors: dict[str, Any] = {}
        self._engine: BaseEngine
        self._device = plan["device"]

    def play(self) -> dict[str, Any]:
        """Run all passes and steps; return small facts."""
        plan = self._plan
        self._stage("loading the plugin")
        ranks = plan["ranks"]
        context = EngineContext(
            role="actor",
            model=structure(ModelSpec, plan["model"], "model"),
            optimizer=structure(OptimizerSpec, plan["optimizer"], "optimizer"),
            rank=self._rank,
            world_size=ranks,
            local_rank=self._rank,
            init_method=f"file://{self._folder}/meeting" if ranks > 1 else None,
            device=self._device,
            seed=plan["seed"],
            temperature=plan["temperature"],
            micro_batch_tokens=plan["micro_batch_tokens"],
        )
        self._engine = engine = discover().load("engine", plan["name"]).build(plan["settings"], context)
        self._stage("initialize")
        engine.initialize()
        facts = self._passes(LossSpec(**plan["loss"]))
        self._stage("close")
        engine.close()
        return facts

    def _passes(self, loss: LossSpec) -> dict[str, Any]:
        engine, layout = self._engine, self._engine.layout
        peft_config = self._keep_weights("start")
        for name, file in {"batch": self._plan["batch"], **self._plan["rollouts"]}.items():
            self._stage(f"an inference pass over {name}")
            chosen, data = self._rows(file)
            self._moved()
            with engine.eval_mode():
                output = engine.forward_backward_batch(data, None, forward_only=True)
            if layout.is_output_rank and chosen:
                self._keep_rows(f"inference/{name}", chosen, output.log_probs)
        chosen, data = self._rows(self._plan["batch"])
        norms, losses, function = [], [], resolve_loss(loss)
        for step in range(self._plan["steps"]):
            self._stage(f"the pass of step {step + 1}")
            self._moved()
            with engine.train_mode():
                engine.optimizer_zero_grad()
                output = engine.forward_backward_batch(data, function)
                losses.append(output.loss)
                if step == 0:
                    for name, tensor in engine.get_per_tensor_grad():
                        self._put(f"gradients/{name}", tensor)
                    if layout.is_output_rank and chosen:
                        self._keep_rows("training/batch", chosen, output.log_probs)
                self._stage(f"the update of step {step + 1}")
                norms.append(engine.optimizer_step())
                engine.lr_scheduler_step()
        self._stage("reading the weights")
        self._moved()
        self._keep_weights("parameters")
        return {
            "norms": norms,
            "losses": losses,
            "data_parallel_rank": layout.data_parallel_rank,
            "is_output_rank": layout.is_output_rank,
            "peft_config": peft_config,
        }

    def _moved(self) -> None:
        """Move the engine away and back, where the plan says so."""
        if self._plan["offload"]:
            self._engine.to("cpu")
            self._engine.to(self._device)

    def _rows(self, file: str) -> tuple[list[int], Any]:
        """Return the indexes of this rank's rows, and the rows."""
        from safetensors.torch import load_file
        from tensordict import TensorDict

        layout, tensors = self._engine.layout, load_file(file)
        lengths = {name: tensors[f"{name}_lengths"].tolist() for name in ("prompt", "response")}
        count = len(lengths["prompt"])
        chosen = list(range(count))[layout.data_parallel_rank :: layout.data_parallel_size]
        columns = {}
        for name in _COLUMNS:
            if name in tensors and chosen:
                rows = tensors[name].split(lengths["prompt" if name == "prompt_ids" else "response"])
                columns[name] = jagged([rows[index] for index in chosen])
        return chosen, TensorDict(columns, batch_size=[len(chosen)])

    def _keep_weights(self, kind: str) -> dict[str, Any] | None:
        generator, peft_config = self._engine.get_per_tensor_param()
        for name, tensor in generator:
            self._put(f"{kind}/{name}", tensor)
        return None if peft_config is None else dict(peft_config)

    def _keep_rows(self, kind: str, chosen: list[int], found: Any) -> None:
        assert found is not None, f"the engine gives no log_probs for {kind}"
        for index, row in zip(chosen, found.unbind(), strict=True):
            self._tensors[f"log_probs/{kind}/{index}"] = row.detach().cpu().float().clone()

    def _put(self, name: str, tensor: Any) -> None:
        if self._rank == 0:
            self._tensors[name] = tensor.detach().cpu().contiguous().clone()

    def _stage(self, name: str) -> None:
        (self._folder / f"rank-{self._rank}.stage").write_text(name, encoding="utf-8")

    def write(self) -> None:
        """Write the tensors."""
        from safetensors.torch import save_file

        save_file(self._tensors, self._folder / f"rank-{self._rank}.safetensors")


def _plain(value: Any) -> Any:
    """Return a value of a PEFT config that JSON does not have."""
    return sorted(value) if isinstance(value, set | frozenset) else getattr(value, "value", str(value))


def play(file: str, rank: int) -> int:
    """Run a rank; its error, if there is one, is in ``rank-N.json``. Return the exit code."""
    plan, code = json.loads(Path(file).read_text(encoding="utf-8")), 0
    if plan["threads"] is not None:
        import torch

        torch.set_num_threads(plan["threads"])
    one = Rank(plan, rank)
    try:
        facts = one.play()
        one.write()
    except Exception as error:
        traceback.print_exc()
        facts, code = {"error": error_fields(error)}, 1
    result = Path(plan["folder"]) / f"rank-{rank}.json"
    result.write_text(json.dumps(facts, default=_plain), encoding="utf-8")
    return code


def _fork(file: str, rank: int, output: str) -> int:
    """Start a rank in a child process and return its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with open(output, "wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.close(0)
        code = play(file, rank)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _import(name: str, model_type: str) -> None:
    """Import what all ranks need, so that it is done once. A rank reports an import that fails."""
    modules = ["torch", "tensordict", "safetensors.torch", "transformers.modeling_utils"]
    for module in (*modules, f"transformers.models.{model_type}.modeling_{model_type}"):
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    with contextlib.suppress(Exception):
        discover().load("engine", name)


def main(name: str, model_type: str, preload: str = "") -> None:
    """Serve jobs, a line of JSON each, until stdin ends: fork the ranks and print a line as each of them ends."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if preload:
        runpy.run_path(preload)
    _import(name, model_type)
    for line in sys.stdin:
        job = json.loads(line)
        children = {_fork(job["plan"], rank, output): rank for rank, output in enumerate(job["outputs"])}
        while children:
            child, status = os.wait()
            if child in children:
                print(children.pop(child), os.waitstatus_to_exitcode(status), file=lines, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
