"""A forward (and backward) pass over a rank's rows, by Megatron-Core's pipeline schedules.

Shapes: ``B`` rows of this rank, ``N`` response tokens of a micro-batch, ``s`` positions, ``b`` rows, ``H`` hidden size.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from jackfield.abc.engine import EngineOutput, LossFunction, TokenOutput
from jackfield.sdk.jagged import jagged
from jackfield_engine_megatron.ranks import Ranks
from jackfield_engine_megatron.rows import MicroBatch, RowBatch
from jackfield_engine_megatron.statistics import Vocabulary


class Pass:
    """One pass over the micro-batches of this rank; results add up."""

    def __init__(
        self,
        chunks: Sequence[Any],
        batch: RowBatch,
        ranks: Ranks,
        vocabulary: Vocabulary,
        function: LossFunction | None,
        *,
        backward: bool,
    ) -> None:
        self._chunks, self._batch, self._ranks, self._vocabulary = chunks, batch, ranks, vocabulary
        self._function, self._backward = function, backward
        self._want_entropy = bool(getattr(function, "needs_entropy", False))
        self._loss = 0.0
        self._metrics: dict[str, float] = {}
        kinds = ("log_probs", "entropy") if self._want_entropy else ("log_probs",)
        self._tokens = {kind: [torch.zeros(len(each)) for each in batch.responses] for kind in kinds}

    def run(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run the schedule over micro-batches, as many on every rank."""
        config = self._chunks[0].module.config
        self._shared = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._room = max(micro.input_ids.numel() for micro in micro_batches) // self._shared
        for chunk in self._chunks:
            chunk.train(self._backward)
        iterators = [iter(micro_batches) for _ in self._chunks]
        run = get_forward_backward_func()
        with torch.set_grad_enabled(self._backward):
            run(
                forward_step_func=self._forward,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=list(self._chunks) if len(self._chunks) > 1 else self._chunks[0],
                num_microbatches=len(micro_batches),
                seq_length=self._room * self._shared * self._ranks.context.size(),  # between stages: [room, 1, H]
                micro_batch_size=1,
                forward_only=not self._backward,
            )

    def _forward(self, micro_batches: Iterator[MicroBatch], chunk: Any) -> tuple[torch.Tensor, Any]:
        micro, model = next(micro_batches), chunk.module
        if not model.pre_process:
            rows, length = micro.input_ids.shape
            positions = length // self._shared
            received = model.decoder.input_tensor[: positions * rows]
            model.set_input_tensor(received.view(positions, rows, received.shape[-1]))
        output = chunk(input_ids=micro.input_ids, position_ids=None, attention_mask=None)
        if not model.post_process:  # stages expect tensors of one shape, and micro-batches have several
            flat = output.flatten(0, 1).unsqueeze(1)
            output = F.pad(flat, (0, 0, 0, 0, 0, self._room - len(flat)))
        return output, functools.partial(self._finish, micro, model)

    def _finish(self, micro: MicroBatch, model: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return a micro-batch's loss, with Megatron's count of tokens, which has no effect."""
        nothing = hidden.float().sum() * 0.0
        loss = nothing if micro.rows is None else self._outputs(micro, model, hidden)
        if not loss.requires_grad:
            loss = loss + nothing
        return loss, torch.zeros([], dtype=torch.int, device=hidden.device), None

    def _outputs(self, micro: MicroBatch, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the outputs ``[N]`` from hidden states ``[s, b, H]``, and the loss."""
        assert micro.rows is not None, "a micro-batch with rows"
        shared = model.config.sequence_parallel
        whole = gather_from_sequence_parallel_region(hidden, group=self._ranks.tensor) if shared else hidden
        chosen = whole.transpose(0, 1).flatten(0, 1).index_select(0, micro.positions)
        if not shared:  # after the choice: Megatron-Core sums gradients in place, and only contiguous ones
            chosen = copy_to_tensor_model_parallel_region(chosen, group=self._ranks.tensor)
        labels = micro.labels[micro.tokens]
        found: Sequence[torch.Tensor | None] = self._vocabulary.statistics(
            chosen, model.output_weight, labels, self._want_entropy
        )
        log_probs, entropy = (None if each is None else self._all_positions(micro, each) for each in found)
        assert log_probs is not None, "always computed"
        lengths = [len(self._batch.responses[row]) for row in micro.rows.tolist()]
        for kind, tokens in (("log_probs", log_probs), ("entropy", entropy)):
            if tokens is not None:
                parts = tokens.detach().float().cpu().split(lengths)
                for row, part in zip(micro.rows.tolist(), parts, strict=True):
                    self._tokens[kind][row] = part.clone()
        if self._function is None:
            return log_probs.sum() * 0.0
        output = TokenOutput(
            log_probs=micro.dense(log_probs), entropy=None if entropy is None else micro.dense(entropy)
        )
        loss, metrics = self._function(output, micro.data())
        self._add(loss, metrics)
        return loss  # type: ignore[no-any-return]

    def _all_positions(self, micro: MicroBatch, tokens: torch.Tensor) -> torch.Tensor:
        """Return results of all ``N`` tokens: those of other context-parallel ranks are gathered."""
        if self._ranks.context.size() == 1:
            return tokens
        dense = tokens.new_zeros(len(micro.labels)).index_copy(0, micro.tokens, tokens)
        gathered: torch.Tensor = reduce_from_tensor_model_parallel_region(dense, self._ranks.context)
        return gathered

    def _add(self, loss: Any, metrics: Any) -> None:
        self._loss += _number(loss)
        for name, value in metrics.items():
            number = _number(value)
            if name not in self._metrics:
                self._metrics[name] = number
            elif name.endswith("/max"):
                self._metrics[name] = max(self._metrics[name], number)
            elif name.endswith("/min"):
                self._metrics[name] = min(self._metrics[name], number)
            else:
                self._metrics[name] += number

    def output(self) -> EngineOutput:
        """Return all results in the order of the rows; earlier stages get them from the last one."""
        found = {}
        for kind, rows in self._tokens.items():
            values = torch.cat(rows) if rows else torch.zeros(0)
            values = self._from_last_stage(values)
            lengths = self._batch.response_lengths.tolist()
            found[kind] = jagged(values.split(lengths)) if rows else _no_rows()
        loss, metrics = self._shared_numbers()
        return EngineOutput(loss=None if self._function is None else loss, metrics=metrics, **found)

    def _from_last_stage(self, values: torch.Tensor) -> torch.Tensor:
        group = self._ranks.pipeline
        if group.size() == 1:
            return values
        moved = values.to(self._ranks.device)
        dist.broadcast(moved, group=group, group_src=group.size() - 1)
        return moved.cpu()

    def _shared_numbers(self) -> tuple[float, dict[str, float]]:
        if self._ranks.pipeline.size() == 1:
            return self._loss, self._metrics
        text = json.dumps([self._loss, self._metrics]).encode()
        size = int(self._from_last_stage(torch.tensor([len(text)])).item())
        padded = torch.zeros(size, dtype=torch.uint8)
        if len(text) == size and self._ranks.is_last_stage:
            padded.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        loss, metrics = json.loads(bytes(self._from_last_stage(padded).tolist()))
        return loss, metrics


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _no_rows() -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(torch.zeros(0), torch.zeros(1, dtype=torch.int64))
