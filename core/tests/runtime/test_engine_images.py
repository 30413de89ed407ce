"""Tests that an engine gets the model's inputs beside tokens in every call where the run has them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from jackfield.abc.engine import BaseEngine, EngineLayout, EngineOutput
from jackfield.abc.transfer_queue import Column
from jackfield.algorithms import LossSpec
from jackfield.queue import Values
from jackfield.queue.meta import BatchMeta, Lease, Written
from jackfield.runtime import engine as engines
from jackfield.runtime.engine import EngineRank
from jackfield.sdk.arrays import cell, unpack
from jackfield.sdk.cells import column_from_rows, join
from jackfield.sdk.jagged import jagged, rows

PIXELS = np.arange(6.0, dtype=np.float32).reshape(1, 6)
TOKENS = column_from_rows([torch.tensor([1, 2]), torch.tensor([3])])
COLUMNS = {"prompt_ids": TOKENS, "response_ids": TOKENS, "response_mask": TOKENS, "advantages": TOKENS}


class Engine:
    """Keeps the batches that it gets."""

    layout = EngineLayout()
    context = SimpleNamespace(role="actor", rank=0)

    def __init__(self) -> None:
        self.seen: list[TensorDict] = []

    def forward_backward_batch(self, data: TensorDict, loss: Any, forward_only: bool = False) -> EngineOutput:
        self.seen.append(data)
        return EngineOutput(log_probs=jagged([torch.zeros(2), torch.zeros(1)]))

    train_mode = eval_mode = staticmethod(nullcontext)
    optimizer_zero_grad = staticmethod(lambda: None)
    optimizer_step = lr_scheduler_step = staticmethod(lambda: 0.0)


class Stored:
    """A backend that has the columns of two samples, one with pixels."""

    async def read(self, meta: BatchMeta, names: Sequence[str]) -> dict[str, Column]:
        images = join("multi_modal_inputs", [cell({"pixel_values": PIXELS}), cell({})])
        return {name: images if name == "multi_modal_inputs" else COLUMNS[name] for name in names}

    async def write(self, meta: BatchMeta, columns: Any) -> Written:
        return Written(columns=tuple(columns), sizes=(), tags=())


@pytest.mark.parametrize("arrays", [True, False])
def test_the_column_is_read_where_the_run_has_it(monkeypatch: pytest.MonkeyPatch, arrays: bool) -> None:
    """For inference passes and updates alike."""
    monkeypatch.setattr(engines, "resolve_loss", lambda spec: spec)
    engine = Engine()
    rank = EngineRank(
        cast(BaseEngine, engine), cast(Values, Stored()), loss_columns={"advantages": "advantages"}, arrays=arrays
    )
    batch = BatchMeta(keys=("a", "b"), tags=({}, {}), groups=("g", "g"), leases=(Lease("train", "trainer", 1),) * 2)

    async def main() -> None:
        await rank.compute("log_probs", "log_probs", batch)
        await rank.update(cast(LossSpec, None), batch)

    asyncio.run(main())
    assert 2 == len(engine.seen)
    for data in engine.seen:
        assert arrays == ("multi_modal_inputs" in data.keys())  # noqa: SIM118, it is not a mapping
        if arrays:
            first, second = (unpack(row.numpy().tobytes()) for row in rows(data["multi_modal_inputs"]))
            assert np.array_equal(PIXELS, first["pixel_values"])
            assert {} == second
