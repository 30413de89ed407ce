"""Models that cannot be split over ranks are refused, with the setting to change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from jackfield.errors import EngineError
from jackfield_engine_fsdp.sequence import SequenceParallel
from jackfield_engine_fsdp.sharding import decoder_layers
from jackfield_engine_fsdp.tensor import parallelize


def make(kind: str = "qwen3", **changes: Any) -> Any:
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | changes)))


def group(size: int) -> Any:
    """What is asked of a process group, or a mesh, before it is used."""
    return SimpleNamespace(size=lambda: size, rank=lambda: 0)


@pytest.mark.parametrize(
    ("model", "size"),
    [({}, 3), ({}, 4), ({"intermediate_size": 49}, 2), ({"kind": "gpt2", "n_head": 4, "n_embd": 32, "n_layer": 1}, 2)],
    ids=str,
)
def test_tensor_parallelism(model: dict[str, Any], size: int) -> None:
    """Four heads over three ranks, two heads of keys over four, 49 columns over two, and a model without a plan."""
    causal_lm = make(**model)
    with pytest.raises(EngineError) as caught:
        parallelize(causal_lm, decoder_layers(causal_lm), group(size), trial=True)
    assert ("config.invalid-value", "tensor_parallel") == (caught.value.code, caught.value.where)


@pytest.mark.parametrize(
    ("model", "kernel", "size"),
    [
        ({}, "sdpa", 3),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, "sdpa", 2),
        ({}, "eager", 2),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "sdpa", 2),
    ],
    ids=str,
)
def test_sequence_parallelism(model: dict[str, Any], kernel: str, size: int) -> None:
    """Heads that cannot be divided, a kernel without masks, and frequencies that depend on the length of a pass."""
    with pytest.raises(EngineError) as caught:
        SequenceParallel(make(**model), kernel, group(size))
    assert ("config.invalid-value", "sequence_parallel") == (caught.value.code, caught.value.where)
