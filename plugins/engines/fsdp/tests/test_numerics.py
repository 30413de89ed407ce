"""The numbers: against a float64 model that is written out in ``reference.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from jackfield.sdk.jagged import jagged
from jackfield.sdk.jagged import rows as unpack
from jackfield_engine_fsdp.config import Config

TOLERANCE = 1e-5

Rows = list[dict[str, list[Any]]]
Build = Callable[..., Any]


def compare(reference: ModuleType, expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> None:
    assert sorted(expected) == sorted(actual)
    errors = {name: reference.relative_error(expected[name], actual[name]) for name in expected}
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize(
    "config",
    [Config(), Config(wrap="layers"), Config(wrap="layers", reshard_after_forward=False, attention="eager")],
    ids=["root", "layers", "eager"],
)
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_equal_the_reference(
    kit: ModuleType, reference: ModuleType, build: Build, rows: Rows, model_folder: Path, untied_folder: Path,
    config: Config, tied: bool,
) -> None:  # fmt: skip
    """Loss and every gradient, also of a shared embedding, to float32 accuracy."""
    folder = model_folder if tied else untied_folder
    loss, expected = reference.loss_and_gradients(reference.parameters(folder), rows)
    engine = build(config, folder=folder)
    with engine.train_mode():
        output = engine.forward_backward_batch(kit.make_batch(rows), kit.PolicyLoss(rows))
    assert loss == pytest.approx(output.loss, rel=TOLERANCE)
    compare(reference, expected, dict(engine.get_per_tensor_grad()))


def test_entropy_and_temperature_take_part(
    kit: ModuleType, reference: ModuleType, build: Build, rows: Rows, model_folder: Path
) -> None:
    """Entropy only where the loss asks for it; both under the tempered distribution."""
    weights = reference.parameters(model_folder)
    loss, expected = reference.loss_and_gradients(weights, rows, entropy=0.7, temperature=1.7)
    engine = build(temperature=1.7)
    with engine.train_mode():
        output = engine.forward_backward_batch(kit.make_batch(rows), kit.PolicyLoss(rows, entropy=0.7))
        assert engine.forward_backward_batch(kit.make_batch(rows), kit.PolicyLoss(rows), True).entropy is None
    assert loss == pytest.approx(output.loss, rel=TOLERANCE)
    compare(reference, expected, dict(engine.get_per_tensor_grad()))
    for row, log_probs, entropy in zip(rows, unpack(output.log_probs), unpack(output.entropy), strict=True):
        chosen, entropies, _ = reference.token_results(weights, row, 1.7)
        torch.testing.assert_close(log_probs.double(), chosen, rtol=0, atol=1e-5)
        torch.testing.assert_close(entropy.double(), entropies, rtol=0, atol=1e-5)


@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 50])
def test_no_split_into_micro_batches_changes_anything(
    kit: ModuleType, reference: ModuleType, build: Build, rows: Rows, micro_batch_tokens: int
) -> None:
    """Gradients, outputs in the order of the rows, loss and metrics are those of one whole batch."""
    batch, loss = kit.make_batch(rows), kit.PolicyLoss(rows, entropy=0.1)
    whole, split = build(), build(micro_batch_tokens=micro_batch_tokens)
    results = []
    for engine in (whole, split):
        with engine.train_mode():
            results.append((engine.forward_backward_batch(batch, loss), dict(engine.get_per_tensor_grad())))
    (expected, expected_grad), (actual, actual_grad) = results
    compare(reference, {name: grad.double() for name, grad in expected_grad.items()}, actual_grad)
    assert expected.loss == pytest.approx(actual.loss, rel=1e-5)
    assert dict(expected.metrics) == pytest.approx(dict(actual.metrics), rel=1e-5)
    for name in ("log_probs", "entropy"):
        one, other = getattr(expected, name), getattr(actual, name)
        assert [len(row["response_ids"]) for row in rows] == [len(row) for row in unpack(other)]
        torch.testing.assert_close(one.values(), other.values(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_pieces_of_logits_change_nothing(
    kit: ModuleType, reference: ModuleType, build: Build, rows: Rows, entropy: float
) -> None:
    """``logits_chunk`` bounds memory, and nothing else."""
    batch, loss = kit.make_batch(rows), kit.PolicyLoss(rows, entropy=entropy)
    expected = kit.gradients(build(), batch, loss)
    actual = kit.gradients(build(Config(logits_chunk=61 * 4)), batch, loss)
    compare(reference, {name: grad.double() for name, grad in expected.items()}, actual)


def test_log_probs_equal_those_of_transformers(kit: ModuleType, build: Build, rows: Rows, model_folder: Path) -> None:
    """A plain forward of the library's own model, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    engine = build(optimizer=None, role="reference", micro_batch_tokens=60)
    with engine.eval_mode():
        output = engine.forward_backward_batch(kit.make_batch(rows), None, forward_only=True)
    assert output.loss is None
    assert not output.log_probs.requires_grad
    for row, actual in zip(rows, unpack(output.log_probs), strict=True):
        tokens = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            log_probs = model(tokens).logits[0].log_softmax(-1)
        expected = log_probs[:-1].gather(1, tokens[0, 1:, None]).squeeze(1)[len(row["prompt_ids"]) - 1 :]
        torch.testing.assert_close(expected, actual, rtol=0, atol=1e-5)


