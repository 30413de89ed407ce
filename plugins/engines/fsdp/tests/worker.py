"""What tests and their second processes share; as a script, one rank of the multi-process tests.

``python worker.py SETTINGS.json``: plays the scenarios of ``test_ranks.py`` and writes what it saw as
``result_<rank>.safetensors`` and ``result_<rank>.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file
from tensordict import TensorDict

from jackfield.abc.engine import (
    EngineContext,
    LoadCheckpointRequest,
    LoraSpec,
    ModelSpec,
    OptimizerSpec,
    SaveCheckpointRequest,
)
from jackfield.sdk.jagged import jagged
from jackfield_engine_fsdp.config import Config
from jackfield_engine_fsdp.engine import FSDPEngine

torch.set_num_threads(1)


def make_rows(lengths: list[tuple[int, int]], vocabulary: int = 61, seed: int = 3) -> list[dict[str, list[Any]]]:
    """Rows with ``(prompt, response)`` lengths, as plain lists."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "prompt_ids": torch.randint(0, vocabulary, (prompt,), generator=generator).tolist(),
            "response_ids": torch.randint(0, vocabulary, (response,), generator=generator).tolist(),
            "advantages": torch.randn(response, generator=generator).tolist(),
            "old_log_probs": (torch.randn(response, generator=generator) * 0.3 - 4.0).tolist(),
            "response_mask": (torch.rand(response, generator=generator) < 0.8).float().tolist(),
        }
        for prompt, response in lengths
    ]


def make_batch(rows: list[dict[str, list[Any]]]) -> TensorDict:
    """Rows as the engine gets them."""
    columns: dict[str, torch.Tensor] = {}
    if not rows:
        return TensorDict({}, batch_size=[0])
    for name in ("prompt_ids", "response_ids", "advantages", "old_log_probs", "response_mask"):
        dtype = torch.int64 if name.endswith("_ids") else torch.float32
        columns[name] = jagged([torch.tensor(row[name], dtype=dtype) for row in rows])
    return TensorDict(columns, batch_size=[len(rows)])


