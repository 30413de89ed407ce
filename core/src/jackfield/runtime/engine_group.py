"""The ranks of one model: the controller splits batches and collects results."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

import attrs

from jackfield.abc.engine import EngineLayout
from jackfield.algorithms import LossSpec
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, EngineError, WorkerLost
from jackfield.queue import BatchMeta, TransferQueue
from jackfield.runtime.engine_rank import Comparison, EngineRank

T = TypeVar("T")

_CAUSE_SECONDS = 2.0  #: to wait until the rank that caused a failure is known


@attrs.define(eq=False)
class EngineGroup:
    """Splits batches by the ranks' layouts, and collects results from output ranks.

    It handles metadata only and knows no parallelism but data parallelism: ranks of one data-parallel rank get the
    same samples.
    """

    _role: str  #: ``actor``, ``reference`` or ``critic``, for messages
    _ranks: Sequence[EngineRank]  #: all ranks in order, or their stubs
    _queue: TransferQueue
    _clock: Clock
    #: deadline of one call of a rank: loading a model, a pass, a step or a checkpoint
    _seconds: float = attrs.field(kw_only=True)
    #: compute with the base model (the reference policy of a LoRA actor)
    _adapter_off: bool = attrs.field(default=False, kw_only=True)
    _layouts: list[EngineLayout] = attrs.field(factory=list, init=False)
    reading: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)  #: held while weights are read between steps

    def without_adapter(self) -> EngineGroup:
        """Return a group of the same ranks that computes with the base model."""
        base = attrs.evolve(self, role="reference", adapter_off=True)
        base._layouts = self._layouts
        return base

    async def initialize(self) -> None:
        """Load the model on every rank."""
        self._layouts[:] = await self._all("to load the model", lambda rank, _: rank.initialize())

    async def compute_log_probs(self, batch: BatchMeta, column: str) -> None:
        """Write the model's log-probs of the responses into ``column``."""
        await self._compute("log_probs", batch, column)

    async def compute_values(self, batch: BatchMeta, column: str) -> None:
        """Write a critic's values of the responses into ``column``."""
        await self._compute("values", batch, column)

    async def _compute(self, kind: Literal["log_probs", "values"], batch: BatchMeta, column: str) -> None:
        parts, off = await self._read(batch, update=False), self._adapter_off
        what = f"to compute {column} of {_named(batch)}"
        results = await self._all(what, lambda rank, _: rank.compute(kind, column, adapter_off=off))
        for part, written in self._counting(parts, results):
            await self._queue.add_columns(part, written)

    async def score(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probs of responses after one prompt; every rank computes all of them."""
        results = await self._all("to score a few tokens", lambda rank, _: rank.score(prompt_ids, responses))
        return next(result for result in results if result is not None)

    async def update(self, batch: BatchMeta, loss: LossSpec, comparison: Comparison | None = None) -> dict[str, float]:
        """Run one optimizer step; return ``grad_norm``, ``lr`` and metrics of loss and comparison."""
        parts = await self._read(batch, update=True, comparison=comparison)
        results = await self._all(f"to train on {_named(batch)}", lambda rank, _: rank.update(loss))
        return combined([metrics for _, metrics in self._counting(parts, results)])

    def _counting(self, parts: Sequence[BatchMeta], results: Sequence[T | None]) -> list[tuple[BatchMeta, T]]:
        """Return samples and result of one output rank for each data-parallel rank."""
        counting: dict[int, tuple[BatchMeta, T]] = {}
        for layout, part, result in zip(self._layouts, parts, results, strict=True):
            if layout.is_output_rank and result is not None:
                counting.setdefault(layout.data_parallel_rank, (part, result))
        return [counting[rank] for rank in sorted(counting)]

    async def _read(
        self, batch: BatchMeta, *, update: bool, comparison: Comparison | None = None
    ) -> Sequence[BatchMeta]:
        """Let each rank read its samples, and return the samples by rank.

        Samples may be lost, and ranks compute together, so no rank starts to compute before all have read.
        """
        parts = self._split(batch)
        what = f"to read {_named(batch)}"
        await self._all(what, lambda rank, index: rank.read(parts[index], update=update, comparison=comparison))
        return parts

    async def save(self, folder: str, format: Literal["native", "huggingface"]) -> None:
        """Write a checkpoint into ``folder``."""
        async with self.reading:
            await self._all(f"to save {folder}", lambda rank, _: rank.save(folder, format))

    async def load(self, folder: str, *, model_only: bool = False) -> None:
        """Read a native checkpoint, written by any number of ranks."""
        await self._all(f"to load {folder}", lambda rank, _: rank.load(folder, model_only=model_only))

    async def to(self, device: str) -> None:
        """Move everything to ``device``."""
        await self._all(f"to move to {device}", lambda rank, _: rank.to(device))

    def _split(self, batch: BatchMeta) -> list[BatchMeta]:
        """Return the samples of each rank."""
        assert self._layouts, "initialize() comes first"
        size = self._layouts[0].data_parallel_size
        if len(batch) < size:
            raise EngineError(
                "a batch has fewer samples than the engine has data-parallel ranks",
                where=_named(batch),
                expected=f"{size} samples at least",
                found=len(batch),
                fix="use fewer ranks (cluster.ray.engine_ranks), larger batches or fewer algorithm.mini_batches",
            )
        lengths = [tags["prompt_tokens"] + tags["response_tokens"] for tags in batch.tags]
        parts = [batch.select(indexes) for indexes in shares(lengths, size)]
        return [parts[layout.data_parallel_rank] for layout in self._layouts]

    async def _all(self, what: str, call: Callable[[EngineRank, int], Awaitable[T]]) -> list[T]:
        """Call every rank and return the results. The first failure ends the wait for the others."""
        tasks = []
        for index, rank in enumerate(self._ranks):
            name = f"the {self._role} engine, rank {index}, {what}"
            tasks.append(asyncio.ensure_future(self._clock.wait_for(call(rank, index), self._seconds, name)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.exception() is not None for task in done):
                raise await self._cause(tasks)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    async def _cause(self, tasks: Sequence[asyncio.Task[Any]]) -> BaseException:
        """Return why a call failed; if a rank dies, others that wait for it may fail first."""
        with suppress(DeadlineExceeded):
            await self._clock.wait_for(asyncio.wait(tasks), _CAUSE_SECONDS, "the other ranks")
        errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
        return next((error for error in errors if isinstance(error, WorkerLost)), errors[0])


def shares(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return row indexes per data-parallel rank: equal counts (±1), similar total lengths.

    Rows are assigned longest first, to the rank with the fewest tokens that has room. One rank gets all, in order.
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
    """Combine the data-parallel ranks' shares of a step's metrics.

    Shares are summed. Names in ``/max`` or ``/min`` take the extreme; ``grad_norm`` and ``lr`` are equal on all ranks.
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
