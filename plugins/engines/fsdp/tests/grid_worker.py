"""One rank of ``test_grid.py``: ``python grid_worker.py SETTINGS.json`` plays scenarios and writes what it saw."""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from jackfield.abc.engine import LoadCheckpointRequest, LoraSpec, SaveCheckpointRequest
from jackfield_engine_fsdp.config import Config

spec = importlib.util.spec_from_file_location("worker", Path(__file__).with_name("worker.py"))
assert spec is not None
assert spec.loader is not None
kit: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kit)


def boxes(engine: Any) -> tuple[list[list[Any]], dict[str, torch.Tensor]]:
    """What a rank has of the published weights, without gathering."""
    found = list(engine.get_local_param() or ())
    places = [[box.name, list(box.shape), list(box.start), list(box.length)] for box, _ in found]
    return places, {box.name: values.clone() for box, values in found}


def play(settings: dict[str, Any], name: str, scenario: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Gradients, two steps and what is exported; then a checkpoint of another scenario."""
    rank, world, rows, out = settings["rank"], settings["world"], settings["rows"], Path(settings["out"])
    place = {"rank": rank, "world_size": world, "init_method": f"file://{out}/meeting", "micro_batch_tokens": 40}
    model = dict(scenario.get("model", {}))
    if "lora" in model:
        model["lora"] = LoraSpec(**model["lora"])
    config = Config(**scenario.get("config", {}), collective_timeout=120.0)
    engine = kit.make_engine(settings["folders"][scenario.get("folder", "tiny")], config, **place, **model)
    layout = engine.layout
    share = rows[layout.data_parallel_rank :: layout.data_parallel_size]
    batch, loss = kit.make_batch(share), kit.PolicyLoss(rows, entropy=0.0 if engine.context.role == "critic" else 0.01)

    def keep(prefix: str, values: dict[str, torch.Tensor]) -> None:
        tensors.update({f"{name}/{prefix}:{key}": value.contiguous() for key, value in values.items()})

    keep("first", kit.weights(engine))
    keep("grad", kit.gradients(engine, batch, loss))
    output, norm = kit.train(engine, batch, loss, steps=2)
    with engine.eval_mode():
        after = engine.forward_backward_batch(batch, None, forward_only=True)
    keep("weight", kit.weights(engine))
    results = after.log_probs if after.values is None else after.values
    keep("results", {"": results.values().clone()})
    places, values = boxes(engine)
    keep("box", values)
    facts = {
        "layout": [layout.data_parallel_rank, layout.data_parallel_size, layout.is_output_rank],
        "norm": norm, "loss": output.loss, "boxes": places,
        "elements": sum(parameter.to_local().numel() for parameter in engine._model.parameters()),
    }  # fmt: skip
    if "save" in scenario:
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(out / "native")))
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(out / "hugging_face"), format="huggingface"))
        kit.train(engine, batch, loss)
        keep("after", kit.weights(engine))
    if "load" in scenario:
        engine.load_checkpoint(LoadCheckpointRequest(folder=str(out / "native")))
        keep("loaded", kit.weights(engine))
        kit.train(engine, batch, loss)
        keep("after", kit.weights(engine))
    if "one" in scenario:
        engine.load_checkpoint(LoadCheckpointRequest(folder=settings["one"]))
        keep("one", kit.weights(engine))
    settings["open"].append(engine)  # the group lives until the last one is closed
    return facts


def main(settings: dict[str, Any]) -> None:
    """All scenarios, in order."""
    for message in ("The .grad attribute of a Tensor that is not a leaf", ".*Function'> should not be instantiated"):
        warnings.filterwarnings("ignore", message)  # torch's own, while it traces a compiled layer
    tensors: dict[str, torch.Tensor] = {}
    settings["open"] = []
    facts = {name: play(settings, name, each, tensors) for name, each in settings["scenarios"].items()}
    for engine in settings["open"]:
        engine.close()
    out, rank = Path(settings["out"]), settings["rank"]
    save_file(tensors, out / f"result_{rank}.safetensors")
    (out / f"result_{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
