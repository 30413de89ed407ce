"""A forward (and backward) pass over a rank's rows: they are split into micro-batches, and results put back in order.

Shapes: ``B`` rows of this rank, ``b`` rows of a micro-batch, ``S`` its padded length, ``T`` its longest response,
``N`` its response tokens, ``j`` a jagged dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule

from jackfield.abc.engine import EngineOutput, TokenOutput
from jackfield.errors import EngineError
from jackfield.sdk.jagged import rows as rows_of
from jackfield_engine_fsdp.experts import Experts
from jackfield_engine_fsdp.images import COLUMN, images_of, read_arrays
from jackfield_engine_fsdp.model import Rotary, TokenModel
from jackfield_engine_fsdp.packing import Packer, Packing
from jackfield_engine_fsdp.plans import plan_padded, plan_separate, plan_shared
from jackfield_engines.columns import Jagged, TokenBuffer, steps_of
from jackfield_engines.sums import Sums, zero_of
from jackfield_huggingface.images import ImageInputs, Images

_LEAST_SAVED = 0.02  #: of padded tokens: packing costs as much in attention
Whose: TypeAlias = tuple[torch.Tensor, torch.Tensor]  #: the row of each token, and its position there


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
    #: positions of tokens without padding, ``[1, S]``, and where they are in padded rows, if rows share tokens
    packed: tuple[torch.Tensor, Packing | None] | None = None
    images: Sequence[Images | None] = ()  #: of each row; empty: no row has any
    owners: torch.Tensor | None = None  #: int64 ``[b * S]``: the row of each token, -1 for padding; None: not needed
    places: torch.Tensor | None = None  #: int64 ``[b * S]``: its position in the row
    routes: Sequence[torch.Tensor | None] = ()  #: of each row's tokens, the experts that generated them

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
        self,
        data: TensorDict,
        vocabulary: int,
        device: torch.device,
        rotary: Rotary,
        *,
        packs: Packer | None = None,
        images: ImageInputs | None = None,
        experts: Experts | None = None,
    ) -> None:
        columns = {str(name): value for name, value in data.items() if isinstance(value, torch.Tensor)}
        columns.pop(COLUMN, None)
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
        self._images, self._routes, self._experts = list[Images | None](), list[torch.Tensor | None](), experts
        if self.size and COLUMN in data.keys():  # noqa: SIM118, it is not a mapping
            arrays = read_arrays(data)
            parts = (rows_of(data[name].cpu()) for name in ("prompt_ids", "response_ids"))
            self._images = images_of(arrays, [torch.cat(both) for both in zip(*parts, strict=True)], images)
            if experts is not None:
                self._routes = experts.read(arrays, (self.prompts.lengths + self.responses.lengths).tolist())
        # equal prompts may have other images
        self._packs = None if any(each is not None for each in self._images) else packs
        shares = self._packs is not None and self._packs.shares
        self._groups = self.prompts.alike() if shares else torch.arange(self.size)
        if shares and self._routes:  # a prompt with other experts is another prompt
            found = dict[tuple[int, bytes], int]()
            for row, (group, routes) in enumerate(zip(self._groups.tolist(), self._routes, strict=True)):
                own = b"" if routes is None else routes[: int(self.prompts.lengths[row])].numpy().tobytes()
                self._groups[row] = found.setdefault((group, own), row)

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
        """Return the rows of each micro-batch (see ``plans``), one set of rotary frequencies in each."""
        lengths = self.prompts.lengths + self.responses.lengths
        sides: dict[tuple[int, ...], list[int]] = {}
        for row, length in enumerate(lengths.tolist()):
            sides.setdefault(self._rotary.side(length), []).append(row)
        groups = [torch.tensor(rows) for rows in sides.values()]
        return [rows[chosen] for rows in groups for chosen in self._plan(rows, lengths[rows], max_tokens)]

    def _plan(self, rows: torch.Tensor, lengths: torch.Tensor, max_tokens: int) -> list[torch.Tensor]:
        if self._packs is None:
            return plan_padded(lengths, max_tokens)
        if not self._packs.shares:
            return plan_separate(lengths, max_tokens)
        return plan_shared(lengths, self.prompts.lengths[rows], self._groups[rows], max_tokens)

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
        seen = [self._images[row] for row in rows.tolist()] if self._images else []
        layout: Callable[[torch.Tensor], Any] = self._padded
        if self._packs is not None and self._saves(rows):
            layout = self._packed if self._packs.shares else self._joined
        input_ids, positions, packed, whose = layout(rows)
        own: dict[str, Any] = {}
        if self._experts is not None:
            own = {name: each.to(self.device) for name, each in zip(("owners", "places"), whose, strict=True)}
            own["routes"] = [self._routes[row] for row in rows.tolist()] if self._routes else ()
        return MicroBatch(
            rows=rows,
            input_ids=input_ids.to(self.device),
            positions=positions.to(self.device),
            labels=labels.to(self.device),
            cells=in_response.flatten().nonzero().squeeze(1).to(self.device),
            length=length,
            columns={name: column.to(self.device) for name, column in columns.items()},
            packed=packed,
            images=seen if any(each is not None for each in seen) else (),
            **own,
        )

    def _saves(self, rows: torch.Tensor) -> bool:
        """Return whether packing leaves tokens out; where rows have one length and no common prompt, it only costs."""
        prompt, response = self.prompts.lengths, (self.responses.lengths[rows] - 1).clamp(min=0)
        packed = int(prompt[self._groups[rows].unique()].sum() + response.sum())
        padded = len(rows) * int((prompt[rows] + response).max())
        return packed > 0 and packed <= padded * (1.0 - _LEAST_SAVED)

    def _padded(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, Whose]:
        """Return tokens ``[b, S]``, the indices of predictions, and the row and position of each token."""
        prompt, response = self.prompts.lengths[rows].unsqueeze(1), self.responses.lengths[rows].unsqueeze(1)
        size = max(1, int((prompt + response).max()) - (0 if self._rotary.limits else 1))
        places = torch.arange(size)
        input_ids = self.prompts.padded(rows, size)
        continued = (places >= prompt) & (places < prompt + response - 1)
        steps, _ = steps_of(self.responses.lengths[rows] - 1)
        input_ids[continued] = self.responses.values[self.responses.starts[rows][steps[0]] + steps[1]]
        steps, _ = steps_of(self.responses.lengths[rows])
        predicted = steps[0] * size + prompt.squeeze(1)[steps[0]] - 1 + steps[1]
        everywhere = places.expand(len(rows), size)
        owners = torch.where(everywhere < prompt + response - 1, torch.arange(len(rows))[:, None], -1)
        return input_ids, predicted, None, (owners.flatten(), everywhere.flatten())

    def _joined(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, None], Whose]:
        """Return tokens ``[1, S]``, one row after the other, as _packed; nothing is shared."""
        padded, predicted, _, (owners, places) = self._padded(rows)
        inside = (owners >= 0).nonzero().squeeze(1)
        moved = torch.zeros(padded.numel(), dtype=torch.int64).index_copy_(0, inside, torch.arange(len(inside)))
        tokens, positions = padded.flatten()[inside], places[inside]
        return tokens[None], moved[predicted], (positions[None].to(self.device), None), (owners[inside], positions)

    def _packed(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, Packing], Whose]:
        """Return tokens ``[1, S]``, prompts first, the indices of predictions, positions and packing, as _padded."""
        prompts, responses = self.prompts, self.responses
        groups, of_row = self._groups[rows].unique(return_inverse=True)
        lengths = prompts.lengths[rows]
        (owner, step), starts = steps_of(prompts.lengths[groups])
        (row, more), continued = steps_of(responses.lengths[rows] - 1)
        continued = continued + len(owner)
        first = torch.full_like(groups, len(rows)).scatter_reduce_(0, of_row, torch.arange(len(rows)), "amin")
        tokens = torch.cat(
            [prompts.values[prompts.starts[groups][owner] + step], responses.values[responses.starts[rows][row] + more]]
        )
        positions = torch.cat([step, lengths[row] + more])
        whose = torch.cat([first[owner], row]), positions
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
        (row, step), _ = steps_of(responses.lengths[rows])
        last = starts[of_row] + lengths - 1
        predicted = torch.where(step == 0, last[row], continued[row] + step - 1)
        return tokens[None], predicted, (positions[None].to(self.device), packing.to(self.device)), whose

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


class Pass:
    """A pass that runs micro-batches of this rank's rows and sums their results."""

    def __init__(
        self, model: TokenModel, batch: RowBatch, function: Callable[..., Any] | None, *, backward: bool, rows: int = 1
    ) -> None:
        """Prepare a pass; ``rows`` is the number of rows of all ranks, for the load-balancing loss."""
        self._model, self._rows = model, rows
        self._balance: torch.Tensor | None = None  #: this share of the load-balancing loss
        self._batch = batch
        self._function = function
        self._backward = backward
        self._want_entropy = bool(getattr(function, "needs_entropy", False)) and model.with_log_probs
        self._sums = Sums()
        kinds = {
            "log_probs": model.with_log_probs,
            "entropy": self._want_entropy,
            "values": model.value_head is not None,
        }
        self._buffers = {name: TokenBuffer(batch.responses.lengths) for name, wanted in kinds.items() if wanted}

    def micro_batch(self, micro: MicroBatch, tie: bool) -> None:
        """Run one micro-batch.

        With ``tie`` every output takes part in the backward pass, with a factor of 0 if the loss ignores it, so that
        all ranks reduce the same gradients.
        """
        log_probs, entropy, values = self._forward(micro)
        for name, tokens in (("log_probs", log_probs), ("entropy", entropy), ("values", values)):
            if tokens is not None:
                self._buffers[name].add(micro.rows, tokens)
        balance, self._balance = self._balance, None
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
        if balance is not None and self._model.experts is not None:
            loss, metrics = loss + self._model.experts.factor * balance, {**metrics, "router_aux_loss": balance}
        self._sums.add(loss, metrics)
        if self._backward:
            if tie or not loss.requires_grad:
                loss = loss + zero_of(log_probs, entropy, values)
            loss.backward()

    def idle(self, micro: MicroBatch) -> None:
        """Run the same collectives as the other ranks, with gradients of zero."""
        outputs = self._forward(micro)
        if self._backward:
            zero_of(*outputs).backward()

    def _forward(self, micro: MicroBatch) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        inputs = (micro.input_ids, micro.positions, micro.labels, self._want_entropy, micro.packed, micro.images)
        experts, run = self._model.experts, functools.partial(self._model, *inputs)
        if experts is None or micro.owners is None:
            if experts is not None:
                experts.routers.replay(None)
            return run()  # type: ignore[no-any-return]
        assert micro.places is not None, "beside owners"
        experts.replay(micro.routes, micro.owners, micro.places)
        if not experts.factor or self._function is None:
            return run()  # type: ignore[no-any-return]
        with experts.routers.keeping_logits():
            outputs = run()
            self._balance = experts.routers.balance(micro.owners, len(micro.rows)).sum() / self._rows
        return outputs  # type: ignore[no-any-return]

    def output(self) -> EngineOutput:
        """Return all results in the order of the rows."""
        results = {name: buffer.nested() for name, buffer in self._buffers.items()}
        loss = None if self._function is None else self._sums.loss()
        return EngineOutput(loss=loss, metrics=self._sums.metrics(), **results)


def reshard(model: TokenModel) -> None:
    """Free gathered weights: without a backward pass FSDP keeps them even when the shards change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
