"""Engine workers of one process: they read their rows from the queue and write their columns back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from jackfield.abc.engine import BaseEngine, EngineOutput, LossSpec, SaveCheckpointRequest
from jackfield.abc.transfer_queue import Column
from jackfield.clock import Clock
from jackfield.errors import EngineError, JackfieldError
from jackfield.queue import BatchMeta, TransferQueue, from_nested, to_nested

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["InlineEngineGroup"]

_SAMPLE = ("prompt_ids", "response_ids", "response_mask")


class InlineEngineGroup:
    """One rank in this process, for a model that needs no other."""

    def __init__(
        self,
        engine: BaseEngine,
        queue: TransferQueue,
        clock: Clock,
        *,
        seconds: float,
        loss_columns: Sequence[str] = (),
        renamed: Mapping[str, str] | None = None,
        adapter_off: bool = False,
    ) -> None:
        """
        Args:
            engine: the rank.
            queue: where samples are.
            clock: the run's.
            seconds: the deadline of one call of the engine (a model's loading, a pass, a step, a checkpoint).
            loss_columns: what the loss reads beside the sample itself.
            renamed: column name in the queue by the name that the loss knows it under.
            adapter_off: work as the base model (the reference policy of a LoRA actor).
        """
        self._engine = engine
        self._queue = queue
        self._clock = clock
        self._seconds = seconds
        self._loss_columns = tuple(loss_columns)
        self._renamed = dict(renamed or {})
        self._adapter_off = adapter_off

    async def initialize(self) -> None:
        """Load the model."""
        await self._in_thread(self._engine.initialize)

    async def compute_log_probs(self, batch: BatchMeta, column: str) -> None:
        """Write the model's log-probs of the responses into ``column``."""
        data = await self._read(batch, _SAMPLE)
        output = await self._in_thread(lambda: self._forward(data))
        assert output.log_probs is not None
        await self._queue.put(batch, {column: from_nested(output.log_probs)})

    async def update(self, batch: BatchMeta, loss: LossSpec) -> dict[str, float]:
        """One optimizer step; ``grad_norm``, ``lr`` and the loss's metrics."""
        data = await self._read(batch, (*_SAMPLE, *self._loss_columns))
        metrics: dict[str, float] = await self._in_thread(lambda: self._train(data, loss))
        return metrics

    async def save(self, folder: str, format: Literal["native", "huggingface"]) -> None:
        """Write a checkpoint."""
        await self._in_thread(lambda: self._engine.save_checkpoint(SaveCheckpointRequest(folder=folder, format=format)))

    async def to(self, device: str) -> None:
        """Move everything to ``device``."""
        await self._in_thread(lambda: self._engine.to(device))

    async def close(self) -> None:
        """Release the engine."""
        await self._in_thread(self._engine.close)

    def _forward(self, data: TensorDict) -> EngineOutput:
        adapter: AbstractContextManager[None] = self._engine.disable_adapter() if self._adapter_off else nullcontext()
        with self._engine.eval_mode(), adapter:
            return self._engine.forward_backward_batch(data, None, forward_only=True)

    def _train(self, data: TensorDict, loss: LossSpec) -> dict[str, float]:
        engine = self._engine
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(data, loss)
            grad_norm = engine.optimizer_step()
        lr = engine.lr_scheduler_step()
        return {**output.metrics, "grad_norm": grad_norm, "lr": lr}

    async def _read(self, batch: BatchMeta, names: Sequence[str]) -> TensorDict:
        from tensordict import TensorDict

        columns = await self._queue.get(batch, tuple(self._renamed.get(name, name) for name in names))
        values = {name: _tensor(columns[self._renamed.get(name, name)]) for name in names}
        return TensorDict(values, batch_size=[len(batch)])

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        role, rank = self._engine.context.role, self._engine.context.rank
        try:
            return await self._clock.wait_for(
                asyncio.to_thread(call), self._seconds, f"the {role} engine, rank {rank}, to finish what it was asked"
            )
        except JackfieldError:
            raise
        except Exception as error:
            raise EngineError(
                f"the {role} engine raised {type(error).__name__}: {error}",
                where=f"rank {rank}",
            ) from error


def _tensor(column: Column) -> Any:
    return column.values if column.offsets is None else to_nested(column)
