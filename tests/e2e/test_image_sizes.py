"""Pictures of several sizes reach server and engine in a run, for the model families that take them."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from jackfield.compose import run
from jackfield.config import load_config
from jackfield_architectures import save_model

from .conftest import ROOT, metrics

VISION = ROOT / "examples" / "vision"
RUNS = ROOT / "tools" / "testing" / "jackfield_architecture_runs.py"  #: has a reward


def patches(folder: Path) -> None:
    """Save the processor of Qwen-VL, as its publisher does."""
    side = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, size=side).save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    written = json.loads(file.read_text()) | {"processor_class": "Qwen3VLProcessor"}
    file.write_text(json.dumps(written | {"image_processor_type": "Qwen2VLImageProcessor"}))


KINDS: dict[str, Callable[[Path], None]] = {"qwen3_vl": patches}


def make_task(folder: Path, kind: str) -> None:
    """Write a model of an architecture, the example's tokenizer, and problems with one picture of four sizes."""
    found = importlib.util.spec_from_file_location("jackfield_example_vision", VISION / "make_task.py")
    assert found is not None
    assert found.loader is not None
    example = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)
    example.make_model(folder / "example", 0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "example")
    save_model(kind, folder / "model", image_token_id=tokenizer.convert_tokens_to_ids("<image>"))
    tokenizer.save_pretrained(folder / "model")
    KINDS[kind](folder / "model")
    rng, lines = random.Random(0), []
    for number, size in enumerate([(56, 56), (112, 56), (56, 112), (112, 112)] * 2):
        colour = rng.choice(list(example.COLOURS))
        Image.new("RGB", size, example.COLOURS[colour]).save(folder / f"{number}.png")
        shown = {"type": "image_url", "image_url": {"url": f"{number}.png"}}
        parts = [shown, {"type": "text", "text": "Which colour ?"}]
        lines.append(json.dumps({"prompt": [{"role": "user", "content": parts}], "answer": colour}))
    (folder / "problems.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("kind", KINDS)
def test_server_and_engine_agree_on_pictures_of_several_sizes(tmp_path: Path, kind: str) -> None:
    """Three steps of GRPO: the log-probs of server and engine are compared in each, and training moves the model."""
    make_task(tmp_path / "made", kind)
    overrides: dict[str, Any] = {
        "folder": tmp_path / "run",
        "model.path": tmp_path / "made" / "model",
        "model.dtype": "float32",
        "data.train": tmp_path / "made" / "problems.jsonl",
        "data.eval": "null",
        "data.groups_per_batch": 8,
        "data.rollouts_per_group": 4,
        "sampling.max_new_tokens": 6,
        "schedule.steps": 3,
        "evaluation.every": 0,
        "reward": f"{{name: function, path: '{RUNS}:score'}}",
        "optimizer": "{lr: 1e-2, warmup_steps: 0, scheduler: constant}",
        "log_prob_check.every": 1,
        "observe.progress": "false",
        "observe.curve": "false",
        "observe.report_to": "[]",
    }
    result = run(load_config(VISION / "grpo.yaml", [f"{name}={value}" for name, value in overrides.items()]))
    assert 3 == result.steps
    lines = metrics(result.folder)
    found = [line["log_prob_check/rollout/max"] for line in lines if "log_prob_check/rollout/max" in line]
    assert 3 == len(found)
    assert max(found) < 1e-4
    before, after = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "made", result.folder))
    assert any("visual" in name and not torch.equal(value, after[name]) for name, value in before.items())
