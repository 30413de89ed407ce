"""Engines: the ranks of a model, which read and write columns of the queue, and the group that the controller calls."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import attrs

from jackfield.abc.engine import BaseEngine, EngineLayout, EngineOutput, LoadCheckpointRequest, SaveCheckpointRequest
from jackfield.algorithms import LossSpec, naming_rows, resolve_loss
from jackfield.clock import Clock
from jackfield.errors import EngineError, JackfieldError, WorkerLost
from jackfield.queue import BatchMeta, TransferQueue, Values
from jackfield.queue.meta import Written
from jackfield.sdk.cells import column_from_rows, from_nested, to_nested
from jackfield.sdk.jagged import to_padded
from jackfield.weights import WeightSender

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

T = TypeVar("T")

PREFIX = "log_prob_check/"  #: prefix of the names that :func:`distances` returns
_SAMPLE = ("prompt_ids", "response_ids", "response_mask")


@attrs.frozen(kw_only=True)
class Comparison:
    """Selects what a training pass is compared with, in plain values for RPC."""

    engine: str  #: column of the engine's log-probs, computed by an inference pass with the same weights
    #: samples generated entirely by this version are also compared with ``rollout_log_probs``; None: no sample is
    version: int | None
    slack: float = 0.0  #: nats by which sampling filters may raise the rollout's log-probs
    dropout: bool = False  #: the model trains with dropout: compare the rollout's with the inference pass


@attrs.define(eq=False)
class EngineRank:
    """Runs one ``BaseEngine`` in a thread, so that the event loop stays responsive."""

    _engine: BaseEngine
    _values: Values
    _loss_columns: Sequence[str] = attrs.field(default=(), kw_only=True)  #: further columns that the loss reads
    #: columns of the queue by their names in the loss, if these differ
    _renamed: Mapping[str, str] = attrs.field(factory=dict, kw_only=True)
    sender: WeightSender | None = attrs.field(default=None, kw_only=True)  #: None: this rank publishes no weights
    _work: tuple[BatchMeta, Comparison | None, TensorDict] | None = attrs.field(default=None, init=False)

    async def initialize(self) -> EngineLayout:
        """Load the model. Return this rank's place among the others."""
        await self._in_thread(self._engine.initialize)
        return self._engine.layout

    async def read(self, batch: BatchMeta, *, update: bool, comparison: Comparison | None = None) -> None:
        """Read the samples for the next call of :meth:`update` or :meth:`compute`.

        Raises:
            QueueError: If samples are missing. No rank has started to compute then.
        """
        from tensordict import TensorDict

        more = [*self._loss_columns] if update else []
        if update and comparison is not None:
            more += [comparison.engine] if comparison.version is None else [comparison.engine, "rollout_log_probs"]
        stored = {name: self._renamed.get(name, name) for name in (*_SAMPLE, *more)}
        columns = await self._values.read(batch, tuple(dict.fromkeys(stored.values())))
        values = {
            name: to_nested(columns[column]) if columns[column].offsets is not None else columns[column].values
            for name, column in stored.items()
        }
        self._work = batch, comparison, TensorDict(values, batch_size=[len(batch)])

    def _taken(self) -> tuple[BatchMeta, Comparison | None, TensorDict]:
        """Return what :meth:`read` read last, and forget it."""
        work, self._work = self._work, None
        assert work is not None, "read() comes first"
        return work

    async def compute(
        self, kind: Literal["log_probs", "values"], column: str, *, adapter_off: bool = False
    ) -> Written | None:
        """Write the model's log-probs of the responses, or a critic's values, into ``column``.

        Returns:
            What was written; None if this is not an output rank.
        """
        batch, _, table = self._taken()
        output = await self._in_thread(self._forward, table, adapter_off)
        if not self._engine.layout.is_output_rank:
            return None
        return await self._values.write(batch, {column: from_nested(getattr(output, kind))})

    async def score(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Return log-probs of tokens outside the queue; None if this is not an output rank."""
        import torch
        from tensordict import TensorDict

        rows = {
            "prompt_ids": [torch.tensor(prompt_ids) for _ in responses],
            "response_ids": [torch.tensor(response) for response in responses],
            "response_mask": [torch.ones(len(response), dtype=torch.bool) for response in responses],
        }
        columns = {name: to_nested(column_from_rows(values)) for name, values in rows.items()}
        data = TensorDict(columns, batch_size=[len(responses)])
        output = await self._in_thread(self._forward, data, False)
        if not self._engine.layout.is_output_rank:
            return None
        return [row.tolist() for row in output.log_probs.unbind()]

    async def update(self, loss: LossSpec) -> dict[str, float]:
        """Run this rank's part of an optimizer step; return ``grad_norm``, ``lr`` and metrics.

        With a comparison, the result includes the :func:`distances` of the training pass.
        """
        import torch

        batch, comparison, table = self._taken()
        data = table.select(*_SAMPLE, *self._loss_columns)
        data["row"] = torch.arange(len(batch))
        with naming_rows([f"sample {key}" for key in batch.keys]):
            output, metrics = await self._in_thread(self._train, data, loss)
        if comparison is not None and self._engine.layout.is_output_rank:
            metrics |= distances(output.log_probs, table, batch, comparison)
        result: dict[str, float] = metrics
        return result

    async def save(self, folder: str, format: Literal["native", "huggingface"]) -> None:
        """Write this rank's part of a checkpoint."""
        await self._in_thread(self._engine.save_checkpoint, SaveCheckpointRequest(folder=folder, format=format))

    async def load(self, folder: str, *, model_only: bool = False) -> None:
        """Read a native checkpoint."""
        await self._in_thread(self._engine.load_checkpoint, LoadCheckpointRequest(folder=folder, model_only=model_only))

    async def to(self, device: str) -> None:
        """Move everything to ``device``."""
        await self._in_thread(self._engine.to, device)

    async def close(self) -> None:
        """Release the engine."""
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
        try:
            return await asyncio.to_thread(call, *arguments)
        except JackfieldError:
            raise
        except Exception as error:
            raise EngineError(
                f"the {role} engine raised {type(error).__name__}: {error}", where=f"rank {rank}"
            ) from error


def distances(
    trained: torch.Tensor | None, table: TensorDict, batch: BatchMeta, comparison: Comparison
) -> dict[str, float]:
    """Compute distances of log-probs over the model's own tokens, in nats.

    Args:
        trained: Log-probs of the training pass, jagged ``[B, j]``.
        table: ``response_mask`` and the comparison's columns, jagged ``[B, j]``.
        batch: The samples.
        comparison: What to compare with.

    Returns:
        With :data:`PREFIX`, for ``train_mode`` (training against inference pass) and ``rollout`` (rollout against
        training pass): ``tokens``, ``sum`` and ``max`` of the distances; ``rollout/signed_sum``, positive if the
        rollout's are higher; and ``sample/KEY/max``, the mean distance of the sample that is farthest from the rollout.
        All but ``max`` are summed over ranks. ``rollout`` is absent if no sample can be compared.
    """
    import torch

    if trained is None:
        raise EngineError(
            "the engine's training pass has no log-probs",
            where="EngineOutput.log_probs",
            expected="jagged float32 [B, j], which the log-prob check compares",
            found=None,
            fix="have the engine return them, or set log_prob_check.every: 0",
        )
    mask = to_padded(table["response_mask"]) != 0
    now, engine = to_padded(trained), to_padded(table[comparison.engine])
    result, version = _statistics("train_mode", (now - engine).abs()[mask]), comparison.version
    # samples of an expert have no versions
    compared = [
        version is not None and tags.get("weight_version_min") == version == tags.get("weight_version_max")
        for tags in batch.tags
    ]
    own = mask & torch.tensor(compared)[:, None]
    if not own.any():
        return result
    higher = to_padded(table["rollout_log_probs"]) - (engine if comparison.dropout else now)
    distance = torch.maximum(-higher, higher - comparison.slack).clamp(min=0.0)
    rows = distance.double().masked_fill(~own, 0.0).sum(-1) / own.sum(-1).clamp(min=1)
    farthest = int(rows.nan_to_num(torch.inf).argmax())
    return {
        **result,
        **_statistics("rollout", distance[own]),
        f"{PREFIX}rollout/signed_sum": float(higher.double()[own].sum()),
        f"{PREFIX}sample/{batch.keys[farthest]}/max": float(rows[farthest]),
    }


def _statistics(name: str, distances: torch.Tensor) -> dict[str, float]:
    if not len(distances):
        return {}
    values: dict[str, Any] = {"tokens": len(distances), "sum": distances.double().sum(), "max": distances.max()}
    return {f"{PREFIX}{name}/{key}": float(value) for key, value in values.items()}


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
    _layouts: list[EngineLayout] = attrs.field(factory=list, kw_only=True)
    reading: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)  #: held while weights are read between steps

    def without_adapter(self) -> EngineGroup:
        """Return a group of the same ranks that computes with the base model."""
        return attrs.evolve(self, role="reference", adapter_off=True, layouts=self._layouts)

    async def initialize(self) -> None:
        """Load the model on every rank."""
        self._layouts[:] = await self._all("to load the model", lambda rank, _: rank.initialize())

    async def compute(self, kind: Literal["log_probs", "values"], batch: BatchMeta, column: str) -> None:
        """Write the model's log-probs of the responses, or a critic's values, into ``column``."""
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
                # if a rank dies, others that wait for it may fail first
                await asyncio.wait(tasks, timeout=_CAUSE_SECONDS)
                errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
                raise next((error for error in errors if isinstance(error, WorkerLost)), errors[0])
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()


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
