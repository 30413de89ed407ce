"""One rank of ``test_optimizer_ranks.py``: each optimizer on two ranks, saved and loaded by them.

``python optimizer_worker.py SETTINGS.json`` writes what it saw as ``result_<rank>.safetensors`` and ``.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import worker as kit
from safetensors.torch import save_file

from jackfield.abc.engine import LoadCheckpointRequest, LoraSpec, OptimizerSpec, SaveCheckpointRequest
from jackfield.errors import EngineError
from jackfield.sdk.samples import naming_samples
from jackfield_engine_fsdp.config import Config


def main(settings: dict[str, Any]) -> None:
    """Train with each optimizer, save, load what one rank saved, and take a step with a NaN on one rank."""
    sys.path.append(settings["torchao"])  # after transformers, which loads it where it finds it
    rank, rows, out = settings["rank"], settings["rows"], Path(settings["out"])
    loss, share = kit.PolicyLoss(rows), rows[:4] if rank == 0 else rows[4:]
    batch = kit.make_batch(share)
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {}

    def make(options: dict[str, Any], **more: Any) -> Any:
        place = {"rank": rank, "world_size": 2, "init_method": f"file://{out}/meeting"}
        return kit.make_engine(
            settings["model"], Config(collective_timeout=60.0), optimizer=OptimizerSpec(**options), **place, **more
        )

    engines = []
    for name, options in settings["optimizers"].items():
        engine = make(options)
        engines.append(engine)
        kit.train(engine, batch, loss, steps=2)
        tensors |= {f"{name}:{key}": value.contiguous() for key, value in kit.weights(engine).items()}
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(out / name), background=True))
        kit.train(engine, batch, loss)
        engine.finish_checkpoint()
        other = make(options, seed=9)
        engines.append(other)
        other.load_checkpoint(LoadCheckpointRequest(folder=str(out / name)))
        kit.train(other, batch, loss)
        pairs = zip(kit.weights(engine).values(), kit.weights(other).values(), strict=True)
        facts[name] = all(torch.equal(one, two) for one, two in pairs)
        other.load_checkpoint(LoadCheckpointRequest(folder=f"{settings['one']}/{name}"))
        kit.train(other, batch, loss)
        tensors |= {f"{name}/resumed:{key}": value.contiguous() for key, value in kit.weights(other).items()}
    lora = make({"lr": 1e-2}, lora=LoraSpec(rank=2, publish="merged", use_dora=True))
    engines.append(lora)
    kit.train(lora, batch, loss, steps=2)
    tensors |= {f"merged:{key}": value.contiguous() for key, value in kit.weights(lora).items()}
    stopping = make({"on_nonfinite": "stop"})
    engines.append(stopping)
    if rank == 1:
        share = [share[0], {**share[1], "advantages": [float("nan")] * len(share[1]["advantages"])}, *share[2:]]
    try:
        with naming_samples([f"sample {rank}{index}" for index in range(len(share))]):
            kit.train(stopping, kit.make_batch(share), loss)
    except EngineError as error:
        facts["not finite"] = [error.code, error.where]
    for engine in engines:
        engine.close()
    save_file(tensors, out / f"result_{rank}.safetensors")
    (out / f"result_{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
