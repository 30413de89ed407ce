"""A forward (and backward) pass over a rank's rows: they are split into micro-batches, and results put back in order.

Shapes: ``B`` rows of this rank, ``b`` rows of a micro-batch, ``S`` its padded length, ``T`` its longest response,
``N`` its response tokens, ``j`` a jagged dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule

from jackfield.abc.engine import EngineOutput, TokenOutput
from jackfield.errors import EngineError
from jackfield.sdk.jagged import jagged
from jackfield.sdk.jagged import lengths as jagged_lengths
from jackfield_engine_fsdp.model import Rotary, TokenModel
from jackfield_engine_fsdp.packing import Packing


@attrs.frozen(eq=False)
class Jagged:
    """The parts of a jagged column: row ``i`` is ``values[starts[i] : starts[i] + lengths[i]]``."""

    values: torch.Tensor  #: ``[total, ...]``
    starts: torch.Tensor  #: int64 ``[B]``
    lengths: torch.Tensor  #: int64 ``[B]``

    def alike(self) -> torch.Tensor:
        """Return for each row the first row that is equal to it, int64 ``[B]``."""
        values, found = self.values.numpy(), dict[bytes, int]()
        bounds = zip(self.starts.tolist(), (self.starts + self.lengths).tolist(), strict=True)
        rows = [found.setdefault(values[start:end].tobytes(), row) for row, (start, end) in enumerate(bounds)]
        return torch.tensor(rows, dtype=torch.int64)

    @classmethod
    def of(cls, nested: torch.Tensor) -> Jagged:
        """Unpack a ``torch.nested`` tensor of layout ``jagged``, which may have holes between its rows."""
        starts = nested.offsets()[:-1]  # type: ignore[attr-defined]
        return cls(nested.values().detach(), starts, jagged_lengths(nested))

    def padded(self, rows: torch.Tensor, length: int) -> torch.Tensor:
        """Return the chosen rows, padded with 0 to ``[b, length, ...]``."""
        steps = torch.arange(length)
        inside = steps < self.lengths[rows].unsqueeze(1)
        if self.values.shape[0] == 0:
            return self.values.new_zeros((len(rows), length, *self.values.shape[1:]))
        index = (self.starts[rows].unsqueeze(1) + steps).masked_fill_(~inside, 0)
        dense = self.values[index]
        return dense.masked_fill_(~inside.view(*inside.shape, *(1,) * (dense.ndim - 2)), 0)


@attrs.frozen(kw_only=True, eq=False)
class MicroBatch:
    """The inputs of one forward pass, on the engine's device."""

    rows: torch.Tensor  #: int64 ``[b]``, on the CPU: which rows of the batch these are
    #: int64 ``[b, S]``, ``prompt | response but its last token | 0``; or ``[1, S]``, these tokens without padding
    input_ids: torch.Tensor
    positions: torch.Tensor  #: int64 ``[N]``: indices into ``input_ids`` of the predictions of response tokens
    labels: torch.Tensor  #: int64 ``[N]``: the response tokens, row after row
    cells: torch.Tensor  #: int64 ``[N]``: indices into ``[b * T]`` of the response tokens
    length: int  #: ``T``
    columns: Mapping[str, torch.Tensor]  #: ``[b, T]`` response columns and ``[b]`` row columns
    packed: tuple[torch.Tensor, Packing] | None = None  #: positions of tokens without padding, ``[1, S]``

    def data(self) -> TensorDict:
        """Return the columns for the loss function."""
        return TensorDict(dict(self.columns), batch_size=[len(self.rows)])

    def dense(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return per-token results ``[N]`` as ``[b, T]`` with 0 past each response; differentiable."""
        empty = tokens.new_zeros(len(self.rows) * self.length)
        return empty.index_copy(0, self.cells, tokens).view(len(self.rows), self.length)


class RowBatch:
    """This rank's rows, unpacked once. Micro-batches are cut from them.

    Refused are missing or dense token columns, responses without a prompt (``engine.failed``), and token ids that the
    model does not have (``data.vocabulary``).
    """

    def __init__(
        self, data: TensorDict, vocabulary: int, device: torch.device, rotary: Rotary, *, packs: bool = False
    ) -> None:
        columns = {str(name): value for name, value in data.items() if isinstance(value, torch.Tensor)}
        self.size = int(data.batch_size[0])
        self.device = device
        self._rotary = rotary
        if self.size == 0:
            columns = {}
        self.prompts = self._tokens(columns.pop("prompt_ids", None), "prompt_ids", vocabulary)
        self.responses = self._tokens(columns.get("response_ids"), "response_ids", vocabulary)
        self._response_columns: dict[str, Jagged] = {}
        self._row_columns: dict[str, torch.Tensor] = {}
        for name, value in columns.items():
            if not value.is_nested:
                self._row_columns[name] = value
            elif torch.equal((jagged := Jagged.of(value.cpu())).lengths, self.responses.lengths):
                self._response_columns[name] = jagged
        if bool(((self.prompts.lengths == 0) & (self.responses.lengths > 0)).any()):
            raise EngineError("a row has a response but no prompt", expected="at least one prompt token", where="data")
        self._packs = packs
        self._groups = self.prompts.alike() if packs else torch.arange(self.size)

    def _tokens(self, value: torch.Tensor | None, name: str, vocabulary: int) -> Jagged:
        if self.size == 0:
            empty = torch.zeros(0, dtype=torch.int64)
            return Jagged(empty, empty, empty)
        if value is None or not value.is_nested:
            raise EngineError(
                f"the batch has no jagged column {name}",
                where="data",
                expected="an int64 torch.nested tensor of layout jagged",
                found="nothing" if value is None else f"a dense tensor of shape {tuple(value.shape)}",
            )
        tokens = Jagged.of(value.cpu())
        if tokens.values.numel() and not 0 <= int(tokens.values.min()) <= int(tokens.values.max()) < vocabulary:
            raise EngineError(
                f"{name} has token ids that the model does not have",
                code="data.vocabulary",
                where="data",
                expected=f"0 to {vocabulary - 1}",
                found=f"{int(tokens.values.min())} to {int(tokens.values.max())}",
                fix="use the tokenizer that belongs to the model",
            )
        return tokens

    def plan(self, max_tokens: int) -> list[torch.Tensor]:
        """Return the rows of each micro-batch (:func:`plan`), one set of rotary frequencies in each."""
        lengths = self.prompts.lengths + self.responses.lengths
        sides: dict[tuple[int, ...], list[int]] = {}
        for row, length in enumerate(lengths.tolist()):
            sides.setdefault(self._rotary.side(length), []).append(row)
        groups = [torch.tensor(rows) for rows in sides.values()]
        return [rows[chosen] for rows in groups for chosen in plan(lengths[rows], self._groups[rows], max_tokens)]

    def micro_batch(self, rows: torch.Tensor) -> MicroBatch:
        """Cut the given rows out, on the engine's device.

        The last token of a response is a label only: nothing is predicted from it. If rotary frequencies depend on
        the length, it still gets a position, so that the length is the row's.
        """
        response = self.responses.lengths[rows].unsqueeze(1)
        length = max(1, int(response.max()))  # at least 1: a loss may take the largest of its tokens
        in_response = torch.arange(length) < response
        columns = {name: column.padded(rows, length) for name, column in self._response_columns.items()}
        labels = columns["response_ids"][in_response]
        columns |= {name: column[rows] for name, column in self._row_columns.items()}
        packs = self._packs and bool(self.prompts.lengths[rows].any())
        input_ids, positions, packed = (self._packed if packs else self._padded)(rows)
        return MicroBatch(
            rows=rows,
            input_ids=input_ids.to(self.device),
            positions=positions.to(self.device),
            labels=labels.to(self.device),
            cells=in_response.flatten().nonzero().squeeze(1).to(self.device),
            length=length,
            columns={name: column.to(self.device) for name, column in columns.items()},
            packed=packed,
        )

    def _padded(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return tokens ``[b, S]`` and the indices of predictions."""
        prompt, response = self.prompts.lengths[rows].unsqueeze(1), self.responses.lengths[rows].unsqueeze(1)
        size = max(1, int((prompt + response).max()) - (0 if self._rotary.limits else 1))
        places = torch.arange(size)
        input_ids = self.prompts.padded(rows, size)
        continued = (places >= prompt) & (places < prompt + response - 1)
        steps, _ = _steps(self.responses.lengths[rows] - 1)
        input_ids[continued] = self.responses.values[self.responses.starts[rows][steps[0]] + steps[1]]
        steps, _ = _steps(self.responses.lengths[rows])
        return input_ids, steps[0] * size + prompt.squeeze(1)[steps[0]] - 1 + steps[1], None

    def _packed(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, Packing]]:
        """Return tokens ``[1, S]``, prompts first, the indices of predictions, and positions and packing."""
        prompts, responses = self.prompts, self.responses
        groups, of_row = self._groups[rows].unique(return_inverse=True)
        lengths = prompts.lengths[rows]
        (owner, step), starts = _steps(prompts.lengths[groups])
        (row, more), continued = _steps(responses.lengths[rows] - 1)
        continued = continued + len(owner)
        first = torch.full_like(groups, len(rows)).scatter_reduce_(0, of_row, torch.arange(len(rows)), "amin")
        tokens = torch.cat(
            [prompts.values[prompts.starts[groups][owner] + step], responses.values[responses.starts[rows][row] + more]]
        )
        positions = torch.cat([step, lengths[row] + more])
        size = int(positions.max()) + 1
        place = torch.cat([first[owner], row]) * size + positions
        # every row again, with its prompt: where each of its places is in the pass
        places = torch.arange(size).expand(len(rows), size)
        in_prompt = places < lengths[:, None]
        source = torch.where(in_prompt, starts[of_row][:, None] + places, 0)
        source.view(-1)[place[len(owner) :]] = torch.arange(len(owner), len(tokens))
        again = in_prompt & (first[of_row] != torch.arange(len(rows)))[:, None]
        unused = torch.ones(len(rows) * size, dtype=torch.bool).index_fill_(0, place, False)
        again, unused = (each.flatten().nonzero().squeeze(1) for each in (again, unused))
        packing = Packing(rows=len(rows), source=source.flatten(), place=place, again=again, unused=unused)
        (row, step), _ = _steps(responses.lengths[rows])
        last = starts[of_row] + lengths - 1
        predicted = torch.where(step == 0, last[row], continued[row] + step - 1)
        return tokens[None], predicted, (positions[None].to(self.device), packing.to(self.device))

    def idle_micro_batch(self) -> MicroBatch:
        """Return a dummy row of two tokens, for a rank with fewer micro-batches than the others."""
        one = torch.zeros(1, dtype=torch.int64, device=self.device)
        return MicroBatch(
            rows=torch.zeros(1, dtype=torch.int64),
            input_ids=one.new_zeros(1, 2),
            positions=one,
            labels=one,
            cells=one,
            length=1,
            columns={},
        )


