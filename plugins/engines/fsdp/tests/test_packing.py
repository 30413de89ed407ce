"""Rows that share a prompt compute it once, and nothing else changes; models that are not known stay as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from jackfield.sdk.jagged import rows as unpack
from jackfield_engine_fsdp.config import Config
from jackfield_engine_fsdp.packing import speed_up_attention
from jackfield_engine_fsdp.plans import plan_padded, plan_separate, plan_shared

Rows = list[dict[str, list[Any]]]
Build = Callable[..., Any]


@pytest.fixture(scope="module")
def shared_rows(kit: ModuleType) -> Rows:
    """Three prompts, mixed; responses of different lengths, none among them; a prompt that begins like another."""
    rows = kit.make_rows([(6, 5), (3, 4), (6, 9), (1, 7), (6, 1), (3, 0), (3, 11), (6, 6), (1, 2)])
    for row in rows:
        size = len(row["prompt_ids"])
        row["prompt_ids"] = next(other for other in rows if len(other["prompt_ids"]) == size)["prompt_ids"]
    long, short = (next(row for row in rows if len(row["prompt_ids"]) == size) for size in (6, 3))
    short["prompt_ids"][:] = long["prompt_ids"][:3]
    return rows


@pytest.mark.parametrize(
    ("settings", "model", "reason"),
    [
        ({"compile": "aot_eager"}, {}, "layers are compiled"),
        ({}, {"dropout": 0.1}, "a shared prompt would have one dropout"),
    ],
)
def test_padded_rows_have_a_reason(
    build: Build, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], model: dict[str, Any], reason: str
) -> None:
    """A warning says once why rows are padded; where that was asked for, there is none."""
    with caplog.at_level(logging.WARNING, "jackfield"):
        engine = build(config=Config(**settings), **model)
    assert engine._model.packs is None
    assert [f"rows of Qwen3ForCausalLM are padded: {reason}"] == [
        record.getMessage() for record in caplog.records if "padded" in record.getMessage()
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "jackfield"):
        assert build(config=Config(packing=False))._model.packs is None
    assert [] == caplog.records


@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 45, 16384])
def test_shared_prompts_equal_the_reference(
    kit: ModuleType, reference: ModuleType, build: Build, shared_rows: Rows, model_folder: Path, micro_batch_tokens: int
) -> None:
    """Loss, log-probabilities in the order of the rows, and every gradient, however the rows are split."""
    weights = reference.parameters(model_folder)
    loss, expected = reference.loss_and_gradients(weights, shared_rows)
    engine = build(micro_batch_tokens=micro_batch_tokens)
    assert engine._model.packs
    with engine.train_mode():
        output = engine.forward_backward_batch(kit.make_batch(shared_rows), kit.PolicyLoss(shared_rows))
    assert loss == pytest.approx(output.loss, rel=1e-5)
    actual = dict(engine.get_per_tensor_grad())
    errors = {name: reference.relative_error(each, actual[name]) for name, each in expected.items()}
    assert max(errors.values()) < 1e-5, errors
    for row, log_probs in zip(shared_rows, unpack(output.log_probs), strict=True):
        chosen, _, _ = reference.token_results(weights, row)
        torch.testing.assert_close(log_probs.double(), chosen, rtol=0, atol=1e-5)


def test_values_of_shared_prompts(kit: ModuleType, reference: ModuleType, build: Build, shared_rows: Rows) -> None:
    """A critic packs, too: the same in one pass and row by row."""
    batch, loss = kit.make_batch(shared_rows), kit.PolicyLoss(shared_rows)
    whole, single = (
        kit.gradients(build(role="critic", value_head=True, micro_batch_tokens=limit), batch, loss)
        for limit in (16384, 1)
    )
    assert max(reference.relative_error(single[name].double(), whole[name]) for name in whole) < 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_prompt_is_computed_once(kit: ModuleType, build: Build, shared_rows: Rows, checkpointing: bool) -> None:
    """Tokens that enter the model: distinct prompts, and responses without their last tokens; no padding."""
    engine, seen = build(gradient_checkpointing=checkpointing), list[int]()
    embeddings = engine._model.causal_lm.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].numel()))
    with engine.train_mode():
        engine.forward_backward_batch(kit.make_batch(shared_rows), kit.PolicyLoss(shared_rows))
    responses = sum(max(len(row["response_ids"]) - 1, 0) for row in shared_rows)
    assert [6 + 3 + 1 + responses] == seen


@pytest.mark.parametrize(("prompts", "shape"), [("distinct", (4, 10)), ("equal", (1, 6 + 4 * 4))])
def test_rows_without_anything_to_save_are_not_packed(
    kit: ModuleType, build: Build, prompts: str, shape: tuple[int, int]
) -> None:
    """Rows of one length have no padding: they enter as they are, unless they share a prompt."""
    rows, engine, seen = kit.make_rows([(6, 5)] * 4), build(), list[tuple[int, ...]]()
    for row in rows if prompts == "equal" else []:
        row["prompt_ids"] = rows[0]["prompt_ids"]
    engine._model.causal_lm.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(tuple(inputs[0].shape))
    )
    with engine.train_mode():
        engine.forward_backward_batch(kit.make_batch(rows), kit.PolicyLoss(rows))
    assert [shape] == seen


def test_the_same_bits_twice(kit: ModuleType, build: Build, shared_rows: Rows) -> None:
    """Two engines, the same gradients to the last bit."""
    batch, loss = kit.make_batch(shared_rows), kit.PolicyLoss(shared_rows)
    one, other = (kit.gradients(build(), batch, loss) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def pass_tokens(rows: list[int], lengths: torch.Tensor, prompts: torch.Tensor, groups: torch.Tensor) -> int:
    """The tokens of a pass in which rows of a group share their prompt."""
    prompt_of = {int(groups[row]): int(prompts[row]) for row in rows}
    return sum(prompt_of.values()) + sum(int(lengths[row] - prompts[row]) for row in rows)


@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_are_few_and_even(seed: int) -> None:
    """Each row once; within the limit, apart from single rows; and the largest cannot be much smaller."""
    generator = torch.Generator().manual_seed(seed)
    count, limit = int(torch.randint(1, 60, (), generator=generator)), 100
    groups = torch.randint(0, 1 + count // 3, (count,), generator=generator)
    prompts = torch.randint(1, 40, (count,), generator=generator)[groups]
    lengths = prompts + torch.randint(0, 90, (count,), generator=generator)
    for kind, plan in (
        ("padded", plan_padded(lengths, limit)),
        ("shared", plan_shared(lengths, prompts, groups, limit)),
        ("separate", plan_separate(lengths, limit)),
    ):
        filled = [rows.tolist() for rows in plan]
        assert list(range(count)) == sorted(row for rows in filled for row in rows)
        alone = torch.arange(count) if kind != "shared" else groups
        of_shared = prompts if kind == "shared" else torch.zeros_like(prompts)
        tokens = [pass_tokens(rows, lengths, of_shared, alone) for rows in filled]
        if kind == "padded":
            tokens = [len(rows) * int(lengths[rows].max()) for rows in filled]
        assert all(each <= limit or len(rows) == 1 for each, rows in zip(tokens, filled, strict=True))
        if kind == "separate":
            assert max(tokens) - min(tokens) <= int(lengths.max())


def test_a_pass_holds_as_many_real_tokens_as_the_limit() -> None:
    """Padded, one long row would leave no place for the short ones; without padding they fill the same pass."""
    lengths = torch.tensor([50, *[2] * 20])
    assert [[0], [*range(1, 21)]] == [rows.tolist() for rows in plan_padded(lengths, 90)]
    assert 1 == len(plan_separate(lengths, 90))
    even = plan_shared(torch.tensor([10] * 9), torch.tensor([4] * 9), torch.arange(9), 80)
    assert [5, 4] == [len(rows) for rows in even], "not 8 and 1"


def test_groups_stay_together() -> None:
    """A group is cut only if it does not fit alone."""
    lengths, groups = torch.tensor([7, 8, 7, 6, 4, 5]), torch.tensor([0, 1, 0, 0, 1, 5])
    prompts = torch.tensor([3, 3, 3, 3, 3, 4])
    plan = [sorted(rows.tolist()) for rows in plan_shared(lengths, prompts, groups, 15)]
    assert [[1, 4], [0, 2, 3], [5]] == plan
    assert {frozenset([row]) for row in range(6)} == {
        frozenset(rows.tolist()) for rows in plan_shared(lengths, prompts, groups, 1)
    }


SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip


def small(kind: type[Any], config: type[Any], **settings: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return kind(config(**SIZES, **settings)).eval()


@pytest.mark.parametrize("name", ["llama", "mistral", "mixtral", "qwen2", "qwen3_moe"])
def test_other_architectures_agree_with_the_library(
    kit: ModuleType, reference: ModuleType, build: Build, shared_rows: Rows, tmp_path: Path, name: str
) -> None:
    """Every gradient, against the library's own model in float64, row by row. (Its norms are in float32 even there.)"""
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = AutoConfig.for_model(name, **SIZES, **experts, sliding_window=None)
    with torch.random.fork_rng():
        torch.manual_seed(6)
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
        for parameter in model.parameters():  # biases and weights of norms, too
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    engine = build(folder=tmp_path)
    assert engine._model.packs
    found = kit.gradients(engine, kit.make_batch(shared_rows), kit.PolicyLoss(shared_rows))
    model.double()
    for row in shared_rows:
        old, advantages, mask = (torch.tensor(row[key]) for key in ("old_log_probs", "advantages", "response_mask"))
        tokens, size = torch.tensor([row["prompt_ids"] + row["response_ids"]]), len(old)
        logits = model(tokens, use_cache=False).logits[0, tokens.shape[1] - size - 1 : -1]
        chosen = logits.log_softmax(-1)[torch.arange(size), tokens[0, tokens.shape[1] - size :]]
        (-((chosen - old).exp() * advantages * mask).sum()).backward()
    count = sum(sum(row["response_mask"]) for row in shared_rows)
    expected = {key: each.grad / count for key, each in model.named_parameters() if each.grad is not None}
    errors = {key: reference.relative_error(each, found[key]) for key, each in expected.items()}
    assert max(errors.values()) < 1e-5, errors


class OtherAttention(Qwen3Attention):
    """Attention that only its author knows."""


def test_other_models_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding windows, unknown classes, and known ones that compute something else."""
    window = small(MistralForCausalLM, MistralConfig, sliding_window=4)
    own, changed = small(Qwen3ForCausalLM, Qwen3Config), small(Qwen3ForCausalLM, Qwen3Config)
    for layer in own.model.layers:
        layer.self_attn.__class__ = OtherAttention
    library = Qwen3Attention.forward

    def doubled(self: Any, *arguments: Any, **keywords: Any) -> Any:
        output, weights = library(self, *arguments, **keywords)
        return 2 * output, weights

    monkeypatch.setattr(Qwen3Attention, "forward", doubled)
    for model in (window, own, changed):
        assert not speed_up_attention(model)
        assert all("forward" not in vars(module) for module in model.modules())
