"""Packing of the library's models, attention left to the library: the same numbers as row by row in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from jackfield.sdk.jagged import rows as unpack
from jackfield_engine_fsdp.config import Config
from jackfield_engine_fsdp.packing import Packer
from jackfield_engine_fsdp.row_attention import make_packer

Build = Callable[..., Any]
Rows = list[dict[str, list[Any]]]

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0}
#: name, changes of its configuration, attention
PACKED: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {"sliding_window": 4}, "sdpa"),
    ("gemma2", {**WINDOWS, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}, "eager"),
    ("gemma3_text", WINDOWS, "sdpa"),
    ("cohere2", WINDOWS, "sdpa"),
    ("phi", {}, "sdpa"),
    ("gpt2", GPT2, "eager"),
    ("mistral", {"sliding_window": 8}, "sdpa"),  # a trial at load is shorter
]
PADDED: list[tuple[str, dict[str, Any]]] = [
    ("mamba2", {"head_dim": 8, "num_heads": 8, "n_groups": 1, "state_size": 8}),
    ("lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16}),
]


def model_of(name: str, changes: dict[str, Any], attention: str) -> PreTrainedModel:
    config = AutoConfig.for_model(name, **SIZES | changes)
    with torch.random.fork_rng():
        torch.manual_seed(6)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def shared_rows(kit: ModuleType) -> Rows:
    """Rows of two prompts, longer than the windows; responses of different lengths, none among them."""
    rows: Rows = kit.make_rows([(6, 5), (3, 4), (6, 9), (1, 7), (6, 1), (3, 0), (3, 11)])
    for row in rows:
        size = len(row["prompt_ids"])
        row["prompt_ids"] = next(other for other in rows if len(other["prompt_ids"]) == size)["prompt_ids"]
    return rows


def reference_of(model: PreTrainedModel, rows: Rows) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probabilities of each row, and gradients of the test's loss, in float64, row by row."""
    model.double()
    found = []
    for row in rows:
        old, advantages, mask = (torch.tensor(row[key]) for key in ("old_log_probs", "advantages", "response_mask"))
        tokens, size = torch.tensor([row["prompt_ids"] + row["response_ids"]]), len(old)
        logits = model(tokens, use_cache=False).logits[0, tokens.shape[1] - size - 1 : -1]
        chosen = logits.log_softmax(-1)[torch.arange(size), tokens[0, tokens.shape[1] - size :]]
        (-((chosen - old).exp() * advantages * mask).sum()).backward()
        found.append(chosen.detach())
    count = sum(sum(row["response_mask"]) for row in rows)
    return found, {key: each.grad / count for key, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("name", "changes", "attention"), PACKED, ids=[*(each[0] for each in PACKED[:-1]), "mistral-longer"]
)
def test_packed_equals_row_by_row(
    kit: ModuleType,
    reference: ModuleType,
    build: Build,
    shared_rows: Rows,
    tmp_path: Path,
    name: str,
    changes: dict[str, Any],
    attention: str,
) -> None:
    """Log-probabilities and every gradient; in one pass and in several; with activations computed again."""
    model = model_of(name, changes, attention)
    model.save_pretrained(tmp_path)
    chosen, expected = reference_of(model, shared_rows)
    for limit, checkpointing in ((16384, False), (31, True)):
        engine = build(
            Config(attention=attention), folder=tmp_path, micro_batch_tokens=limit, gradient_checkpointing=checkpointing
        )
        assert engine._model.packs.kind == "rows"
        with engine.train_mode():
            output = engine.forward_backward_batch(kit.make_batch(shared_rows), kit.PolicyLoss(shared_rows))
        found = dict(engine.get_per_tensor_grad())
        for one, other in zip(chosen, unpack(output.log_probs), strict=True):
            torch.testing.assert_close(other.double(), one, rtol=0, atol=1e-5)
        # biases of keys have no gradient but rounding errors
        largest = max(float(each.norm()) for each in expected.values())
        errors = {key: float((each - found[key].double()).norm()) / largest for key, each in expected.items()}
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(("name", "changes"), PADDED, ids=[each[0] for each in PADDED])
def test_models_with_a_state_stay_padded(name: str, changes: dict[str, Any]) -> None:
    model = model_of(name, changes, "eager" if name == "mamba2" else "sdpa")
    before = model.config._attn_implementation
    assert make_packer(model) is None
    assert before == model.config._attn_implementation


def test_a_model_that_differs_stays_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that ignores positions gives other logits for packed tokens, and gets its attention back."""
    model = model_of("phi", {}, "sdpa")
    rotary = type(model.model.rotary_emb).forward

    def ignoring(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return rotary(self, x, torch.arange(x.shape[1])[None])

    monkeypatch.setattr(type(model.model.rotary_emb), "forward", ignoring)
    assert make_packer(model) is None
    assert "sdpa" == model.config._attn_implementation
    assert all("packing_state" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(("name", "changes", "attention"), PACKED[:4], ids=[each[0] for each in PACKED[:4]])
def test_joined_rows_under_a_block_diagonal_mask(
    kit: ModuleType,
    build: Build,
    shared_rows: Rows,
    tmp_path: Path,
    name: str,
    changes: dict[str, Any],
    attention: str,
) -> None:
    """What variable-length kernels get, rows one after the other with their positions, run by masks on the CPU."""
    model = model_of(name, changes, attention)
    model.save_pretrained(tmp_path)
    chosen, expected = reference_of(model, shared_rows)
    engine = build(Config(attention=attention), folder=tmp_path, micro_batch_tokens=31)
    packer = engine._model.packs
    for module in engine._model.modules():
        module.__dict__.pop("packing_state", None)
    engine._model.causal_lm.set_attn_implementation(attention)
    engine._model.packs = Packer(kind="joined")
    assert packer.kind == "rows"
    with engine.train_mode():
        output = engine.forward_backward_batch(kit.make_batch(shared_rows), kit.PolicyLoss(shared_rows))
    found = dict(engine.get_per_tensor_grad())
    for one, other in zip(chosen, unpack(output.log_probs), strict=True):
        torch.testing.assert_close(other.double(), one, rtol=0, atol=1e-5)
    largest = max(float(each.norm()) for each in expected.values())
    assert max(float((each - found[key].double()).norm()) / largest for key, each in expected.items()) < 1e-5


@pytest.mark.parametrize("seed", range(6))
def test_any_rows_and_any_budget(
    kit: ModuleType, reference: ModuleType, build: Build, model_folder: Path, seed: int
) -> None:
    """Random rows, prompts and budgets, packed and padded, in pieces and at once, against the reference in float64."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    rows = kit.make_rows([(number(1, 14), number(0, 14)) for _ in range(number(1, 12))] + [(2, 3)], seed=seed)
    for row in rows:
        if number(0, 2):
            row["prompt_ids"] = rows[number(0, len(rows))]["prompt_ids"]
    rows[-1]["response_mask"][0] = 1.0
    weights = reference.parameters(model_folder)
    loss, expected = reference.loss_and_gradients(weights, rows, entropy=0.1)
    for packed in (True, False):
        engine = build(Config(logits_chunk=61 * number(1, 60)), micro_batch_tokens=number(1, 120))
        if not packed:
            engine._model.packs = None
        with engine.train_mode():
            output = engine.forward_backward_batch(kit.make_batch(rows), kit.PolicyLoss(rows, entropy=0.1))
        assert loss == pytest.approx(output.loss, rel=1e-5, abs=1e-6)
        actual = dict(engine.get_per_tensor_grad())
        assert max(reference.relative_error(each, actual[name]) for name, each in expected.items()) < 2e-5
