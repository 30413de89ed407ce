"""Engines: the ranks of a model, which read and write columns of the queue, and the group that the controller calls."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import attrs

from jackfield.abc.engine import BaseEngine, EngineLayout, EngineOutput, LoadCheckpointRequest, SaveCheckpointRequest
from jackfield.algorithms import LossSpec, resolve_loss
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, EngineError, WorkerLost
from jackfield.queue import TransferQueue, Values
from jackfield.queue.meta import BatchMeta, Written
from jackfield.runtime.comparison import Comparison, Distances, distances
from jackfield.runtime.initial import InitialSample, read_initial, write_initial
from jackfield.runtime.profile import begin_trace, end_trace, labelled
from jackfield.sdk.cells import from_nested, to_nested
from jackfield.sdk.jagged import jagged
from jackfield.sdk.samples import naming_samples
from jackfield.weights import WeightSender
from jackfield.weights.links import engine_errors

if TYPE_CHECKING:
    from tensordict import TensorDict

T = TypeVar("T")
Output: TypeAlias = Literal["log_probs", "values"]

_SAMPLE = ("prompt_ids", "response_ids", "response_mask")


@attrs.define(eq=False)
class EngineRank:
    """Runs one ``BaseEngine`` in a thread, so that the event loop stays responsive."""

    _engine: BaseEngine
    _values: Values
    #: further columns that the loss reads, by its names
    _loss_columns: Mapping[str, str] = attrs.field(factory=dict, kw_only=True)
    _arrays: bool = attrs.field(default=False, kw_only=True)  #: whether samples have inputs beside tokens
    sender: WeightSender | None = attrs.field(default=None, kw_only=True)  #: None: this rank publishes no weights
    _work: tuple[BatchMeta, Comparison | None, TensorDict] = attrs.field(init=False)  #: what :meth:`read` read last
    _initial: list[InitialSample] = attrs.field(factory=list, init=False)

    @property
    def _sample(self) -> tuple[str, ...]:
        return (*_SAMPLE, "multi_modal_inputs") if self._arrays else _SAMPLE

    async def initialize(self) -> EngineLayout:
        """Load the model. Return this rank's place among the others."""
        import tensordict  # noqa: F401 - now rather than in the first step

        await self._in_thread(self._engine.initialize)
        return self._engine.layout

    async def read(self, batch: BatchMeta, *, update: bool, comparison: Comparison | None = None) -> None:
        """Read the samples for the next call of :meth:`update` or :meth:`compute`, or raise a ``QueueError``."""
        from tensordict import TensorDict

        names = list(self._sample)
        if update and comparison is not None:
            names += [comparison.engine] if comparison.version is None else [comparison.engine, "rollout_log_probs"]
        stored = {**dict(zip(names, names, strict=True)), **(self._loss_columns if update else {})}
        columns = await self._values.read(batch, tuple(dict.fromkeys(stored.values())))
        values = {
            name: to_nested(columns[column]) if columns[column].offsets is not None else columns[column].values
            for name, column in stored.items()
        }
        self._work = batch, comparison, TensorDict(values, batch_size=[len(batch)])

    async def compute(
        self, kind: Output, column: str, batch: BatchMeta | None = None, *, adapter_off: bool = False
    ) -> Written | None:
        """Write the model's log-probs of the responses, or a critic's values, into ``column``.

        ``batch`` is read first; None: use what :meth:`read` read last. Return what was written; None if this is not an
        output rank.
        """
        if batch is not None:
            await self.read(batch, update=False)
        batch, _, table = self._work
        with naming_samples([f"sample {key}" for key in batch.keys]):
            output = await self._in_thread(self._forward, table, adapter_off)
        if not self._engine.layout.is_output_rank:
            return None
        return await self._values.write(batch, {column: from_nested(getattr(output, kind))})

    async def score(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Return log-probs of tokens outside the queue; None if this is not an output rank."""
        found = await self._scored([(prompt_ids, response) for response in responses])
        return found if self._engine.layout.is_output_rank else None

    async def keep_initial(self, count: int, batch: BatchMeta | None = None) -> None:
        """Keep the first ``count`` samples, which the initial model gave, with its log-probs of their responses."""
        if batch is not None:
            await self.read(batch, update=False)
        columns = [self._work[2][name].unbind() for name in _SAMPLE]
        rows = [[part.int().tolist() for part in row] for row in zip(*columns, strict=True)][:count]
        self._initial = [(*row, found) for row, found in zip(rows, await self._scored(rows), strict=True)]

    async def initial_kl(self) -> tuple[float, int] | None:
        """Return the sum of KL estimates over tokens of the kept samples, and their number; None: nothing is known.

        With d the log-prob of a token minus the initial model's, the mean of exp(d) - 1 - d is an unbiased estimate of
        KL(initial || policy), and never negative (k3 of http://joschu.net/blog/kl-approx.html).
        """
        after = await self._scored(self._initial) if self._initial else []
        if not after or not self._engine.layout.is_output_rank:
            return None
        found = list[float]()
        for (_, _, mask, before), log_probs in zip(self._initial, after, strict=True):
            moved = [new - old for new, old, is_model in zip(log_probs, before, mask, strict=True) if is_model]
            found += [math.expm1(min(each, 50.0)) - each for each in moved]
        return sum(found), len(found)

    async def _scored(self, rows: Sequence[Sequence[Any]]) -> list[list[float]]:
        """Return log-probs of the responses of rows that begin with prompt and response; empty where not an output."""
        import torch
        from tensordict import TensorDict

        columns = {name: jagged([torch.tensor(row[at]) for row in rows]) for at, name in enumerate(_SAMPLE[:2])}
        columns["response_mask"] = jagged([torch.ones(len(row[1]), dtype=torch.bool) for row in rows])
        output = await self._in_thread(self._forward, TensorDict(columns, batch_size=[len(rows)]), False)
        if not self._engine.layout.is_output_rank:
            return [[] for _ in rows]
        return [row.tolist() for row in output.log_probs.unbind()]

    async def update(
        self, loss: LossSpec, batch: BatchMeta | None = None, comparison: Comparison | None = None
    ) -> tuple[dict[str, float], Distances]:
        """Run this rank's part of an optimizer step; return ``grad_norm``, ``lr`` and metrics.

        ``batch`` is as for :meth:`compute`. With a comparison, also return the :func:`distances` of the training pass.
        """
        import torch

        if batch is not None:
            await self.read(batch, update=True, comparison=comparison)
        batch, comparison, table = self._work
        data = table.select(*self._sample, *self._loss_columns)
        data["row"] = torch.arange(len(batch))
        with naming_samples([f"sample {key}" for key in batch.keys]):
            output, metrics = await self._in_thread(self._train, data, loss)
        if comparison is None or not self._engine.layout.is_output_rank:
            return metrics, {}
        return metrics, distances(output.log_probs, table, batch, comparison)

    async def save(self, folder: str, format: Literal["native", "huggingface"], *, background: bool = False) -> None:
        """Write this rank's part of a checkpoint; in the ``background``, copy it, and :meth:`finish_save` waits."""
        request = SaveCheckpointRequest(folder=folder, format=format, background=background)
        await self._in_thread(self._engine.save_checkpoint, request)
        if self._initial and format == "native" and self._engine.layout.is_output_rank:
            write_initial(Path(folder), self._engine.layout.data_parallel_rank, self._initial)

    async def finish_save(self) -> None:
        """Wait for the files of checkpoints in the background."""
        await self._in_thread(self._engine.finish_checkpoint)

    async def load(self, folder: str, model_only: bool = False) -> None:
        """Read a native checkpoint, or its model only."""
        await self._in_thread(self._engine.load_checkpoint, LoadCheckpointRequest(folder=folder, model_only=model_only))
        layout = self._engine.layout
        if not model_only:
            self._initial = read_initial(Path(folder), layout.data_parallel_rank, layout.data_parallel_size)

    async def to(self, device: str) -> None:
        """Move everything to ``device``."""
        await self._in_thread(self._engine.to, device)

    async def begin_trace(self) -> None:
        """Record what torch does in this process."""
        begin_trace()

    async def end_trace(self, file: str) -> None:
        """Write the trace, unless another rank of this process has written it."""
        await asyncio.to_thread(end_trace, file)

    async def close(self) -> None:
        """Release the engine."""
        await asyncio.to_thread(end_trace)  # of a step that failed
        await self._in_thread(self._engine.close)

    def _forward(self, data: TensorDict, adapter_off: bool) -> EngineOutput:
        adapter: AbstractContextManager[None] = self._engine.disable_adapter() if adapter_off else nullcontext()
        with self._engine.eval_mode(), adapter:
            return self._engine.forward_backward_batch(data, None, forward_only=True)

    def _train(self, data: TensorDict, loss: LossSpec) -> tuple[EngineOutput, dict[str, float]]:
        engine = self._engine
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(data, resolve_loss(loss))
            grad_norm = engine.optimizer_step()
        lr = engine.lr_scheduler_step()
        return output, {**output.metrics, "grad_norm": grad_norm, "lr": lr}

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        role, rank = self._engine.context.role, self._engine.context.rank
        with engine_errors(f"the {role} engine", f"rank {rank}"):
            return await asyncio.to_thread(labelled, f"{role} {rank}: {call.__name__.strip('_')}", call, *arguments)


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
    _layouts: list[EngineLayout] = attrs.field(factory=list, init=False)
    _read: object = attrs.field(default=None, init=False)  #: what several ranks have read last
    reading: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)  #: held while weights are read between steps

    async def initialize(self) -> None:
        """Load the model on every rank."""
        self._layouts = await self._all("to load the model", lambda rank, _: rank.initialize())

    async def compute(self, kind: Output, batch: BatchMeta, column: str, *, adapter_off: bool = False) -> None:
        """Write log-probs of the responses by the model or its base model, or a critic's values, into ``column``."""
        what, off = f"to compute {column} of", adapter_off
        results = await self._shared(what, batch, lambda rank, mine: rank.compute(kind, column, mine, adapter_off=off))
        for part, written in results:
            await self._queue.add_columns(part, written)

    async def score(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probs of responses after one prompt; every rank computes all of them."""
        results = await self._all("to score a few tokens", lambda rank, _: rank.score(prompt_ids, responses))
        return next(result for result in results if result is not None)

    async def keep_initial(self, batch: BatchMeta, count: int) -> None:
        """Let the ranks keep about ``count`` samples of the initial model, one each at least."""
        each = max(1, count // self._layouts[0].data_parallel_size)
        await self._shared("to keep samples of", batch, lambda rank, own: rank.keep_initial(each, own))

    async def initial_kl(self) -> float | None:
        """Return the KL of the initial model from the weights of now, per token; None if no samples are kept."""
        found = await self._all("to compare with the initial model", lambda rank, _: rank.initial_kl())
        told = [each for each in found if each is not None]
        return sum(value for value, _ in told) / max(1, sum(count for _, count in told)) if told else None

    async def update(
        self, batch: BatchMeta, loss: LossSpec, comparison: Comparison | None = None
    ) -> tuple[dict[str, float], Distances]:
        """Run one optimizer step; return ``grad_norm``, ``lr`` and metrics of the loss, and what was compared."""
        more: Any = {"update": True, "comparison": comparison}
        results = await self._shared("to train on", batch, lambda rank, own: rank.update(loss, own, comparison), **more)
        found: Distances = {}
        for _, (_, compared) in results:
            for kind, samples in compared.items():
                found.setdefault(kind, {}).update(samples)
        return combined([metrics for _, (metrics, _) in results]), found

    async def _shared(
        self,
        what: str,
        batch: BatchMeta,
        work: Callable[[EngineRank, BatchMeta | None], Awaitable[T | None]],
        **reading: Any,
    ) -> list[tuple[BatchMeta, T]]:
        """Run work on a batch; return samples and result of one output rank for each data-parallel rank.

        Samples may be lost, and several ranks compute together, so none starts to compute before all have read.
        """
        parts, name = self._split(batch), f"{len(batch)} samples from {batch.keys[0]} to {batch.keys[-1]}"
        reading, alone = {"update": False, "comparison": None, **reading}, len(parts) == 1
        if not alone and (wanted := (batch.keys, batch.leases, reading)) != self._read:
            self._read = None
            await self._all(f"to read {name}", lambda rank, index: rank.read(parts[index], **reading))
            self._read = wanted
        results = await self._all(f"{what} {name}", lambda rank, index: work(rank, parts[index] if alone else None))
        counting: dict[int, tuple[BatchMeta, T]] = {}
        for layout, part, result in zip(self._layouts, parts, results, strict=True):
            if layout.is_output_rank and result is not None:
                counting.setdefault(layout.data_parallel_rank, (part, result))
        return [counting[rank] for rank in sorted(counting)]

    async def save(self, folder: str, format: Literal["native", "huggingface"], *, background: bool = False) -> None:
        """Write a checkpoint into ``folder``; in the ``background``, return when its state is copied."""
        async with self.reading:
            await self._all(f"to save {folder}", lambda rank, _: rank.save(folder, format, background=background))

    async def finish_save(self) -> None:
        """Wait for the files of a checkpoint in the background, or raise why they are not there."""
        async with self.reading:
            await self._all("to finish a checkpoint", lambda rank, _: rank.finish_save())

    async def load(self, folder: str, *, model_only: bool = False) -> None:
        """Read a native checkpoint, written by any number of ranks, or its model only."""
        await self._all(f"to load {folder}", lambda rank, _: rank.load(folder, model_only))

    async def begin_trace(self) -> None:
        """Record what torch does in the processes of all ranks."""
        await self._all("to begin a trace", lambda rank, _: rank.begin_trace())

    async def end_trace(self, folder: str) -> None:
        """Write a trace of each rank, or of each process, into ``folder``."""
        file = f"{folder}/{self._role}"
        await self._all(f"to write {file}", lambda rank, index: rank.end_trace(f"{file}-{index}.json.gz"))

    async def to(self, device: str) -> None:
        """Move everything to ``device``."""
        await self._all(f"to move to {device}", lambda rank, _: rank.to(device))

    def _split(self, batch: BatchMeta) -> list[BatchMeta]:
        assert self._layouts, "initialize() comes first"
        size = self._layouts[0].data_parallel_size
        if len(batch) < size:
            what, where = "a batch has fewer samples than the engine has data-parallel ranks", ", ".join(batch.keys)
            fix = "use fewer ranks (cluster.ray.engine_ranks), larger batches or fewer algorithm.mini_batches"
            raise EngineError(what, where=where, expected=f"{size} samples at least", found=len(batch), fix=fix)
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
                # if a rank dies, others that wait for it may fail first
                await asyncio.wait(tasks, timeout=_CAUSE_SECONDS)
                errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
                errors.sort(key=lambda error: isinstance(error, DeadlineExceeded))
                late = [
                    f"rank {rank}"
                    for rank, task in enumerate(tasks)
                    if not task.done() or isinstance(task.exception(), DeadlineExceeded)
                ]
                error = next((error for error in errors if isinstance(error, WorkerLost)), errors[0])
                if late and isinstance(error, EngineError | DeadlineExceeded):  # the others may only wait for these
                    known = "" if error.found is None else f"{error.found}; "
                    error.found = f"{known}no answer from {' and '.join(late)}"
                raise error
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()


def shares(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return row indexes per data-parallel rank: equal counts (±1), similar total lengths.

    Rows are assigned longest first, to the rank with the fewest tokens that has room. One rank gets all, in order.
    """
    if ranks == 1:
        return [list(range(len(lengths)))]
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
