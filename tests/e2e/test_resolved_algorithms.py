"""The algorithm that each name stands for once every choice is made, compared with a committed table.

JACKFIELD_WRITE_TABLE=1 pytest tests/e2e/test_resolved_algorithms.py writes the table; its difference is to be read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from jackfield_commands import CommandServer

TABLE = Path(__file__).with_name("resolved_algorithms.json")
EXAMPLE = Path(__file__).parents[2] / "examples" / "guides" / "minimal.yaml"
#: What a run has to say beside the algorithm's name.
SETTINGS: dict[str, tuple[str, ...]] = {
    "mix": ("data.expert=e.jsonl", "data.expert_samples_per_batch=2"),
    "mix_chord": ("data.expert=e.jsonl", "data.expert_samples_per_batch=2"),
    "gdpo": ("algorithm.reward_dimensions=[score, brief]",),
    "sft": ("mode=offline",),
    "dpo": ("mode=offline", "data.format.rejected_key=worse"),
}
#: Settings that change what grpo resolves to.
VARIANTS: dict[str, tuple[str, ...]] = {
    "grpo with a filter": ("sampling.top_p=0.9",),
    "grpo with bfloat16": ("model.dtype=bfloat16",),
    "grpo with float8": ("weights.dtype=float8_e4m3fn",),
    "grpo with KL in the loss": ("algorithm.kl.coefficient=0.1",),
    "grpo with KL in the reward": ("algorithm.kl.coefficient=0.1", "algorithm.kl.in_reward=true"),
    "grpo with the engine's log-probs": ("algorithm.old_log_probs=engine",),
    "grpo with std of the batch": ("algorithm.advantages.options.std=batch",),
}


def resolved(jackfield: CommandServer, *overrides: str) -> dict[str, Any]:
    done = jackfield("config", "validate", str(EXAMPLE), "--json", *overrides)
    assert 0 == done.code, done.error
    found: dict[str, Any] = json.loads(done.out)["algorithm"]
    return found


@pytest.mark.timeout(300)  # the first command waits for the import of torch
def test_every_algorithm_resolves_to_its_row_of_the_table(jackfield: CommandServer) -> None:
    listed = jackfield("algorithms", "list", "--kind", "algorithm", "--json")
    names = [one["name"] for one in json.loads(listed.out)]
    found = {name: resolved(jackfield, f"algorithm.name={name}", *SETTINGS.get(name, ())) for name in names}
    found |= {name: resolved(jackfield, *settings) for name, settings in VARIANTS.items()}
    if os.environ.get("JACKFIELD_WRITE_TABLE"):
        rows = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in found.items())
        TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
        pytest.skip("the table is written")
    assert json.loads(TABLE.read_text(encoding="utf-8")) == found
