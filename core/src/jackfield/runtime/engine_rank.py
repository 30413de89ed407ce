"""One rank of an engine, which reads and writes columns in the queue's backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import attrs

from jackfield.abc.engine import BaseEngine, EngineLayout, EngineOutput, LoadCheckpointRequest, SaveCheckpointRequest
from jackfield.abc.transfer_queue import Column
from jackfield.algorithms import LossSpec, resolve_loss
from jackfield.errors import EngineError, JackfieldError
from jackfield.queue import BatchMeta, Values, Written
from jackfield.runtime.samples import naming_samples
from jackfield.sdk.columns import column_from_rows, from_nested, to_nested
from jackfield.sdk.jagged import to_padded
from jackfield.weights import WeightSender

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

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

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that the comparison reads."""
        return (self.engine,) if self.version is None else (self.engine, "rollout_log_probs")


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

        more = (*self._loss_columns, *(comparison.columns if comparison else ())) if update else ()
        stored = {name: self._renamed.get(name, name) for name in (*_SAMPLE, *more)}
        columns = await self._values.read(batch, tuple(dict.fromkeys(stored.values())))
        values = {name: _tensor(columns[column]) for name, column in stored.items()}
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
        data = _table(prompt_ids, responses)
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
        with naming_samples(batch):
            output, metrics = await self._in_thread(self._train, data, loss)
        if comparison is not None and self._engine.layout.is_output_rank:
            metrics |= distances(_require_log_probs(output), table, batch, comparison)
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


def _require_log_probs(output: EngineOutput) -> torch.Tensor:
    if output.log_probs is None:
        raise EngineError(
            "the engine's training pass has no log-probs",
            where="EngineOutput.log_probs",
            expected="jagged float32 [B, j], which the log-prob check compares",
            found=None,
            fix="have the engine return them, or set log_prob_check.every: 0",
        )
    return output.log_probs


def _table(prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> TensorDict:
    """Return one prompt and its responses in the form of a batch."""
    import torch
    from tensordict import TensorDict

    rows = {
        "prompt_ids": [torch.tensor(prompt_ids) for _ in responses],
        "response_ids": [torch.tensor(response) for response in responses],
        "response_mask": [torch.ones(len(response), dtype=torch.bool) for response in responses],
    }
    columns = {name: to_nested(column_from_rows(values)) for name, values in rows.items()}
    return TensorDict(columns, batch_size=[len(responses)])


def _tensor(column: Column) -> Any:
    return column.values if column.offsets is None else to_nested(column)


def distances(trained: torch.Tensor, table: TensorDict, batch: BatchMeta, comparison: Comparison) -> dict[str, float]:
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
