"""Sizes and models that do not work are refused before anything is loaded; no Megatron-Core is needed for that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.engine import ModelSpec
from jackfield.errors import EngineError
from jackfield_engine_megatron.architecture import Architecture, check_sizes, read_architecture
from jackfield_engine_megatron.config import Config

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
}
EXPERTS = {**DENSE, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 8}


def architecture(folder: Path, values: dict[str, Any]) -> Architecture:
    """What the engine reads of a configuration."""
    (folder / "config.json").write_text(json.dumps(values))
    return read_architecture(ModelSpec(path=str(folder)))


@pytest.mark.parametrize(
    ("settings", "world_size", "values"),
    [
        ({"tensor_parallel": 2}, 3, DENSE),
        ({"tensor_parallel": 4}, 4, DENSE),  # two key-value heads
        ({"pipeline_parallel": 3}, 3, DENSE),
        ({"pipeline_parallel": 2, "virtual_pipeline_stages": 3}, 2, DENSE),
        ({"virtual_pipeline_stages": 2}, 1, DENSE),
        ({"expert_parallel": 2}, 2, DENSE),
        ({"expert_parallel": 2, "pipeline_parallel": 2}, 2, EXPERTS),
        ({"expert_parallel": 3}, 3, EXPERTS),
        ({"tensor_parallel": 2}, 2, EXPERTS),  # experts need shared positions
        ({"sequence_parallel": True}, 2, DENSE),
    ],
)
def test_impossible_sizes_are_refused(
    settings: dict[str, Any], world_size: int, values: dict[str, Any], tmp_path: Path
) -> None:
    """With a code, and the setting that is wrong."""
    with pytest.raises(EngineError) as caught:
        check_sizes(Config(**settings), architecture(tmp_path, values), world_size)
    assert "config.invalid-value" == caught.value.code
    assert any(name in str(caught.value) for name in settings)


@pytest.mark.parametrize(
    ("settings", "world_size", "values"),
    [
        ({"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline_stages": 2}, 8, DENSE),
        ({"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 4}, 4, EXPERTS),
    ],
)
def test_possible_sizes_are_not(
    settings: dict[str, Any], world_size: int, values: dict[str, Any], tmp_path: Path
) -> None:
    """Nothing is raised."""
    check_sizes(Config(**settings), architecture(tmp_path, values), world_size)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gpt2"},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ],
)
def test_models_that_megatron_would_compute_otherwise_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    """Their configuration says more than the engine has."""
    with pytest.raises(EngineError) as caught:
        architecture(tmp_path, {**DENSE, **changes})
    assert "engine.model" == caught.value.code
