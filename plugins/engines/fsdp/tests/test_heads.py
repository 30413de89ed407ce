"""Critics begin with the scalar head of their folder: a reward model, or a critic that was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from jackfield.abc.engine import SaveCheckpointRequest
from jackfield.sdk.jagged import rows as unpack

Rows = list[dict[str, list[Any]]]
Build = Callable[..., Any]

CRITIC: dict[str, Any] = {"role": "critic", "value_head": True}


@pytest.mark.parametrize("tied", [True, False])
def test_a_reward_model_becomes_a_critic(
    kit: ModuleType, build: Build, rows: Rows, model_folder: Path, tmp_path: Path, tied: bool
) -> None:
    """Values are its scores of the tokens so far; a folder without an output layer is no obstacle."""
    config = Qwen3Config.from_pretrained(model_folder, num_labels=1, tie_word_embeddings=tied, pad_token_id=0)
    model = Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "reward")
    engine = build(folder=tmp_path / "reward", optimizer=None, **CRITIC)
    with engine.eval_mode():
        values = unpack(engine.forward_backward_batch(kit.make_batch(rows), None, forward_only=True).values)
    for row, found in zip(rows, values, strict=True):
        for index in range(len(row["response_ids"])):
            tokens = torch.tensor([row["prompt_ids"] + row["response_ids"][:index]])
            with torch.no_grad():
                score = model.score(model.model(tokens).last_hidden_state[0, -1])
            assert float(found[index]) == pytest.approx(float(score), abs=1e-5)


def test_a_saved_critic_goes_on_with_its_head(kit: ModuleType, build: Build, rows: Rows, tmp_path: Path) -> None:
    """Also with another seed, which draws another head where the folder has none."""
    engine = build(seed=1, **CRITIC)
    kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
    engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "critic"), format="huggingface"))
    found = []
    for other in (engine, build(folder=tmp_path / "critic", seed=2, **CRITIC), build(seed=2, **CRITIC)):
        with other.eval_mode():
            output = other.forward_backward_batch(kit.make_batch(rows), None, forward_only=True)
        found.append(output.values.values())
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
