"""Jagged columns of a rank's rows, and per-token results that are put back in the order of the rows.

Shapes: ``B`` rows of this rank, ``b`` rows of a micro-batch, ``N`` its response tokens, ``j`` a jagged dimension.
"""

from __future__ import annotations

import attrs
import torch


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
        offsets, lengths = nested.offsets(), nested.lengths()  # type: ignore[attr-defined]
        return cls(nested.values().detach(), offsets[:-1], offsets.diff() if lengths is None else lengths)

    def padded(self, rows: torch.Tensor, length: int) -> torch.Tensor:
        """Return the chosen rows, padded with 0 to ``[b, length, ...]``."""
        steps = torch.arange(length)
        inside = steps < self.lengths[rows].unsqueeze(1)
        if self.values.shape[0] == 0:
            return self.values.new_zeros((len(rows), length, *self.values.shape[1:]))
        index = (self.starts[rows].unsqueeze(1) + steps).masked_fill_(~inside, 0)
        dense = self.values[index]
        return dense.masked_fill_(~inside.view(*inside.shape, *(1,) * (dense.ndim - 2)), 0)


def steps_of(lengths: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the row and the step of each token of rows back to back, and where each row starts; below 0 is 0."""
    lengths = lengths.clamp(min=0)
    starts = lengths.cumsum(0) - lengths
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    return (rows, torch.arange(len(rows)) - starts[rows]), starts


class TokenBuffer:
    """A collector of one per-token result of all rows. Micro-batches may come in any order."""

    def __init__(self, lengths: torch.Tensor) -> None:
        """Prepare for responses of these lengths, int64 ``[B]``."""
        self._lengths = lengths
        self._offsets = torch.cat([self._lengths.new_zeros(1), self._lengths.cumsum(0)])
        self._values = torch.zeros(int(self._offsets[-1]), dtype=torch.float32)

    def add(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add the results ``[N]`` of a micro-batch's rows."""
        (row, step), _ = steps_of(self._lengths[rows])
        self._values[self._offsets[rows][row] + step] = tokens.detach().float().cpu()

    def nested(self) -> torch.Tensor:
        """Return the results, jagged float32 ``[B, j]``, in the order of the rows."""
        return torch.nested.nested_tensor_from_jagged(self._values, self._offsets)