def _steps(lengths: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the row and the step of each token of rows back to back, and where each row starts; below 0 is 0."""
    lengths = lengths.clamp(min=0)
    starts = lengths.cumsum(0) - lengths
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    return (rows, torch.arange(len(rows)) - starts[rows]), starts


def plan(lengths: torch.Tensor, groups: torch.Tensor, max_tokens: int) -> list[torch.Tensor]:
    """Split rows of ``lengths`` int64 ``[B]`` into micro-batches of at most ``max_tokens`` padded tokens.

    The longest rows come first, so lengths within a micro-batch are similar; rows of one of the ``groups`` int64
    ``[B]`` stay together where they can. A row above the limit goes alone.
    """
    _, of_row = groups.unique(return_inverse=True)
    longest = torch.zeros_like(lengths).scatter_reduce_(0, of_row, lengths, "amax")[of_row]
    order = torch.argsort(lengths, descending=True, stable=True)
    for key, descending in ((of_row, False), (longest, True)):
        order = order[torch.argsort(key[order], descending=descending, stable=True)]
    found = of_row[order].tolist()
    micro_batches: list[torch.Tensor] = []
    start = 0
    while start < len(order):
        most = min(len(order), start + max(1, max_tokens // max(1, int(lengths[order[start]]))))
        end = most
        while end > start and end < len(order) and found[end - 1] == found[end]:
            end -= 1
        micro_batches.append(order[start : end if end > start else most])
        start += len(micro_batches[-1])
    return micro_batches


class TokenBuffer:
    """A collector of one per-token result of all rows. Micro-batches may come in any order."""

    def __init__(self, responses: Jagged) -> None:
        self._lengths = responses.lengths
        self._offsets = torch.cat([self._lengths.new_zeros(1), self._lengths.cumsum(0)])
        self._values = torch.zeros(int(self._offsets[-1]), dtype=torch.float32)

    def add(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add the results ``[N]`` of a micro-batch's rows."""
        (row, step), _ = _steps(self._lengths[rows])
        self._values[self._offsets[rows][row] + step] = tokens.detach().float().cpu()

    def nested(self) -> torch.Tensor:
        """Return the results, jagged float32 ``[B, j]``, in the order of the rows."""
        if len(self._lengths) == 0:
            return torch.nested.nested_tensor_from_jagged(self._values, self._offsets)
        return jagged(torch.split(self._values, self._lengths.tolist()))


class Pass:
    """A pass that runs micro-batches of this rank's rows and sums their results."""

    def __init__(
        self, model: TokenModel, batch: RowBatch, function: Callable[..., Any] | None, *, backward: bool
    ) -> None:
        self._model = model
        self._batch = batch
        self._function = function
        self._backward = backward
        self._want_entropy = bool(getattr(function, "needs_entropy", False)) and model.with_log_probs
        self._loss: torch.Tensor | float = 0.0
        self._sums: dict[str, Any] = {}
        kinds = {
            "log_probs": model.with_log_probs,
            "entropy": self._want_entropy,
            "values": model.value_head is not None,
        }
        self._buffers = {name: TokenBuffer(batch.responses) for name, wanted in kinds.items() if wanted}

    def micro_batch(self, micro: MicroBatch, tie: bool) -> None:
        """Run one micro-batch.

        With ``tie`` every output takes part in the backward pass, with a factor of 0 if the loss ignores it, so that
        all ranks reduce the same gradients.
        """
        log_probs, entropy, values = self._forward(micro)
        for name, tokens in (("log_probs", log_probs), ("entropy", entropy), ("values", values)):
            if tokens is not None:
                self._buffers[name].add(micro.rows, tokens)
        if self._function is None:
            return
        token_output = TokenOutput(
            log_probs=micro.dense(
                torch.zeros_like(micro.labels, dtype=torch.float32) if log_probs is None else log_probs
            ),
            entropy=None if entropy is None else micro.dense(entropy),
            values=None if values is None else micro.dense(values),
        )
        loss, metrics = self._function(token_output, micro.data())
        self._add(loss, metrics)
        if self._backward:
            if tie or not loss.requires_grad:
                loss = loss + _nothing(log_probs, entropy, values)
            loss.backward()

    def idle(self, micro: MicroBatch) -> None:
        """Run the same collectives as the other ranks, with gradients of zero."""
        outputs = self._forward(micro)
        if self._backward:
            _nothing(*outputs).backward()

    def _forward(self, micro: MicroBatch) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        result = self._model(micro.input_ids, micro.positions, micro.labels, self._want_entropy, micro.packed)
        return result  # type: ignore[no-any-return]

    def _add(self, loss: Any, metrics: Any) -> None:
        """Add loss and metrics on the device; reading them here would wait for the device."""
        self._loss = self._loss + _detached(loss)
        for name, value in metrics.items():
            value = _detached(value)
            if name not in self._sums:
                self._sums[name] = value
            elif name.endswith("/max"):
                self._sums[name] = _larger(self._sums[name], value)
            elif name.endswith("/min"):
                self._sums[name] = -_larger(-self._sums[name], -value)
            else:
                self._sums[name] = self._sums[name] + value

    def output(self) -> EngineOutput:
        """Return all results in the order of the rows."""
        results = {name: buffer.nested() for name, buffer in self._buffers.items()}
        metrics = {name: float(value) for name, value in self._sums.items()}
        loss = None if self._function is None else float(self._loss)
        return EngineOutput(loss=loss, metrics=metrics, **results)


def _detached(value: Any) -> Any:
    return value.detach().double() if isinstance(value, torch.Tensor) else value


def _larger(one: Any, other: Any) -> Any:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return torch.maximum(torch.as_tensor(one, dtype=torch.float64), torch.as_tensor(other, dtype=torch.float64))
    return max(one, other)


def _nothing(*outputs: torch.Tensor | None) -> torch.Tensor:
    """Return a zero that depends on all outputs."""
    return torch.stack([output.sum() for output in outputs if output is not None]).sum() * 0.0


def reshard(model: TokenModel) -> None:
    """Free gathered weights: without a backward pass FSDP keeps them even when the shards change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
