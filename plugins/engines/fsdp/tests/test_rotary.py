"""Rotary frequencies that depend on the length of a row: those of the row, not of its micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from jackfield.sdk.jagged import rows as unpack

Rows = list[dict[str, list[Any]]]
Build = Callable[..., Any]

LIMIT = 12  #: tokens
_LONG = {"long_factor": [4.0, 9.0, 16.0, 30.0], "short_factor": [1.0, 1.1, 1.2, 1.3]}
_LENGTHS = {"original_max_position_embeddings": LIMIT, "max_position_embeddings": 64}
_FULL = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **_LONG}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("phi3", {**_LENGTHS, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **_LONG}}),
    "longrope of qwen3": (
        "qwen3",
        {"rope_parameters": {**_FULL, "original_max_position_embeddings": LIMIT}, "max_position_embeddings": 64},
    ),
    "longrope of phimoe": (  # a scale for each side, and the frequencies of the short one
        "phimoe",
        {
            "rope_parameters": {
                **_FULL, "original_max_position_embeddings": LIMIT, "short_mscale": 1.1, "long_mscale": 1.6,
            },
            "max_position_embeddings": 64,
            "num_local_experts": 4,
        },
    ),
    "dynamic": (
        "qwen3",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            "max_position_embeddings": LIMIT,
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``folder_of(name)``: a tiny model of :data:`MODELS`."""
    root = tmp_path_factory.mktemp("rotary")

    def folder_of(name: str) -> Path:
        kind, settings = MODELS[name]
        if not (root / name).exists():
            sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                     "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1,
                     "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
            with torch.random.fork_rng():
                torch.manual_seed(11)
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **settings))
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
            model.save_pretrained(root / name)
        return root / name

    return folder_of


@pytest.fixture(scope="module")
def sided_rows(kit: ModuleType) -> Rows:
    """Both sides of the limit mixed, rows on it and one beyond it, a long one before shorter ones."""
    return kit.make_rows([(3, 5), (9, 20), (5, 7), (6, 7), (4, 8), (10, 15), (15, 2), (12, 13), (2, 3), (7, 6), (9, 4)])


def fresh(folder: Path) -> Any:
    """In float64, for which there is no kernel of grouped experts."""
    config = AutoConfig.from_pretrained(folder, experts_implementation="eager", attn_implementation="eager")
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float64).eval()


def alone(folder: Path, row: dict[str, list[Any]]) -> torch.Tensor:
    """Log-probabilities ``[response]`` of one row in a fresh model, which has seen nothing before."""
    model = fresh(folder)
    tokens = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    with torch.no_grad():
        log_probs = model(tokens, use_cache=False).logits[0, len(row["prompt_ids"]) - 1 : -1].log_softmax(-1)
    return log_probs.gather(1, torch.tensor(row["response_ids"])[:, None]).squeeze(1)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", MODELS)
def test_a_row_has_the_log_probs_that_it_has_alone(
    kit: ModuleType, build: Build, folder_of: Callable[[str], Path], sided_rows: Rows, name: str, checkpointing: bool
) -> None:
    """In any micro-batch, in any order, in inference and training passes, and after longer rows."""
    folder = folder_of(name)
    expected = [alone(folder, row) for row in sided_rows]
    for micro_batch_tokens in (1, 70, 16384):
        engine = build(folder=folder, micro_batch_tokens=micro_batch_tokens, gradient_checkpointing=checkpointing)
        for order in (range(len(sided_rows)), reversed(range(len(sided_rows)))):
            places = list(order)
            chosen = [sided_rows[place] for place in places]
            batch = kit.make_batch(chosen)
            with engine.eval_mode():
                inference = engine.forward_backward_batch(batch, None, forward_only=True)
            with engine.train_mode():
                training = engine.forward_backward_batch(batch, kit.PolicyLoss(chosen))
            for output in (inference, training):
                for place, found in zip(places, unpack(output.log_probs), strict=True):
                    torch.testing.assert_close(found.double(), expected[place].double(), rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_do_not_depend_on_micro_batches(
    kit: ModuleType, reference: ModuleType, build: Build, folder_of: Callable[[str], Path], sided_rows: Rows, name: str
) -> None:
    """Those of single rows."""
    batch, loss = kit.make_batch(sided_rows), kit.PolicyLoss(sided_rows)
    single = kit.gradients(build(folder=folder_of(name), micro_batch_tokens=1), batch, loss)
    whole = kit.gradients(build(folder=folder_of(name)), batch, loss)
    errors = {key: reference.relative_error(each.double(), whole[key]) for key, each in single.items()}
    assert max(errors.values()) < 2e-3, errors


@pytest.mark.parametrize("name", MODELS)
def test_the_sides_differ(folder_of: Callable[[str], Path], sided_rows: Rows, name: str) -> None:
    """The models of these tests tell the difference: with a row of the other side in its pass, a row is off."""
    short, long = sided_rows[0], sided_rows[1]
    model = fresh(folder_of(name))
    tokens = [row["prompt_ids"] + row["response_ids"] for row in (short, long)]
    tokens[0] = tokens[0] + [0] * (len(tokens[1]) - len(tokens[0]))
    with torch.no_grad():
        logits = model(torch.tensor(tokens), use_cache=False).logits[0]
    first, ids = len(short["prompt_ids"]), torch.tensor(short["response_ids"])
    found = logits[first - 1 : first - 1 + len(ids)].log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
    assert float((found - alone(folder_of(name), short)).abs().max()) > 0.05
