"""The ranks of one model, seen from the controller: what goes to which rank, and what comes back."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

from jackfield.abc.engine import EngineLayout
from jackfield.algorithms import LossSpec
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, EngineError, WorkerLost
from jackfield.queue import BatchMeta, TransferQueue, Written
from jackfield.runtime.engine_rank import EngineRank
from jackfield.runtime.log_probs import Comparison

T = TypeVar("T")

_CAUSE_SECONDS = 2.0  #: for the rank that caused a failure to be known


class EngineGroup:
    """Splits a batch by the layout that the ranks declare, and collects from the ranks whose results count.

    It handles metadata only, and does not know how the ranks are parallel: ranks of one data-parallel rank get the
    same rows.
    """

    def __init__(
        self,
        role: str,
        ranks: Sequence[EngineRank],
        queue: TransferQueue,
        clock: Clock,
        *,
        seconds: float,
        adapter_off: bool = False,
    ) -> None:
        """
        Args:
            role: ``actor``, ``reference`` or ``critic``, for messages.
            ranks: all of them, in order; in this process, or standing for ranks elsewhere.
            queue: hears of what ranks have written.
            clock: the run's.
            seconds: the deadline of one call of a rank (a model's loading, a pass, a step, a checkpoint).
            adapter_off: work as the base model (the reference policy of a LoRA actor).
        """
        self._role = role
        self._ranks = list(ranks)
        self._queue = queue
        self._clock = clock
        self._seconds = seconds
        self._adapter_off = adapter_off
        self._layouts: list[EngineLayout] = []
        self.reading = asyncio.Lock()  #: held by whoever reads the weights outside of a phase of the trainer

    def without_adapter(self) -> EngineGroup:
        """Return the same ranks as the base model."""
        base = EngineGroup("reference", self._ranks, self._queue, self._clock, seconds=self._seconds, adapter_off=True)
        base._layouts = self._layouts
        return base

    async def initialize(self) -> None:
        """Load the model on every rank."""
        self._layouts[:] = await self._all("to load the model", lambda rank, _: rank.initialize())

    async def compute_log_probs(self, batch: BatchMeta, column: str) -> None:
        """Write the model's log-probs of the responses into ``column``."""
        off = self._adapter_off
        await self._compute(batch, column, lambda rank, part: rank.compute_log_probs(part, column, adapter_off=off))

    async def compute_values(self, batch: BatchMeta, column: str) -> None:
        """Write a critic's values of the responses into ``column``."""
        await self._compute(batch, column, lambda rank, part: rank.compute_values(part, column))

    async def _compute(
        self, batch: BatchMeta, column: str, call: Callable[[EngineRank, BatchMeta], Awaitable[Written | None]]
    ) -> None:
        parts = self._split(batch)
        await self._read_first(batch, parts, update=False)
        what = f"to compute {column} of {_named(batch)}"
        results = await self._all(what, lambda rank, index: call(rank, parts[index]))
        announced: set[int] = set()
        for layout, part, written in zip(self._layouts, parts, results, strict=True):
            if written is not None and layout.data_parallel_rank not in announced:
                announced.add(layout.data_parallel_rank)
                await self._queue.add_columns(part, written)

    async def score(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of each response's tokens behind one prompt: a few, no samples. Every rank computes all of them."""
        results = await self._all("to score a few tokens", lambda rank, _: rank.score(prompt_ids, responses))
        return next(result for result in results if result is not None)

    async def update(self, batch: BatchMeta, loss: LossSpec, comparison: Comparison | None = None) -> dict[str, float]:
        """One optimizer step; ``grad_norm``, ``lr`` and the loss's metrics, and what a comparison finds."""
        parts = self._split(batch)
        await self._read_first(batch, parts, update=True, comparison=comparison)
        what = f"to train on {_named(batch)}"
        results = await self._all(what, lambda rank, index: rank.update(parts[index], loss, comparison))
        counted = {
            layout.data_parallel_rank: result
            for layout, result in reversed(list(zip(self._layouts, results, strict=True)))
            if layout.is_output_rank
        }
        return combined([counted[rank] for rank in sorted(counted)])

    async def _read_first(
        self, batch: BatchMeta, parts: Sequence[BatchMeta], *, update: bool, comparison: Comparison | None = None
    ) -> None:
        """Ranks work together: none begins before all have their rows, for some of them may be lost."""
        if len(self._ranks) > 1:
            what = f"to read {_named(batch)}"
            await self._all(what, lambda rank, index: rank.read(parts[index], update=update, comparison=comparison))

    async def save(self, folder: str, format: Literal["native", "huggingface"]) -> None:
        """Write a checkpoint."""
        async with self.reading:
            await self._all(f"to save {folder}", lambda rank, _: rank.save(folder, format))

    async def load(self, folder: str, *, model_only: bool = False) -> None:
        """Read a native checkpoint, written by any number of ranks."""
        await self._all(f"to load {folder}", lambda rank, _: rank.load(folder, model_only=model_only))

    async def to(self, device: str) -> None:
        """Move everything to ``device``."""
        await self._all(f"to move to {device}", lambda rank, _: rank.to(device))

    def _split(self, batch: BatchMeta) -> list[BatchMeta]:
        """Each rank's rows."""
        assert self._layouts, "initialize() comes first"
        size = self._layouts[0].data_parallel_size
        if len(batch) < size:
            raise EngineError(
                "a batch has fewer rows than the engine has data-parallel ranks",
                where=_named(batch),
                expected=f"{size} rows at least",
                found=len(batch),
                fix="use fewer ranks (cluster.ray.engine_ranks), larger batches or fewer algorithm.mini_batches",
            )
        lengths = [tags["prompt_tokens"] + tags["response_tokens"] for tags in batch.tags]
        parts = [batch.select(indexes) for indexes in shares(lengths, size)]
        return [parts[layout.data_parallel_rank] for layout in self._layouts]

    async def _all(self, what: str, call: Callable[[EngineRank, int], Awaitable[T]]) -> list[T]:
        """Have every rank do its part; the first failure ends the wait for the others."""
        tasks = [asyncio.ensure_future(self._one(what, call, index)) for index in range(len(self._ranks))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.exception() is not None for task in done):
                raise await self._cause(tasks)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    async def _cause(self, tasks: Sequence[asyncio.Task[Any]]) -> BaseException:
        """Why it went wrong. When a rank dies, the others may notice first, by what they miss."""
        with suppress(DeadlineExceeded):
            await self._clock.wait_for(asyncio.wait(tasks), _CAUSE_SECONDS, "the other ranks")
        errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
        return next((error for error in errors if isinstance(error, WorkerLost)), errors[0])

    async def _one(self, what: str, call: Callable[[EngineRank, int], Awaitable[T]], index: int) -> T:
        name = f"the {self._role} engine, rank {index}, {what}"
        return await self._clock.wait_for(call(self._ranks[index], index), self._seconds, name)


def shares(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Row indexes of each data-parallel rank: equal numbers of rows (to one), and about equal sums of lengths.

    Longest rows first, each to the rank with the fewest tokens that has room. With one rank: all rows, in order.
    """
    size, larger = divmod(len(lengths), ranks)
    room = [size + (rank < larger) for rank in range(ranks)]
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    totals = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        total, rank = heapq.heappop(totals)
        chosen[rank].append(index)
        if len(chosen[rank]) < room[rank]:
            heapq.heappush(totals, (total + lengths[index], rank))
    return [sorted(rows) for rows in chosen]


def combined(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One step's metrics from the data-parallel ranks' shares.

    Shares add up, but for names that end in ``/max`` or ``/min``; ``grad_norm`` and ``lr`` are the same on every rank.
    """
    rules: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min}
    whole: dict[str, Any] = {}
    for name in dict.fromkeys(name for result in results for name in result):
        values = [result[name] for result in results if name in result]
        if name in ("grad_norm", "lr"):
            whole[name] = values[0]
        else:
            whole[name] = rules.get(name.rpartition("/")[2], sum)(values)
    return whole


def _named(batch: BatchMeta) -> str:
    return f"{len(batch)} samples from {batch.keys[0]} to {batch.keys[-1]}"
