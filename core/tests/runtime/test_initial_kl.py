"""Ranks keep a few samples of the initial model, and compare the policy with it on them."""

from __future__ import annotations

import asyncio
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tensordict import TensorDict

from jackfield.abc.engine import EngineLayout, EngineOutput
from jackfield.errors import RunError
from jackfield.queue.meta import BatchMeta
from jackfield.runtime.engine import EngineRank
from jackfield.sdk.jagged import jagged

RESPONSES = [[5, 6, 7], [8], [9, 3], [4, 4, 4, 4]]
MASKS = [[1, 0, 1], [1], [1, 1], [0, 1, 1, 1]]


class FakeEngine:
    """A token's log-prob is -token/10, and moves by ``shift`` times the token."""

    context = SimpleNamespace(role="actor", rank=0)

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.layout = EngineLayout(data_parallel_rank=rank, data_parallel_size=size)
        self.shift = 0.0

    def eval_mode(self) -> Any:
        return nullcontext()

    def forward_backward_batch(self, data: TensorDict, loss: object, forward_only: bool) -> EngineOutput:
        assert forward_only
        rows = [row.double() * (self.shift - 0.1) for row in data["response_ids"].unbind()]
        return EngineOutput(log_probs=jagged(rows))

    def save_checkpoint(self, request: object) -> None: ...

    def load_checkpoint(self, request: object) -> None: ...


def rank_of(engine: FakeEngine, rows: slice = slice(None)) -> EngineRank:
    """A rank that has read these rows."""
    rank = EngineRank(cast(Any, engine), cast(Any, None))
    columns = {
        "prompt_ids": [torch.tensor([1, 2]) for _ in RESPONSES[rows]],
        "response_ids": [torch.tensor(row) for row in RESPONSES[rows]],
        "response_mask": [torch.tensor(row, dtype=torch.bool) for row in MASKS[rows]],
    }
    data = TensorDict({name: jagged(values) for name, values in columns.items()}, batch_size=[len(RESPONSES[rows])])
    rank._work = cast(BatchMeta, None), None, data
    return rank


def expected(rows: list[int], shift: float) -> tuple[float, int]:
    """The sum of the estimates of the model's tokens, by the formula in fp64."""
    moved = [shift * token for at in rows for token, own in zip(RESPONSES[at], MASKS[at], strict=True) if own]
    return sum(math.exp(each) - 1 - each for each in moved), len(moved)


def test_the_estimate_is_of_the_models_tokens_of_the_first_samples() -> None:
    engine = FakeEngine()
    rank = rank_of(engine)
    assert asyncio.run(rank.initial_kl()) is None
    asyncio.run(rank.keep_initial(3))
    assert (0.0, 5) == asyncio.run(rank.initial_kl())
    engine.shift = 0.03
    assert pytest.approx(expected([0, 1, 2], 0.03)) == asyncio.run(rank.initial_kl())
    engine.shift = -0.03
    assert pytest.approx(expected([0, 1, 2], -0.03)) == asyncio.run(rank.initial_kl())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_checkpoint_of_two_ranks_is_read_by_any_number(tmp_path: Path, size: int) -> None:
    """Each rank gets a sample at least, because all of them compute together."""
    for number in (0, 1):
        rank = rank_of(FakeEngine(number, 2), slice(2 * number, 2 * number + 2 - number))
        asyncio.run(rank.keep_initial(2))
        asyncio.run(rank.save(str(tmp_path / "actor"), "native"))
    total, tokens = 0.0, 0
    for number in range(size):
        engine = FakeEngine(number, size)
        rank = EngineRank(cast(Any, engine), cast(Any, None))
        asyncio.run(rank.load(str(tmp_path / "actor")))
        engine.shift = 0.02
        found = asyncio.run(rank.initial_kl())
        assert found is not None
        total, tokens = total + found[0], tokens + found[1]
    again = [0] if size == 4 else list[int]()  # three samples are not enough for four ranks
    assert pytest.approx(expected([0, 1, 2, *again], 0.02)) == (total, tokens)


def test_the_model_alone_is_another_runs_beginning(tmp_path: Path) -> None:
    rank = rank_of(FakeEngine())
    asyncio.run(rank.keep_initial(2))
    asyncio.run(rank.save(str(tmp_path / "actor"), "native"))
    other = EngineRank(cast(Any, FakeEngine()), cast(Any, None))
    asyncio.run(other.load(str(tmp_path / "actor"), model_only=True))
    assert asyncio.run(other.initial_kl()) is None


@pytest.mark.parametrize(
    "content",
    ["[", "{}", '"a"', "[[1]]", "[[[1], [2], [1]]]", '[[[1], ["a"], [1], [0.5]]]', "[[[1], [2, 3], [1], [0.5]]]"],
)
def test_other_contents_are_refused_with_the_files_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "initial-0.json").write_text(content)
    with pytest.raises(RunError) as refused:
        asyncio.run(rank_of(FakeEngine(0, 1)).load(str(tmp_path)))
    assert "run.checkpoint-damaged" == refused.value.code
    assert str(tmp_path / "initial-0.json") == refused.value.where
