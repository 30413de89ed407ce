"""One rank of an engine: it reads its rows from the queue's backend and writes its columns there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from jackfield.abc.checkpoint_engine import CheckpointEngine
from jackfield.abc.engine import (
    BaseEngine,
    EngineLayout,
    EngineOutput,
    LoadCheckpointRequest,
    SaveCheckpointRequest,
)
from jackfield.abc.transfer_queue import Column
from jackfield.algorithms import LossSpec, resolve_loss
from jackfield.errors import EngineError, JackfieldError
from jackfield.queue import BatchMeta, Values, Written, column_from_rows, from_nested, to_nested
from jackfield.runtime.log_probs import Comparison, distances
from jackfield.runtime.samples import naming_samples
from jackfield.weights import WeightSender

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

_SAMPLE = ("prompt_ids", "response_ids", "response_mask")


class EngineRank:
    """Drives one :class:`~jackfield.abc.engine.BaseEngine`, in a thread, so that the event loop stays free."""

    def __init__(
        self,
        engine: BaseEngine,
        values: Values,
        *,
        loss_columns: Sequence[str] = (),
        renamed: Mapping[str, str] | None = None,
        transport: CheckpointEngine | None = None,
        block_bytes: int = 0,
    ) -> None:
        """
        Args:
            engine: the rank.
            values: reads and writes columns of samples.
            loss_columns: what the loss reads beside the sample itself.
            renamed: column name in the queue by the name that the loss knows it under.
            transport: this rank's end of the weight plane; None: it publishes nothing.
            block_bytes: of deltas of the weights; 0: none will be sent.
        """
        self._engine = engine
        self._values = values
        self._loss_columns = tuple(loss_columns)
        self._renamed = dict(renamed or {})
        self.sender = None
        if transport is not None:
            self.sender = WeightSender(transport, engine.get_per_tensor_param, block_bytes=block_bytes)
        self._known: tuple[tuple[str, ...], tuple[str, ...], TensorDict] | None = None  #: keys, columns, values

    async def initialize(self) -> EngineLayout:
        """Load the model; where this rank stands."""
        await self._in_thread(self._engine.initialize)
        return self._engine.layout

    async def read(self, batch: BatchMeta, *, update: bool, comparison: Comparison | None = None) -> None:
        """Read what the next call on this batch needs: :meth:`update`, or another.

        Raises:
            QueueError: rows are not there; nothing has been begun.
        """
        names = self._update_columns(comparison) if update else _SAMPLE
        self._known = (batch.keys, names, await self._tensors(batch, names))

    def _update_columns(self, comparison: Comparison | None) -> tuple[str, ...]:
        compared = () if comparison is None else comparison.columns
        return tuple(dict.fromkeys((*_SAMPLE, *self._loss_columns, *compared)))

    async def compute_log_probs(self, batch: BatchMeta, column: str, *, adapter_off: bool = False) -> Written | None:
        """Write the model's log-probs of the responses into ``column``; None where another rank's results count."""
        return await self._compute(batch, column, adapter_off, lambda output: output.log_probs)

    async def compute_values(self, batch: BatchMeta, column: str) -> Written | None:
        """Do the same with the values of a critic's value head."""
        return await self._compute(batch, column, False, lambda output: output.values)

    async def _compute(
        self, batch: BatchMeta, column: str, adapter_off: bool, wanted: Callable[[EngineOutput], Any]
    ) -> Written | None:
        data = await self._read(batch, _SAMPLE)
        output = await self._in_thread(lambda: self._forward(data, adapter_off))
        if not self._engine.layout.is_output_rank:
            return None
        result = wanted(output)
        assert result is not None, f"the engine computes {column}"
        return await self._values.write(batch, {column: from_nested(result)})

    async def score(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Log-probs of a few tokens that are no samples; None where another rank's results count."""
        data = _table(prompt_ids, responses)
        output = await self._in_thread(lambda: self._forward(data, False))
        if not self._engine.layout.is_output_rank:
            return None
        assert output.log_probs is not None, "the engine computes log-probs"
        return [row.tolist() for row in output.log_probs.unbind()]

    async def update(self, batch: BatchMeta, loss: LossSpec, comparison: Comparison | None = None) -> dict[str, float]:
        """This rank's part in one optimizer step: ``grad_norm``, ``lr`` and its share of the loss's metrics.

        With a comparison, the :func:`~jackfield.runtime.log_probs.distances` of the pass that is trained on, too.
        """
        import torch

        table = await self._read(batch, self._update_columns(comparison))
        data = table.select(*_SAMPLE, *self._loss_columns)
        data["row"] = torch.arange(len(batch))
        with naming_samples(batch):
            output, metrics = await self._in_thread(lambda: self._train(data, loss))
        if comparison is not None and self._engine.layout.is_output_rank:
            metrics |= distances(_require_log_probs(output), table, batch, comparison)
        result: dict[str, float] = metrics
        return result

    async def save(self, folder: str, format: Literal["native", "huggingface"]) -> None:
        """Write this rank's part of a checkpoint."""
        await self._in_thread(lambda: self._engine.save_checkpoint(SaveCheckpointRequest(folder=folder, format=format)))

    async def load(self, folder: str, *, model_only: bool = False) -> None:
        """Read a native checkpoint."""
        request = LoadCheckpointRequest(folder=folder, model_only=model_only)
        await self._in_thread(lambda: self._engine.load_checkpoint(request))

    async def to(self, device: str) -> None:
        """Move everything to ``device``."""
        await self._in_thread(lambda: self._engine.to(device))

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

    async def _read(self, batch: BatchMeta, names: tuple[str, ...]) -> TensorDict:
        known, self._known = self._known, None
        if known is not None and known[:2] == (batch.keys, names):
            return known[2]
        return await self._tensors(batch, names)

    async def _tensors(self, batch: BatchMeta, names: Sequence[str]) -> TensorDict:
        from tensordict import TensorDict

        stored = {name: self._renamed.get(name, name) for name in names}
        columns = await self._values.read(batch, tuple(dict.fromkeys(stored.values())))
        values = {name: _tensor(columns[stored[name]]) for name in names}
        return TensorDict(values, batch_size=[len(batch)])

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        role, rank = self._engine.context.role, self._engine.context.rank
        try:
            return await asyncio.to_thread(call)
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
    """Values of one prompt, in the form of a batch."""
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
