"""One pass over a batch, micro-batch by micro-batch.

Shapes: ``B`` rows of the batch, ``b`` rows of a micro-batch, ``S`` its padded length, ``T`` its longest response,
``V`` the vocabulary, ``j`` a jagged dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from jackfield.abc.engine import EngineOutput, LossFunction, TokenOutput
from jackfield.sdk.jagged import jagged, rows


def micro_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Consecutive rows, as many as fit into ``max_tokens`` padded tokens; a longer row goes alone."""
    chosen: list[int] = []
    for row, length in enumerate(lengths):
        longest = max([length, *(lengths[other] for other in chosen)])
        if chosen and longest * (len(chosen) + 1) > max_tokens:
            yield chosen
            chosen = []
        chosen.append(row)
    if chosen:
        yield chosen


class Pass:
    """Collects what micro-batches give: results per token, the loss, metrics."""

    def __init__(
        self, model: Any, data: TensorDict, loss: LossFunction | None, *, temperature: float, backward: bool
    ) -> None:
        self._model = model
        self._loss = loss
        self._temperature = temperature
        self._backward = backward
        self._wants_entropy = bool(getattr(loss, "needs_entropy", False))
        self._prompts, self._responses = rows(data["prompt_ids"]), rows(data["response_ids"])
        sizes = [len(response) for response in self._responses]
        #: response columns as rows, and columns of one value per row
        self._columns = {key: rows(value) for key, value in data.items() if value.is_nested and key != "prompt_ids"}
        self._columns = {key: found for key, found in self._columns.items() if [len(row) for row in found] == sizes}
        self._values = {key: value for key, value in data.items() if not value.is_nested}
        self.lengths = [len(p) + len(r) for p, r in zip(self._prompts, self._responses, strict=True)]
        self._log_probs: list[torch.Tensor] = []
        self._entropy: list[torch.Tensor] = []
        self._total = 0.0
        self._metrics: dict[str, float] = {}

    def micro_batch(self, chosen: list[int]) -> None:
        """Forward, loss, backward."""
        log_probs, entropy, mask = self._forward(chosen)
        for kept, values in ((self._log_probs, log_probs), (self._entropy, entropy)):
            if values is not None:
                kept += [row[row_mask].detach().float() for row, row_mask in zip(values, mask, strict=True)]
        if self._loss is None:
            return
        loss, metrics = self._loss(TokenOutput(log_probs=log_probs, entropy=entropy), self._data(chosen))
        if self._backward:
            loss.backward()
        self._total += float(loss.detach())
        for name, value in metrics.items():
            self._metrics[name] = _combined(name, self._metrics.get(name), float(value))

    def _forward(self, chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Log-probabilities and entropies ``[b, T]`` of response tokens, 0 past each response; and where they are."""
        prompts, responses = [self._prompts[i] for i in chosen], [self._responses[i] for i in chosen]
        ids_bS = _padded([torch.cat(pair) for pair in zip(prompts, responses, strict=True)])
        labels_bT = _padded(responses)
        starts = torch.tensor([len(prompt) - 1 for prompt in prompts])  # a token is predicted one position before it
        steps = torch.arange(labels_bT.shape[1])
        mask_bT = steps < torch.tensor([len(response) for response in responses])[:, None]
        # attention is causal: no token sees the padding to its right, so no attention mask is needed
        logits_bSV = self._model(input_ids=ids_bS, use_cache=False).logits
        positions_bT = (starts[:, None] + steps).clamp(max=ids_bS.shape[1] - 1)
        logits_bTV = logits_bSV[torch.arange(len(chosen))[:, None], positions_bT].float() / self._temperature
        all_bTV = logits_bTV.log_softmax(-1)
        log_probs_bT = all_bTV.gather(-1, labels_bT[..., None])[..., 0].masked_fill(~mask_bT, 0.0)
        entropy_bT = None
        if self._wants_entropy:
            entropy_bT = -(all_bTV.exp() * all_bTV).sum(-1).masked_fill(~mask_bT, 0.0)
        return log_probs_bT, entropy_bT, mask_bT

    def _data(self, chosen: list[int]) -> TensorDict:
        """What the loss reads: response columns as ``[b, T]``, row columns as ``[b]``."""
        columns = {name: _padded([column[i] for i in chosen]) for name, column in self._columns.items()}
        values = {name: column[torch.tensor(chosen)] for name, column in self._values.items()}
        return TensorDict({**columns, **values}, batch_size=[len(chosen)])

    def output(self) -> EngineOutput:
        """Everything in the order of the rows."""
        return EngineOutput(
            log_probs=jagged(self._log_probs),
            entropy=jagged(self._entropy) if self._wants_entropy else None,
            loss=None if self._loss is None else self._total,
            metrics=self._metrics,
        )


def _padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _combined(name: str, before: float | None, value: float) -> float:
    """Metrics of micro-batches add up, but for largest and smallest values."""
    if before is None:
        return value
    if name.endswith("/max"):
        return max(before, value)
    return min(before, value) if name.endswith("/min") else before + value
