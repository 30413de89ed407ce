"""The fused output layer: gradients against numerical ones and the full path, transformations, adapters, memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from jackfield.abc.engine import LoraSpec
from jackfield_engine_fsdp.config import Config
from jackfield_engines.output_layer import FusedOutput, LogitTransformation, _Settings, _Statistics

Build = Callable[..., Any]
Rows = list[dict[str, list[Any]]]

TRANSFORMATIONS = [
    LogitTransformation(),
    LogitTransformation(scale=0.25),
    LogitTransformation(cap=3.0),
    LogitTransformation(scale=2.0, cap=1.5),
]


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Hidden states of 7 tokens, weight and bias of 11 words, and an adapter of rank 2."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(7, 5), (11, 5), (11,), (7, 2), (11, 2)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def labels() -> torch.Tensor:
    return torch.tensor([3, 0, 10, 10, 5, 7, 1])


def settings(transformation: LogitTransformation, rows: int, temperature: float = 0.7) -> _Settings:
    return _Settings(
        transformation=transformation, temperature=temperature, rows=rows, product=nn.functional.linear,
        want_entropy=True,
    )  # fmt: skip


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_gradients_are_the_numerical_ones(transformation: LogitTransformation, rows: int) -> None:
    """Of log-probabilities and entropies, by hidden states, weight, bias, and both sides of an adapter."""
    chosen = settings(transformation, rows)
    assert torch.autograd.gradcheck(lambda *tensors: _Statistics.apply(*tensors, labels(), chosen), inputs())


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_results_are_those_of_all_logits(transformation: LogitTransformation, temperature: float) -> None:
    hidden, weight, bias, low, up = inputs()
    logits = (hidden @ weight.T + bias + low @ up.T) * transformation.scale
    if transformation.cap is not None:
        logits = transformation.cap * torch.tanh(logits / transformation.cap)
    expected = (logits / temperature).log_softmax(-1)
    log_probs, entropy = _Statistics.apply(
        hidden, weight, bias, low, up, labels(), settings(transformation, 2, temperature)
    )
    torch.testing.assert_close(log_probs, expected.gather(1, labels()[:, None]).squeeze(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1), rtol=1e-12, atol=1e-12)


def test_extreme_logits_stay_finite() -> None:
    """A word that has all of the probability, and one that has none."""
    hidden = torch.tensor([[1000.0, 0.0], [1000.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    found = _Statistics.apply(
        hidden, weight, None, None, None, torch.tensor([0, 1]), settings(LogitTransformation(), 1, 1.0)
    )
    torch.testing.assert_close(found[0], torch.tensor([0.0, -2000.0]))
    torch.testing.assert_close(found[1], torch.zeros(2))
    (found[0].sum() + found[1].sum()).backward()
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_weight_gradients_add_up_in_float32() -> None:
    """Thousands of pieces in bfloat16: sums of that dtype would stop growing."""
    count = 4096
    hidden = torch.ones(count, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    log_probs, _ = _Statistics.apply(
        hidden, weight, None, None, None, torch.zeros(count, dtype=torch.int64), settings(LogitTransformation(), 1, 1.0)
    )
    log_probs.sum().backward()
    assert [[count / 2], [-count / 2]] == weight.grad.tolist()


SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama", {}, LogitTransformation()),
        ("gemma2", {"final_logit_softcapping": 30.0}, LogitTransformation(cap=30.0)),
        ("cohere", {"logit_scale": 0.0625}, LogitTransformation(scale=0.0625)),
        ("granite", {"logits_scaling": 8.0}, LogitTransformation(scale=0.125)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformations_are_found(
    name: str, changes: dict[str, Any], expected: LogitTransformation, dtype: torch.dtype
) -> None:
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **SIZES, **changes), attn_implementation="eager", dtype=dtype
    )
    fused = FusedOutput.of(model.eval())
    assert fused is not None
    assert expected == fused.transformation


def test_unknown_transformations_keep_the_full_path() -> None:
    """A model that does something else to its logits, or has an output layer of another kind."""
    config = AutoConfig.for_model("llama", **SIZES)

    class Squared(type(AutoModelForCausalLM.from_config(config))):  # type: ignore[misc]
        def forward(self, *arguments: Any, **keywords: Any) -> Any:
            output = super().forward(*arguments, **keywords)
            output.logits = output.logits**2
            return output

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    squared, doubled = (kind(config).eval() for kind in (Squared, Squared.__base__))
    doubled.lm_head.__class__ = Doubled
    assert FusedOutput.of(squared) is None
    assert FusedOutput.of(doubled) is None


@pytest.mark.parametrize("adapter", [None, LoraSpec(rank=2, target_modules=("q_proj", "lm_head"))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_computes_the_same_in_pieces(
    kit: ModuleType,
    reference: ModuleType,
    build: Build,
    rows: Rows,
    model_folder: Path,
    untied_folder: Path,
    adapter: LoraSpec | None,
    dtype: str,
) -> None:
    """Log-probabilities and all gradients, with tied embeddings and with an adapted output layer."""
    folder = model_folder if adapter is None else untied_folder
    batch, loss = kit.make_batch(rows), kit.PolicyLoss(rows, entropy=0.1)
    found = []
    for chunk in (1 << 27, 130):
        engine = build(Config(logits_chunk=chunk), folder=folder, lora=adapter, dtype=dtype)
        assert engine._model.fused is not None
        if adapter is not None:
            with torch.no_grad():
                for name, parameter in engine._model.named_parameters():
                    if "lora_B" in name:
                        local = parameter.to_local()
                        local.copy_(torch.arange(local.numel()).sin().view(local.shape))
        with engine.train_mode():
            output = engine.forward_backward_batch(batch, loss)
        found.append((output, {name: each.clone() for name, each in engine.get_per_tensor_grad()}))
    (full, expected), (pieces, actual) = found
    tolerance = 1e-5 if dtype == "float32" else 4e-2  # both sides round
    torch.testing.assert_close(pieces.log_probs.values(), full.log_probs.values(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pieces.entropy.values(), full.entropy.values(), rtol=tolerance, atol=tolerance)
    errors = {name: reference.relative_error(each.double(), actual[name]) for name, each in expected.items()}
    assert max(errors.values()) < tolerance, errors


def test_no_tensor_of_tokens_times_words(kit: ModuleType, build: Build, rows: Rows, untied_folder: Path) -> None:
    """The results of all operations of a training pass with the words in one dimension, weights apart."""
    engine = build(Config(logits_chunk=130), folder=untied_folder)
    largest = Largest()
    with engine.train_mode(), largest:
        engine.forward_backward_batch(kit.make_batch(rows), kit.PolicyLoss(rows, entropy=0.1))
    assert 2 * 61 == largest.numbers


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Keep the size of the largest result of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor) and 61 in each.shape and 32 not in each.shape:
                self.numbers = max(self.numbers, each.numel())
        return result
