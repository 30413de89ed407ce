"""What the stages of ``tools/gpu.py`` share: their plan, clocks, and models and rows of two sizes."""

from __future__ import annotations

import dataclasses
import random
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """A stage cannot run here, with the reason."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a stage gets."""

    device: str
    small: bool
    folder: str
    known: dict[str, Any]  #: results of the stages before it

    @property
    def cuda(self) -> bool:
        """Whether the stage runs on GPUs."""
        return self.device.startswith("cuda")

    @property
    def gpus(self) -> int:
        """The number of GPUs that the stage may use."""
        import torch

        return torch.cuda.device_count() if self.cuda else 0


def timed(plan: Plan, call: Callable[[], Any], warm: int, count: int) -> float:
    """Return the median of the seconds of a call, on the GPU until its work is done."""
    import torch

    seconds = []
    for number in range(warm + count):
        if number == warm and plan.cuda:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        call()
        if plan.cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[warm:])


def memory(plan: Plan) -> dict[str, int]:
    """Return the peak of the device's memory, or of this process's."""
    import torch

    if plan.cuda:
        return {"peak_memory": torch.cuda.max_memory_allocated()}
    return {"peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def make_model(plan: Plan, folder: Path) -> int:
    """Write a random Qwen3 in the shape of a model of 0.5 billion parameters; return their number."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": 1024 if plan.small else 151936,
        "hidden_size": 64 if plan.small else 896,
        "intermediate_size": 128 if plan.small else 4864,
        "num_hidden_layers": 2 if plan.small else 24,
        "num_attention_heads": 4 if plan.small else 14,
        "num_key_value_heads": 2,
        "head_dim": 16 if plan.small else 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_lengths(plan: Plan) -> list[tuple[int, int]]:
    """Return prompt and response lengths of rows, spread as those of GSM8K."""
    draw = random.Random(5)
    rows, scale = (6, 0.1) if plan.small else (64, 1.0)
    each = [(draw.lognormvariate(4.5, 0.3), draw.lognormvariate(5.2, 0.5)) for _ in range(rows)]
    return [tuple(max(2, min(1000, int(length * scale))) for length in row) for row in each]  # type: ignore[misc]


def make_batch(plan: Plan, lengths: list[tuple[int, int]]) -> Any:
    """Return random rows of these lengths as a batch of jackfield_parity."""
    from jackfield_parity.batch import random_rows

    return random_rows(1000, lengths)
