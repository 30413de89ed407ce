"""The ranks of the tests in several processes, in VeOmni's interpreter: ``python worker.py SETTINGS.json``.

Ranks are forks of this process, which has imported the libraries. Each plays the scenarios that have this rank, and
writes what it saw as ``SCENARIO-RANK.safetensors`` and ``.json``, and what it printed as ``log-RANK.txt``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file

from jackfield.abc.engine import EngineContext, LoadCheckpointRequest, ModelSpec, SaveCheckpointRequest
from jackfield.errors import EngineError
from jackfield_conformance.support import engine as support
from jackfield_engine_veomni.config import Config
from jackfield_engine_veomni.engine import VeOmniEngine

torch.set_num_threads(1)
STEPS = 3


def play(scenario: dict[str, Any], rank: int, out: Path) -> None:
    """Train three steps; keep losses, norms, the first gradients, the last weights and log-probabilities by row."""
    name, world = scenario["name"], scenario["world"]
    model = ModelSpec(path=scenario["model"], **scenario.get("of_model", {}))
    context = EngineContext(
        role="actor",
        model=model,
        optimizer=attrs.evolve(support.OPTIMIZER, on_nonfinite=scenario.get("on_nonfinite", "skip")),
        rank=rank,
        local_rank=rank,
        world_size=world,
        init_method=f"file://{out}/meeting-{name}",
        micro_batch_tokens=support.SMALL,
        seed=3,
    )
    engine = VeOmniEngine(Config(collective_timeout=120.0, **scenario.get("config", {})), context)
    engine.initialize()
    layout = engine.layout
    if "load" in scenario:
        engine.load_checkpoint(LoadCheckpointRequest(folder=str(out / scenario["load"])))
    chosen = list(range(len(support.LENGTHS)))[layout.data_parallel_rank :: layout.data_parallel_size]
    data = support.batch([support.make_rows()[index] for index in chosen])
    tensors: dict[str, torch.Tensor] = {}
    losses, norms = [], []
    with engine.train_mode():
        for step in range(STEPS):
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(data, support.Loss(0.1))
            if step == 0:
                tensors |= {f"gradient:{each}": value for each, value in support.held_gradients(engine).items()}
                assert output.log_probs is not None
                rows = zip(chosen, output.log_probs.unbind(), strict=True)
                tensors |= {f"log_probs:{index}": row.clone() for index, row in rows}
            norms.append(engine.optimizer_step())
            engine.lr_scheduler_step()
            losses.append(output.loss)
            if step == 1 and scenario.get("save"):
                engine.save_checkpoint(SaveCheckpointRequest(folder=str(out / name)))
    tensors |= {f"weight:{each}": value for each, value in support.weights(engine).items()}
    stopped = _stopped(engine) if "on_nonfinite" in scenario else None
    engine.close()
    facts = {
        "stopped": stopped,
        "losses": losses,
        "norms": norms,
        "layout": [layout.data_parallel_rank, layout.data_parallel_size],
    }
    facts["is_output_rank"] = layout.is_output_rank
    save_file({each: value.contiguous() for each, value in tensors.items()}, out / f"{name}-{rank}.safetensors")
    (out / f"{name}-{rank}.json").write_text(json.dumps(facts))


def _stopped(engine: VeOmniEngine) -> list[str | None] | None:
    """Return the error of a step with advantages of row 1 that are not numbers."""
    rows = list(support.make_rows())
    rows[1] = attrs.evolve(rows[1], advantages=tuple(float("nan") for _ in rows[1].advantages))
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(support.batch(rows), support.Loss())
        try:
            engine.optimizer_step()
        except EngineError as error:
            return [error.code, error.where]
    return None


def fork(settings: dict[str, Any], rank: int, out: Path) -> int:
    """Start a rank, which plays the scenarios in their order; its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with (out / f"log-{rank}.txt").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        for scenario in settings["scenarios"]:
            if rank < scenario["world"]:
                play(scenario, rank, out)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(settings: dict[str, Any]) -> None:
    """Start all ranks, and end badly if one of them does."""
    out = Path(settings["out"])
    ranks = [fork(settings, rank, out) for rank in range(max(each["world"] for each in settings["scenarios"]))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    sys.exit(f"ranks end with {codes}" if any(codes) else 0)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
