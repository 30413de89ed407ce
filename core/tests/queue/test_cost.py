"""The queue's cost per sample is constant, measured in Python function calls instead of seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from jackfield.sdk.cells import column_from_rows

torch = pytest.importorskip("torch")

Run = Callable[..., None]


class Calls:
    """Counts Python function calls inside of a ``with`` block."""

    def __enter__(self) -> Calls:
        self.count = 0
        self._before = sys.getprofile()
        sys.setprofile(self._seen)
        return self

    def _seen(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event == "call"

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)


async def step(bench: Any, number: int) -> int:
    """Process a batch of 64 samples by reward and trainer; return Python calls per sample."""
    with Calls() as calls:
        await bench.publish(await bench.claim(groups=16), rollouts=4)
        rewarding = await bench.queue.lease("reward", deadline_seconds=0)
        assert 64 == len(rewarding)
        await bench.reward(rewarding)
        batch = await bench.lease(number)
        await bench.values.read(batch, ("ids", "reward"))
        await bench.queue.ack(batch, step=number)
    return calls.count // 64


def test_a_sample_costs_the_same_however_many_there_are(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.stage()
        await bench.trainer("ids", "reward")
        await bench.queue.register_consumer("archive", "train", ("ids",))  # never acks: samples pile up
        first = [await step(bench, number) for number in range(3)][-1]
        for number in range(3, 60):
            last = await step(bench, number)
        assert 60 * 64 == (await bench.queue.stats())["samples"]
        assert last <= 1.1 * first, f"{first} calls per sample at first, {last} at the end"
        assert first < 250

    run(test)


def test_many_samples_of_one_call_cost_no_call_each(run: Run) -> None:
    """Columns are checked, stored, read and joined whole: fewer Python calls than samples, of five columns."""

    async def test(bench: Any) -> None:
        keys = [f"many-{number}" for number in range(512)]
        column = column_from_rows([torch.arange(number % 50) for number in range(len(keys))])
        columns = dict.fromkeys("abcde", column)
        with Calls() as calls:
            await bench.values.put("train", keys, columns)
            found = await bench.values.get("train", keys, tuple(columns))
        assert all(torch.equal(column.values, each.values) for each in found.values())
        assert calls.count < len(keys)

    run(test)


def test_no_tensor_reaches_the_controller(run: Run) -> None:
    """The controller keeps only plain values, in its saved state and in its records."""
    import gc

    async def test(bench: Any) -> None:
        await bench.trainer()
        await bench.publish(await bench.claim(groups=4), rollouts=2)
        batch = await bench.lease(0)
        seen: set[int] = set()
        left: list[Any] = [bench.queue, batch]
        while left:
            found = left.pop()
            if id(found) in seen or isinstance(found, type) or callable(found):
                continue
            seen.add(id(found))
            assert not isinstance(found, torch.Tensor)
            if type(found).__module__.startswith("jackfield.queue") or isinstance(found, dict | list | tuple | set):
                left.extend(gc.get_referents(found))
        assert len(seen) > 100

    run(test)
