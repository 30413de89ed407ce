"""A rank's rows, unpacked once, and the micro-batches that are cut from them.

Shapes: ``B`` rows of this rank, ``b`` rows of a micro-batch, ``S`` its padded length, ``s`` the positions that this
context-parallel rank has of it, ``T`` its longest response, ``N`` its response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from tensordict import TensorDict

from jackfield.errors import EngineError
from jackfield.sdk.jagged import lengths as jagged_lengths
from jackfield.sdk.jagged import padded_rows
from jackfield.sdk.jagged import rows as rows_of
from jackfield_engine_megatron.attention import own_positions
from jackfield_engine_megatron.ranks import Ranks


@attrs.frozen(kw_only=True, eq=False)
class MicroBatch:
    """The inputs of one forward pass, on the engine's device. ``n`` of its ``N`` tokens are on this rank."""

    rows: torch.Tensor | None  #: int64 ``[b]``, on the CPU; None: a dummy that other ranks wait for
    input_ids: torch.Tensor  #: int64 ``[b, s]``
    positions: torch.Tensor  #: int64 ``[n]``: indices into ``[b * s]`` of the predictions of response tokens
    tokens: torch.Tensor  #: int64 ``[n]``: which of the ``N`` tokens these are
    labels: torch.Tensor  #: int64 ``[N]``: the response tokens, row after row
    cells: torch.Tensor  #: int64 ``[N]``: indices into ``[b * T]`` of the response tokens
    length: int  #: ``T``
    columns: Mapping[str, torch.Tensor]  #: ``[b, T]`` response columns and ``[b]`` row columns

    def data(self) -> TensorDict:
        """Return the columns for the loss function."""
        return TensorDict(dict(self.columns), batch_size=[self.input_ids.shape[0]])

    def dense(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return per-token results ``[N]`` as ``[b, T]`` with 0 past each response; differentiable."""
        count = self.input_ids.shape[0]
        return tokens.new_zeros(count * self.length).index_copy(0, self.cells, tokens).view(count, self.length)


class RowBatch:
    """This rank's rows.

    Refused are missing or dense token columns, responses without a prompt (``engine.failed``), and token ids that the
    model does not have (``data.vocabulary``). Padded lengths are multiples of ``multiple``.
    """

    def __init__(self, data: TensorDict, vocabulary: int, ranks: Ranks, multiple: int) -> None:
        columns = {str(name): value for name, value in data.items() if isinstance(value, torch.Tensor)}
        self.size, self._ranks, self._multiple = int(data.batch_size[0]), ranks, multiple
        if self.size == 0:
            columns = {}
        self._prompts = self._tokens(columns.pop("prompt_ids", None), "prompt_ids", vocabulary)
        self.responses = self._tokens(columns.get("response_ids"), "response_ids", vocabulary)
        self.response_lengths = torch.tensor([len(row) for row in self.responses], dtype=torch.int64)
        self._prompt_lengths = torch.tensor([len(row) for row in self._prompts], dtype=torch.int64)
        self._response_columns: dict[str, list[torch.Tensor]] = {}
        self._row_columns: dict[str, torch.Tensor] = {}
        for name, value in columns.items():
            if not value.is_nested:
                self._row_columns[name] = value
            elif torch.equal(jagged_lengths(value.cpu()), self.response_lengths):
                self._response_columns[name] = rows_of(value.detach().cpu())
        if bool(((self._prompt_lengths == 0) & (self.response_lengths > 0)).any()):
            raise EngineError("a row has a response but no prompt", expected="at least one prompt token", where="data")

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
        found = rows_of(value.cpu())
        every = torch.cat(found)
        if every.numel() and not 0 <= int(every.min()) <= int(every.max()) < vocabulary:
            raise EngineError(
                f"{name} has token ids that the model does not have",
                code="data.vocabulary",
                where="data",
                expected=f"0 to {vocabulary - 1}",
                found=f"{int(every.min())} to {int(every.max())}",
                fix="use the tokenizer that belongs to the model",
            )
        return found

    def plan(self, max_tokens: int) -> list[list[int]]:
        """Split the rows into micro-batches of at most ``max_tokens`` padded tokens, the longest rows first.

        A row above the limit goes alone.
        """
        lengths = (self._prompt_lengths + self.response_lengths).tolist()
        order = sorted(range(self.size), key=lambda row: -lengths[row])
        found: list[list[int]] = []
        while order:
            count = max(1, max_tokens // self._padded(lengths[order[0]]))
            found.append(order[:count])
            order = order[count:]
        return found

    def _padded(self, length: int) -> int:
        return max(1, -(-length // self._multiple)) * self._multiple

    def micro_batch(self, chosen: list[int]) -> MicroBatch:
        """Cut the given rows out, on the engine's device. The last token of a response is a label only."""
        rows = torch.tensor(chosen, dtype=torch.int64)
        prompt, response = self._prompt_lengths[rows], self.response_lengths[rows]
        size = self._padded(int((prompt + response).max()) - 1)
        whole = [torch.cat([self._prompts[row], self.responses[row]])[:size] for row in chosen]
        input_ids = padded_rows(whole, length=size)
        length = max(1, int(response.max()))  # at least 1: a loss may take the largest of its tokens
        inside = torch.arange(length) < response[:, None]
        row_of, step = inside.nonzero(as_tuple=True)
        labels = torch.cat([self.responses[row] for row in chosen])
        columns = {
            n: padded_rows([each[row] for row in chosen], length=length) for n, each in self._response_columns.items()
        }
        columns |= {name: column[rows] for name, column in self._row_columns.items()}
        return self._place(
            rows, input_ids, row_of, prompt[row_of] - 1 + step, labels, inside.flatten().nonzero().squeeze(1), columns
        )

    def _place(
        self,
        rows: torch.Tensor | None,
        input_ids: torch.Tensor,
        row_of: torch.Tensor,
        position: torch.Tensor,
        labels: torch.Tensor,
        cells: torch.Tensor,
        columns: Mapping[str, torch.Tensor],
    ) -> MicroBatch:
        """Keep the positions that this context-parallel rank has."""
        group, device, length = self._ranks.context, self._ranks.device, input_ids.shape[1]
        own = own_positions(length, group.rank(), group.size()) if group.size() > 1 else torch.arange(length)
        place = torch.full((length,), -1).index_copy(0, own, torch.arange(len(own)))[position]
        kept = (place >= 0).nonzero().squeeze(1)
        longest = next((column.shape[1] for column in columns.values() if column.dim() > 1), 1)
        return MicroBatch(
            rows=rows,
            input_ids=input_ids[:, own].contiguous().to(device),
            positions=(row_of * len(own) + place)[kept].to(device),
            tokens=kept.to(device),
            labels=labels.to(device),
            cells=cells.to(device),
            length=longest,
            columns={name: column.to(device) for name, column in columns.items()},
        )

    def dummy(self) -> MicroBatch:
        """Return a row of zeros, for a rank with fewer micro-batches than the others."""
        none = torch.zeros(0, dtype=torch.int64)
        ids = torch.zeros(1, self._padded(1), dtype=torch.int64)
        return self._place(None, ids, none, none, none, none, {})