class PolicyLoss:
    """A ratio loss with an entropy bonus and, where there are values, a squared error; normalised by global counts."""

    def __init__(self, rows: list[dict[str, list[Any]]], entropy: float = 0.0) -> None:
        self.tokens = sum(sum(row["response_mask"]) for row in rows)
        self.entropy = entropy
        self.needs_entropy = entropy != 0.0

    def __call__(self, output: Any, data: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        mask = data["response_mask"]
        ratio = (output.log_probs - data["old_log_probs"]).clamp(-20, 20).exp()
        terms = -ratio * data["advantages"]
        if self.needs_entropy:
            terms = terms - self.entropy * output.entropy
        if output.values is not None:
            terms = terms + (output.values - data["advantages"]) ** 2
        loss = (terms * mask).sum() / self.tokens
        metrics = {
            "tokens": mask.sum(),
            "share": float(mask.sum()) / self.tokens,
            "advantage/max": data["advantages"].max(),
            "advantage/min": float(data["advantages"].min()),
        }
        return loss, metrics


def make_engine(folder: str | Path, config: Config | None = None, **options: Any) -> FSDPEngine:
    """An initialized engine; ``options`` go to the context, those of its model to that."""
    names = {each.name for each in attrs.fields(ModelSpec)}
    model = {name: options.pop(name) for name in names.intersection(options)}
    options.setdefault("role", "actor")
    options.setdefault("optimizer", OptimizerSpec(lr=1e-2, weight_decay=0.1, warmup_steps=0))
    engine = FSDPEngine(config or Config(), EngineContext(model=ModelSpec(path=str(folder), **model), **options))
    engine.initialize()
    return engine


def train(engine: FSDPEngine, batch: TensorDict, loss: Any, steps: int = 1) -> tuple[Any, float]:
    """Whole training steps; the last output and gradient norm."""
    with engine.train_mode():
        for _ in range(steps):
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(batch, loss)
            norm = engine.optimizer_step()
            engine.lr_scheduler_step()
    return output, norm


def gradients(engine: FSDPEngine, batch: TensorDict, loss: Any) -> dict[str, torch.Tensor]:
    """Gradients of one pass."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, loss)
        return dict(engine.get_per_tensor_grad())


def weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """What the engine publishes."""
    return dict(engine.get_per_tensor_param()[0])


def main(settings: dict[str, Any]) -> None:
    """One rank's part of each scenario."""
    rank, rows, loss = settings["rank"], settings["rows"], PolicyLoss(settings["rows"])
    out = Path(settings["out"])

    def place(name: str) -> dict[str, Any]:  # a file:// meeting place serves one life of a group
        return {"rank": rank, "world_size": 2, "init_method": f"file://{out}/meeting_{name}", "micro_batch_tokens": 40}

    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {}

    def keep(prefix: str, values: dict[str, torch.Tensor]) -> None:
        tensors.update({f"{prefix}:{name}": value.contiguous() for name, value in values.items()})

    shares = {"even": rows[:4] if rank == 0 else rows[4:], "uneven": rows[:7] if rank == 0 else rows[7:]}
    shares["empty"] = rows if rank == 0 else []
    variants = {
        "even": Config(wrap="root", collective_timeout=60.0),
        "uneven": Config(wrap="layers", logits_chunk=130, collective_timeout=60.0),
        "empty": Config(
            wrap="layers", gradient_accumulation="sharded", reshard_after_forward=False, collective_timeout=60.0
        ),
    }
    for name, share in shares.items():
        engine = make_engine(settings["model"], variants[name], **place(name))
        keep(f"{name}/grad", gradients(engine, make_batch(share), loss))
        output, norm = train(engine, make_batch(share), loss, steps=2)
        keep(f"{name}/weight", weights(engine))
        keep(name, {"log_probs": output.log_probs.values().clone()})
        facts[name] = {"loss": output.loss, "norm": norm, "tokens": output.metrics.get("tokens", 0.0)}
        facts[name]["shapes"] = sorted(
            (str(n), list(p.to_local().shape), list(p.shape)) for n, p in engine._model.named_parameters()
        )
        if name == "even":
            saved = engine.save_checkpoint(SaveCheckpointRequest(folder=str(out / "two")))
            facts["native_files"] = list(saved.files)
            engine.save_checkpoint(SaveCheckpointRequest(folder=str(out / "two_hf"), format="huggingface"))
            train(engine, make_batch(share), loss)
            keep("after", weights(engine))
        engine.close()
    engine = make_engine(settings["model"], Config(collective_timeout=60.0), **place("last"))
    engine.load_checkpoint(LoadCheckpointRequest(folder=settings["one"]))
    keep("loaded", weights(engine))
    engine.load_checkpoint(LoadCheckpointRequest(folder=str(out / "two")))
    train(engine, make_batch(shares["even"]), loss)
    keep("resumed", weights(engine))
    critic = make_engine(
        settings["model"], Config(collective_timeout=60.0), role="critic", value_head=True, **place("last")
    )
    keep("critic/grad", gradients(critic, make_batch(shares["uneven"]), PolicyLoss(rows)))
    adapter = make_engine(settings["model"], Config(collective_timeout=60.0), lora=LoraSpec(rank=2), **place("last"))
    train(adapter, make_batch(shares["uneven"]), loss, steps=2)
    keep("adapter", weights(adapter))
    mixture = make_engine(settings["mixture"], Config(collective_timeout=60.0), dtype="bfloat16", **place("last"))
    keep("mixture/first", weights(mixture))
    train(mixture, make_batch(shares["uneven"]), loss)
    keep("mixture", weights(mixture))
    mixture.save_checkpoint(SaveCheckpointRequest(folder=str(out / "mixture"), format="huggingface"))
    for one in (engine, critic, adapter, mixture):
        one.close()
    save_file(tensors, out / f"result_{rank}.safetensors")
    (out / f"result_{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