@pytest.mark.parametrize("role", ["critic", "actor"])
def test_value_head(
    kit: ModuleType, reference: ModuleType, build: Build, rows: Rows, model_folder: Path, role: str
) -> None:
    """Values at the positions that predict response tokens; a critic needs no log-probabilities."""
    engine = build(role=role, value_head=True, micro_batch_tokens=60)
    head = tuple(p.full_tensor().detach().double().requires_grad_() for p in engine._model.value_head.parameters())
    weights = reference.parameters(model_folder)
    loss, expected = reference.loss_and_gradients(weights, rows, head=head, actor=role == "actor")
    with engine.train_mode():
        output = engine.forward_backward_batch(kit.make_batch(rows), kit.PolicyLoss(rows))
    assert loss == pytest.approx(output.loss, rel=TOLERANCE)
    compare(reference, expected, dict(engine.get_per_tensor_grad()))
    assert (output.log_probs is None) == (role == "critic")
    for row, values in zip(rows, unpack(output.values), strict=True):
        hidden = reference.token_results(weights, row)[2]
        torch.testing.assert_close((hidden @ head[0].T + head[1]).squeeze(-1), values.double(), rtol=0, atol=1e-5)


def test_gradient_checkpointing_changes_nothing(kit: ModuleType, build: Build, rows: Rows) -> None:
    """The same bits, computed twice."""
    batch, loss = kit.make_batch(rows), kit.PolicyLoss(rows)
    expected = kit.gradients(build(), batch, loss)
    actual = kit.gradients(build(Config(wrap="layers"), gradient_checkpointing=True), batch, loss)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_bfloat16_arithmetic_keeps_float32_weights(
    kit: ModuleType, reference: ModuleType, build: Build, rows: Rows, model_folder: Path
) -> None:
    """Near the reference, as near as bfloat16 gets; gradients and weights are float32."""
    _, expected = reference.loss_and_gradients(reference.parameters(model_folder), rows)
    engine = build(Config(mixed_precision="bfloat16", wrap="layers"), micro_batch_tokens=40)
    actual = kit.gradients(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
    assert {torch.float32} == {grad.dtype for grad in actual.values()}
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
    error = torch.stack([(actual[name].double() - expected[name]).norm() for name in expected]).norm() / norm
    assert 1e-6 < float(error) < 0.1  # above 1e-6: bfloat16 did run


def test_loss_sees_padded_response_columns_and_row_columns(kit: ModuleType, build: Build, rows: Rows) -> None:
    """``[b, T]`` with zeros past each response, ``[b]`` as they are, in one order; others stay out."""
    batch = kit.make_batch(rows)
    batch["number"] = torch.arange(len(rows))
    batch["other"] = jagged([torch.ones(2)] * len(rows))
    seen = {}

    def loss(output: Any, data: Any) -> tuple[torch.Tensor, dict[str, float]]:
        assert {"response_ids", "response_mask", "advantages", "old_log_probs", "number"} == set(data.keys())
        for index, number in enumerate(data["number"].tolist()):
            length = len(rows[number]["response_ids"])
            seen[number] = data["response_ids"][index, :length].tolist()
            assert not output.log_probs[index, length:].any()
            assert not data["advantages"][index, length:].any()
        return output.log_probs.sum(), {}

    engine = build(micro_batch_tokens=50)
    with engine.eval_mode():
        engine.forward_backward_batch(batch, loss, forward_only=True)
    assert {index: row["response_ids"] for index, row in enumerate(rows)} == seen


def test_gradients_add_up_over_calls(kit: ModuleType, reference: ModuleType, build: Build, rows: Rows) -> None:
    """Two halves, one after the other, are the whole; ``optimizer_zero_grad`` forgets."""
    loss = kit.PolicyLoss(rows)
    expected = kit.gradients(build(), kit.make_batch(rows), loss)
    engine = build()
    with engine.train_mode():
        engine.forward_backward_batch(kit.make_batch(rows), loss)
        engine.optimizer_zero_grad()
        for half in (rows[:3], rows[3:]):
            engine.forward_backward_batch(kit.make_batch(half), loss)
    compare(reference, {name: grad.double() for name, grad in expected.items()}, dict(engine.get_per_tensor_grad()))


def test_batch_without_rows_or_responses(kit: ModuleType, build: Build) -> None:
    """Nothing in, nothing out."""
    engine = build()
    rows = kit.make_rows([(3, 0), (2, 0)])
    with engine.eval_mode():
        assert 0 == engine.forward_backward_batch(kit.make_batch([]), None, forward_only=True).log_probs.shape[0]
        output = engine.forward_backward_batch(kit.make_batch(rows), None, forward_only=True)
    assert [0, 0] == [len(row) for row in unpack(output.log_probs)]
