"""What is refused by arithmetic: without VeOmni."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.errors import EngineError
from jackfield_engine_veomni.config import Config
from jackfield_engine_veomni.sizes import data_parallel_sizes, refuse_sizes

MODEL = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 4}


@pytest.mark.parametrize(
    ("ranks", "config", "sizes"),
    [
        (1, {}, (1, 1)),
        (8, {}, (8, 8)),
        (8, {"sequence_parallel": 2}, (4, 4)),
        (8, {"sequence_parallel": 2, "shard_size": 2, "expert_parallel": 4}, (4, 2)),
    ],
)
def test_ranks_are_divided(ranks: int, config: dict[str, Any], sizes: tuple[int, int]) -> None:
    """Into data-parallel ranks, and those of one copy."""
    assert sizes == data_parallel_sizes(Config(**config), ranks)


@pytest.mark.parametrize(
    ("ranks", "config", "where"),
    [
        (3, {"sequence_parallel": 2}, "engine.sequence_parallel"),
        (4, {"shard_size": 3}, "engine.shard_size"),
        (4, {"sequence_parallel": 2, "shard_size": 4}, "engine.shard_size"),
        (4, {"expert_parallel": 3}, "engine.expert_parallel"),
    ],
)
def test_ranks_that_do_not_divide_are_refused(ranks: int, config: dict[str, Any], where: str) -> None:
    """The error has the arithmetic."""
    with pytest.raises(EngineError) as caught:
        data_parallel_sizes(Config(**config), ranks)
    assert ("config.invalid-value", where) == (caught.value.code, caught.value.where)
    assert "%" in str(caught.value.found)


@pytest.mark.parametrize(
    ("model", "config", "where"),
    [
        ({}, {"sequence_parallel": 3}, "engine.sequence_parallel"),
        ({"num_key_value_heads": 8, "num_attention_heads": 24}, {"sequence_parallel": 3}, "engine.sequence_parallel"),
        ({"layer_types": ["sliding_attention"]}, {"sequence_parallel": 2}, "engine.sequence_parallel"),
        ({}, {"expert_parallel": 3}, "engine.expert_parallel"),
        ({"num_experts": 0}, {"expert_parallel": 2}, "engine.expert_parallel"),
    ],
)
def test_models_that_do_not_fit_are_refused(model: dict[str, Any], config: dict[str, Any], where: str) -> None:
    """Heads, sliding windows and experts."""
    with pytest.raises(EngineError) as caught:
        refuse_sizes({**MODEL, **model}, Config(**config))
    assert ("config.invalid-value", where) == (caught.value.code, caught.value.where)
