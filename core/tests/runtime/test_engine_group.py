"""Tests of how the controller splits samples over ranks and combines their metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import attrs
import pytest

from jackfield.abc.engine import EngineLayout
from jackfield.algorithms import LossSpec
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, EngineError, JackfieldError
from jackfield.queue.meta import BatchMeta, Lease, Written
from jackfield.runtime.comparison import Distances
from jackfield.runtime.engine import EngineGroup, combined, shares


class FakeRank:
    """A rank that declares a layout and records the samples that it gets."""

    def __init__(self, layout: EngineLayout, metrics: Mapping[str, float] | None = None) -> None:
        self.layout, self.metrics = layout, dict(metrics or {})
        self.got: list[tuple[str, ...]] = []

    async def initialize(self) -> EngineLayout:
        return self.layout

    async def read(self, batch: BatchMeta, *, update: bool, comparison: object) -> None:
        self.got.append(batch.keys)

    async def update(
        self, loss: LossSpec, batch: BatchMeta | None, comparison: object
    ) -> tuple[dict[str, float], Distances]:
        if batch is not None:
            self.got.append(batch.keys)
        return self.metrics, {}

    async def compute(self, kind: str, column: str, batch: BatchMeta | None, *, adapter_off: bool) -> Written | None:
        assert "log_probs" == kind
        if batch is not None:
            self.got.append(batch.keys)
        if not self.layout.is_output_rank:
            return None
        return Written(columns=(column,), sizes=(4,) * len(self.got[-1]))

    async def score(self, prompt_ids: Any, responses: Any) -> list[list[float]] | None:
        self.got.append(tuple(responses))
        return [[-1.0] for _ in responses] if self.layout.is_output_rank else None


class FakeQueue:
    """A queue that records which columns are announced."""

    def __init__(self) -> None:
        self.announced: list[tuple[str, ...]] = []

    async def add_columns(self, batch: BatchMeta, written: Written) -> None:
        assert len(batch) == len(written.sizes)
        self.announced.append(batch.keys)


def batch(lengths: list[int]) -> BatchMeta:
    return BatchMeta(
        keys=tuple(f"train/0/{index}/0/0/0" for index in range(len(lengths))),
        tags=tuple({"prompt_tokens": 1, "response_tokens": length} for length in lengths),
        groups=("g",) * len(lengths),
        leases=(Lease("train", "trainer", 1),) * len(lengths),
    )


def group(ranks: list[Any], queue: Any = None, seconds: float = 10.0) -> EngineGroup:
    return EngineGroup("actor", ranks, queue or FakeQueue(), Clock(), seconds=seconds)


def layouts(*places: tuple[int, bool], size: int) -> list[EngineLayout]:
    return [
        EngineLayout(data_parallel_rank=rank, data_parallel_size=size, is_output_rank=output) for rank, output in places
    ]


LOSS = LossSpec(name="ppo_clip")


def test_one_rank_gets_every_row_in_order() -> None:
    assert [[0, 1, 2, 3]] == shares([5, 1, 9, 2], 1)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shares_are_even_in_rows_and_balanced_in_tokens(ranks: int) -> None:
    lengths = [100, 3, 50, 50, 7, 60, 40, 1, 99, 2, 5, 8, 77]
    parts = shares(lengths, ranks)
    assert list(range(len(lengths))) == sorted(index for part in parts for index in part)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    totals = [sum(lengths[index] for index in part) for part in parts]
    consecutive = [sum(lengths[start : start + len(lengths) // ranks]) for start in range(0, 12, len(lengths) // ranks)]
    assert max(totals) - min(totals) < max(consecutive) - min(consecutive)


@pytest.mark.parametrize(
    ("lengths", "ranks", "difference"),
    [
        ([100, 100, 10, 10], 2, 0),
        ([10, 20, 30, 40], 2, 0),
        ([50, 50, 50, 50], 2, 0),
        ([100, 80, 60, 40, 20, 10], 3, 10),
        ([100, 90, 50, 10, 5, 1], 2, 26),
    ],
)
def test_the_cases_of_verls_balanced_sampler(lengths: list[int], ranks: int, difference: int) -> None:
    """Ranks get equal numbers of rows, and their sums differ no more than verl's test allows."""
    parts = shares(lengths, ranks)
    totals = [sum(lengths[index] for index in part) for part in parts]
    assert {len(lengths) // ranks} == {len(part) for part in parts}
    assert difference == max(totals) - min(totals) <= max(lengths)


def test_ranks_of_one_data_parallel_rank_get_the_same_rows_and_one_answers_for_them() -> None:
    """There are two data-parallel ranks of two tensor-parallel ranks; the controller only knows the layouts."""

    async def main() -> None:
        queue = FakeQueue()
        places = layouts((0, True), (0, False), (1, True), (1, False), size=2)
        ranks = [FakeRank(place, {"policy/loss": 1.0 + index}) for index, place in enumerate(places)]
        made = group(ranks, queue)
        await made.initialize()
        whole = batch([4, 4, 4, 4])
        metrics, _ = await made.update(whole, LOSS)
        assert {"policy/loss": 1.0 + 3.0} == metrics
        assert ranks[0].got == ranks[1].got != ranks[2].got == ranks[3].got
        await made.compute("log_probs", whole, "old_log_probs")
        assert sorted(whole.keys) == sorted(key for keys in queue.announced for key in keys)

    asyncio.run(main())


def test_one_rank_reads_in_its_call_and_several_before_it_what_they_have_not_read() -> None:
    """Each reading of several ranks is a call of its own, and none where the same samples were read last."""

    class Noting(FakeRank):
        def __init__(self, layout: EngineLayout) -> None:
            super().__init__(layout)
            self.calls: list[str] = []

        async def read(self, batch: BatchMeta, *, update: bool, comparison: object) -> None:
            await super().read(batch, update=update, comparison=comparison)
            self.calls.append("read")

        async def update(
            self, loss: LossSpec, batch: BatchMeta | None, comparison: object
        ) -> tuple[dict[str, float], Distances]:
            self.calls.append("update" if batch is None else "read and update")
            return {}, {}

        async def compute(
            self, kind: str, column: str, batch: BatchMeta | None, *, adapter_off: bool
        ) -> Written | None:
            self.calls.append(column if batch is None else f"read and {column}")
            return await super().compute(kind, column, batch, adapter_off=adapter_off)

    async def main(size: int) -> list[str]:
        ranks = [Noting(place) for place in layouts(*((rank, True) for rank in range(size)), size=size)]
        made = group(ranks)
        await made.initialize()
        whole = batch([4, 4, 4, 4])
        for column in ("ref_log_probs", "old_log_probs"):
            await made.compute("log_probs", whole, column)
        again = attrs.evolve(whole, leases=(Lease("train", "trainer", 2),) * 4)
        for each in (whole, whole, again):
            await made.update(each, LOSS)
        assert all(ranks[0].calls == rank.calls for rank in ranks)
        return ranks[0].calls

    alone = [f"read and {what}" for what in ("ref_log_probs", "old_log_probs", "update", "update", "update")]
    assert alone == asyncio.run(main(1))
    several = ["read", "ref_log_probs", "old_log_probs", "read", "update", "update", "read", "update"]
    assert several == asyncio.run(main(2))


def test_metrics_add_up_but_for_extremes_and_what_is_the_same_everywhere() -> None:
    first = {"policy/loss": 0.25, "policy/ratio/max": 3.0, "policy/ratio/min": 0.5, "grad_norm": 2.0, "lr": 1e-3}
    second = {"policy/loss": 0.5, "policy/ratio/max": 1.0, "policy/ratio/min": 0.25, "grad_norm": 2.0, "lr": 1e-3}
    expected = {"policy/loss": 0.75, "policy/ratio/max": 3.0, "policy/ratio/min": 0.25, "grad_norm": 2.0, "lr": 1e-3}
    assert expected == combined([first, second])


def test_fewer_rows_than_ranks_are_refused() -> None:
    async def main() -> None:
        made = group([FakeRank(place) for place in layouts((0, True), (1, True), size=2)])
        await made.initialize()
        with pytest.raises(EngineError) as caught:
            await made.update(batch([3]), LOSS)
        assert "engine.failed" == caught.value.code

    asyncio.run(main())


def test_a_rank_that_does_not_answer_is_named_with_its_samples() -> None:
    class Stuck(FakeRank):
        async def update(
            self, loss: LossSpec, batch: BatchMeta | None, comparison: object
        ) -> tuple[dict[str, float], Distances]:
            await asyncio.Event().wait()
            raise AssertionError

    async def main() -> None:
        places = layouts((0, True), (1, True), size=2)
        made = group([FakeRank(places[0]), Stuck(places[1])], seconds=0.01)
        await made.initialize()
        with pytest.raises(DeadlineExceeded) as caught:
            await made.update(batch([3, 3]), LOSS)
        assert "the actor engine, rank 1, to train on 2 samples from train/0/0/0/0/0" in str(caught.value)

    asyncio.run(main())


def test_a_rank_that_others_wait_for_in_vain_is_named() -> None:
    """A collective operation fails on the ranks that wait for it; the one that hangs does not answer."""

    class Rank(FakeRank):
        hangs = False

        async def update(self, loss: LossSpec, batch: BatchMeta | None, comparison: object) -> Any:
            if self.hangs:
                await asyncio.Event().wait()
            raise EngineError("a collective operation has timed out", found="60 s")

    async def main(seconds: float, hanging: set[int]) -> JackfieldError:
        ranks = [Rank(place) for place in layouts(*((rank, True) for rank in range(3)), size=3)]
        for rank in hanging:
            ranks[rank].hangs = True
        made = group(ranks, seconds=seconds)
        await made.initialize()
        with pytest.raises(JackfieldError) as caught:
            await made.update(batch([3, 3, 3]), LOSS)
        return caught.value

    late = asyncio.run(main(60.0, {1}))
    assert ("engine.failed", "60 s; no answer from rank 1") == (late.code, late.found)
    all_late = asyncio.run(main(0.01, {0, 1, 2}))
    assert ("deadline", "no answer from rank 0 and rank 1 and rank 2") == (all_late.code, all_late.found)
    assert "60 s" == asyncio.run(main(60.0, set())).found


def test_what_is_no_sample_is_scored_by_every_rank() -> None:
    """All ranks take part in the pass; the result comes from an output rank."""
    layouts = [
        EngineLayout(data_parallel_rank=rank, data_parallel_size=2, is_output_rank=rank > 0) for rank in range(2)
    ]
    ranks = [FakeRank(layout) for layout in layouts]

    async def main() -> list[list[float]]:
        scored = group(ranks)
        await scored.initialize()
        return await scored.score([1, 2], [[3], [4], [5]])

    assert [[-1.0]] * 3 == asyncio.run(main())
    assert [[([3], [4], [5])]] * 2 == [rank.got for rank in ranks]
