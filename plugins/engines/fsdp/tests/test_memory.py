"""Saved activations in the host's memory, and compiled layers."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from jackfield_engine_fsdp.config import Config
from jackfield_engine_fsdp.memory import offloading


def test_activations_are_copied_and_weights_are_not() -> None:
    """Of a linear layer and a square: what backward passes find is another memory, with the same values."""
    layer = torch.nn.Linear(64, 64, bias=False)
    hidden = torch.randn(32, 64, requires_grad=True).exp()
    with offloading():
        product = layer(hidden)
        square = hidden * product
    saved: Any = square.grad_fn
    assert saved._saved_self.data_ptr() != hidden.data_ptr()
    assert torch.equal(saved._saved_self, hidden)
    inner: Any = product.grad_fn
    assert layer.weight.data_ptr() == inner._saved_mat2.data_ptr()


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # by the compiler
def test_compiled_layers_train_as_plain_ones(
    kit: ModuleType, build: Callable[..., Any], rows: list[dict[str, list[Any]]]
) -> None:
    """Gradients of micro-batches of several shapes, with the backend that generates no code."""
    batch, loss = kit.make_batch(rows), kit.PolicyLoss(rows)
    expected = kit.gradients(build(micro_batch_tokens=60), batch, loss)
    compiled = build(Config(compile="aot_eager", wrap="layers"), micro_batch_tokens=60)
    actual = kit.gradients(compiled, batch, loss)
    assert compiled._model is not None
    assert sum(module._compiled_call_impl is not None for module in compiled._model.modules()) == 2
    for name, gradient in expected.items():
        torch.testing.assert_close(gradient, actual[name], rtol=1e-4, atol=1e-6)
