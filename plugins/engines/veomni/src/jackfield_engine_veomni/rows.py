"""This rank's rows, cut into padded micro-batches.

Shapes: ``B`` rows, ``b`` rows of a micro-batch, ``S`` its padded length, ``T`` its longest response, ``N`` its
response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from tensordict import TensorDict

from jackfield.errors import EngineError
from jackfield.sdk.jagged import padded_rows
from jackfield.sdk.jagged import rows as rows_of


@attrs.frozen(kw_only=True, eq=False)
class MicroBatch:
    """The inputs of one forward pass, on the engine's device."""

    rows: tuple[int, ...]  #: which rows of the batch these are
    input_ids: torch.Tensor  #: int64 ``[b, S]``, ``prompt | response | 0``
    positions: torch.Tensor  #: int64 ``[N]``: indices into ``[b * S]`` of the predictions of response tokens
    labels: torch.Tensor  #: int64 ``[N]``: the response tokens, row after row
    cells: torch.Tensor  #: int64 ``[N]``: indices into ``[b * T]`` of the response tokens
    length: int  #: ``T``
    columns: Mapping[str, torch.Tensor]  #: ``[b, T]`` response columns and ``[b]`` row columns

    def data(self) -> TensorDict:
        """Return the columns for the loss function."""
        return TensorDict(dict(self.columns), batch_size=[len(self.rows)])

    def dense(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return per-token results ``[N]`` as ``[b, T]`` with 0 past each response; differentiable."""
        empty = tokens.new_zeros(len(self.rows) * self.length)
        return empty.index_copy(0, self.cells, tokens).view(len(self.rows), self.length)


class RowBatch:
    """A batch's rows, unpacked once.

    Refused are missing or dense token columns, responses without a prompt (``engine.failed``), and token ids that the
    model does not have (``data.vocabulary``). ``multiple`` divides the padded length of each micro-batch.
    """

    def __init__(self, data: TensorDict, vocabulary: int, device: torch.device, multiple: int) -> None:
        self.size = int(data.batch_size[0])
        self._device, self._multiple = device, multiple
        columns = {str(name): value for name, value in data.items() if isinstance(value, torch.Tensor) and self.size}
        self.prompts = self._tokens(columns.pop("prompt_ids", None), "prompt_ids", vocabulary)
        self.responses = self._tokens(columns.get("response_ids"), "response_ids", vocabulary)
        if any(
            len(response) and not len(prompt) for prompt, response in zip(self.prompts, self.responses, strict=True)
        ):
            raise EngineError("a row has a response but no prompt", expected="at least one prompt token", where="data")
        lengths = [len(response) for response in self.responses]
        self._row_columns = {name: value for name, value in columns.items() if not value.is_nested}
        jagged_columns = {name: rows_of(value.cpu()) for name, value in columns.items() if value.is_nested}
        self._response_columns = {
            name: rows for name, rows in jagged_columns.items() if [len(row) for row in rows] == lengths
        }

    def _tokens(self, value: torch.Tensor | None, name: str, vocabulary: int) -> list[torch.Tensor]:
        if self.size == 0:
            return []
        if value is None or not value.is_nested:
            raise EngineError(
                f"the batch has no jagged column {name}",
                where="data",
                expected="an int64 torch.nested tensor of layout jagged",
                found="nothing" if value is None else f"a dense tensor of shape {tuple(value.shape)}",
            )
        rows = rows_of(value.cpu())
        every = torch.cat(rows)
        if every.numel() and not 0 <= int(every.min()) <= int(every.max()) < vocabulary:
            raise EngineError(
                f"{name} has token ids that the model does not have",
                code="data.vocabulary",
                where="data",
                expected=f"0 to {vocabulary - 1}",
                found=f"{int(every.min())} to {int(every.max())}",
                fix="use the tokenizer that belongs to the model",
            )
        return rows

    def plan(self, max_tokens: int) -> list[tuple[int, ...]]:
        """Return the rows of each micro-batch: the longest first, at most ``max_tokens`` padded tokens or one row."""
        lengths = [len(prompt) + len(response) for prompt, response in zip(self.prompts, self.responses, strict=True)]
        order = sorted(range(self.size), key=lambda row: -lengths[row])
        micro_batches = []
        while order:
            padded = -(-max(1, lengths[order[0]]) // self._multiple) * self._multiple
            count = max(1, max_tokens // padded)
            micro_batches.append(tuple(order[:count]))
            order = order[count:]
        return micro_batches

    def micro_batch(self, rows: Sequence[int]) -> MicroBatch:
        """Cut the given rows out, on the engine's device."""
        prompts, responses = [self.prompts[row] for row in rows], [self.responses[row] for row in rows]
        tokens = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
        size = -(-max(1, *(len(each) for each in tokens)) // self._multiple) * self._multiple
        length = max(1, *(len(response) for response in responses))  # a loss may take the largest of its tokens
        columns = {name: padded_rows([all_rows[row] for row in rows], 0, length)
                   for name, all_rows in self._response_columns.items()}  # fmt: skip
        columns |= {name: value[list(rows)] for name, value in self._row_columns.items()}
        positions = [
            index * size + len(prompt) - 1 + torch.arange(len(response))
            for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        ]
        cells = [index * length + torch.arange(len(response)) for index, response in enumerate(responses)]
        return MicroBatch(
            rows=tuple(rows),
            input_ids=padded_rows(tokens, 0, size).to(self._device),
            positions=torch.cat(positions).to(self._device),
            labels=torch.cat(responses).to(self._device),
            cells=torch.cat(cells).to(self._device),
            length=length,
            columns={name: column.to(self._device) for name, column in columns.items()},
        )

    def idle_micro_batch(self) -> MicroBatch:
        """Return a dummy row, for a rank with fewer micro-batches than the others."""
        one = torch.zeros(1, dtype=torch.int64, device=self._device)
        ids = one.new_zeros(1, 2 * self._multiple)
        return MicroBatch(rows=(0,), input_ids=ids, positions=one, labels=one, cells=one, length=1, columns={})
