"""Draw tokens for a batch in which each row has its own parameters and random numbers.

Random numbers are counter-based: the number for a row's ``n``-th token is a hash of its seed and ``n``, so what a
request draws does not depend on its neighbours. The hash is SplitMix64's finaliser (Steele, Lea, Flood 2014), twice.

Shapes: ``B`` rows, ``V`` vocabulary, ``K`` table columns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from jackfield.abc.rollout import SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1

# integer columns; those that advance with each token stand side by side
POSITION, COUNTER, LAST_TOKEN, RANDOM_STATE, TOP_K, GREEDY, FILTERED, RAW, OFFSET = range(9)
# float columns
TEMPERATURE, TOP_P, MIN_P = range(3)


def mix(number: int) -> int:
    """Apply SplitMix64's finaliser to an integer modulo 2^64."""
    number &= _MASK
    number = ((number ^ (number >> 30)) * _FACTORS[0]) & _MASK
    number = ((number ^ (number >> 27)) * _FACTORS[1]) & _MASK
    return number ^ (number >> 31)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _shift(bits: Tensor, by: int) -> Tensor:
    """Shift right logically; ``>>`` on int64 is arithmetic."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def uniforms(state: Tensor, counter: Tensor) -> Tensor:
    """Return random numbers in (0, 1), float64 ``[B]``, of int64 ``[B]`` states (mixed seeds) and token numbers."""
    bits = state + (counter + 1) * _signed(_GOLDEN)
    bits = (bits ^ _shift(bits, 30)) * _signed(_FACTORS[0])
    bits = (bits ^ _shift(bits, 27)) * _signed(_FACTORS[1])
    bits = bits ^ _shift(bits, 31)
    return (_shift(bits, 12).to(torch.float64) + 0.5) * 2.0**-52


def modes_of(sampling: SamplingParams) -> Counter[str]:
    """Return which operations a row needs. A sum counts the rows that need each, so that unneeded ones are skipped."""
    greedy = sampling.temperature == 0
    filtered = not greedy and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
    tempered = not greedy and sampling.temperature != 1
    raw = sampling.log_probs == "raw" and (filtered or tempered)
    return Counter(greedy=int(greedy), filtered=int(filtered), tempered=int(tempered), raw=int(raw))


@attrs.frozen(eq=False)
class RowTable:
    """Per-row state and parameters: ``integers`` int64 ``[B, 9]`` and ``floats`` float32 ``[B, 3]``."""

    integers: Tensor
    floats: Tensor

    @classmethod
    def zeros(cls, rows: int, device: torch.device) -> RowTable:
        """Create a table of empty rows."""
        return cls(
            torch.zeros(rows, 9, dtype=torch.int64, device=device),
            torch.zeros(rows, 3, dtype=torch.float32, device=device),
        )

    @classmethod
    def build(
        cls, rows: list[tuple[SamplingParams, int, int, int]], device: torch.device, offsets: Sequence[int] = ()
    ) -> RowTable:
        """Create a table of ``(sampling, seed, index in the cache, token number)``.

        ``offsets`` are those of positions from these indexes; empty: there are none.
        """
        integers, floats = [], []
        for (sampling, seed, position, counter), offset in zip(rows, offsets or [0] * len(rows), strict=True):
            modes = modes_of(sampling)
            state = _signed(mix(seed))
            flags = (modes[name] for name in ("greedy", "filtered", "raw"))
            integers.append((position, counter, 0, state, sampling.top_k, *flags, offset))
            floats.append((sampling.temperature or 1.0, sampling.top_p, sampling.min_p))
        return cls(
            torch.tensor(integers, dtype=torch.int64, device=device),
            torch.tensor(floats, dtype=torch.float32, device=device),
        )

    def head(self, rows: int) -> RowTable:
        """Return a view of the first ``rows`` rows."""
        return RowTable(self.integers[:rows], self.floats[:rows])

    def write(self, rows: Tensor, table: RowTable) -> None:
        """Overwrite ``rows`` with ``table``."""
        self.integers.index_copy_(0, rows, table.integers)
        self.floats.index_copy_(0, rows, table.floats)

    def move(self, target: Tensor, source: Tensor) -> None:
        """Copy rows ``source`` over rows ``target``."""
        self.integers.index_copy_(0, target, self.integers.index_select(0, source))
        self.floats.index_copy_(0, target, self.floats.index_select(0, source))

    def advance(self, tokens: Tensor) -> None:
        """Record the drawn tokens ``[B]`` as each row's last token, to be computed at the next position."""
        self.integers[:, LAST_TOKEN] = tokens
        self.integers[:, COUNTER] += 1


def draw(logits: Tensor, table: RowTable, modes: Counter[str]) -> tuple[Tensor, Tensor]:
    """Draw one token per row of ``logits`` ``[B, V]``, of any float dtype; ``modes`` are the rows' needs.

    Returns:
        Tokens, int64 ``[B]``, and their log-probabilities, float32 ``[B]``: of the distribution that was drawn from
        (``processed``) or of the logits at temperature 1 without filters (``raw``, and for greedy rows always).
    """
    logits = logits.float()
    rows = logits.shape[0]
    if modes["greedy"] == rows:
        tokens = logits.argmax(-1)
        return tokens, _pick(logits, tokens) - logits.logsumexp(-1)
    scaled = logits / table.floats[:, TEMPERATURE, None] if modes["tempered"] else logits
    uniform = uniforms(table.integers[:, RANDOM_STATE], table.integers[:, COUNTER])
    probabilities = scaled.softmax(-1)
    tokens = _invert(probabilities, uniform)
    if modes["greedy"]:
        tokens = torch.where(table.integers[:, GREEDY].bool(), logits.argmax(-1), tokens)
    chosen = _pick(probabilities, tokens).log()  # one that is drawn does not underflow
    if modes["filtered"]:
        which = table.integers[:, FILTERED].nonzero().squeeze(1)
        parameters = RowTable(table.integers.index_select(0, which), table.floats.index_select(0, which))
        filtered = _draw_filtered(scaled.index_select(0, which), parameters, uniform.index_select(0, which))
        tokens = tokens.index_copy(0, which, filtered[0])
        chosen = chosen.index_copy(0, which, filtered[1])
    if modes["raw"]:
        raw = _pick(logits, tokens) - logits.logsumexp(-1)
        chosen = torch.where(table.integers[:, RAW].bool(), raw, chosen)
    return tokens, chosen


def _pick(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(1, tokens[:, None]).squeeze(1)


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return the token at which the cumulative probability passes ``uniform``, never one of probability 0."""
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    target = uniform * cumulative[:, -1]
    found = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    return found.clamp_(max=probabilities.shape[1] - 1)  # beyond it only where logits are NaN: the caller finds them


def _draw_filtered(scaled: Tensor, table: RowTable, uniform: Tensor) -> tuple[Tensor, Tensor]:
    order, kept = filter_rows(scaled, table)
    rank = _invert(kept, uniform)
    return _pick(order, rank), _pick(kept, rank).log()


def filter_rows(scaled: Tensor, table: RowTable) -> tuple[Tensor, Tensor]:
    """Apply top-k, then top-p of the rest, then min-p to logits ``[B, V]`` divided by the temperature.

    The most probable token always stays. Returns tokens, the likeliest first, and their probabilities, ``[B, V]``.
    """
    ordered, order = scaled.sort(stable=True, dim=-1, descending=True)
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    top_k = table.integers[:, TOP_K, None]
    ordered = ordered.masked_fill((top_k > 0) & (ranks >= top_k), -math.inf)
    probabilities = ordered.softmax(-1, dtype=torch.float64)
    before = probabilities.cumsum(-1) - probabilities
    top_p = table.floats[:, TOP_P, None].double()
    dropped = (before >= top_p) & (top_p < 1)
    dropped |= ordered < ordered[:, :1] + table.floats[:, MIN_P, None].log()
    dropped[:, 0] = False
    return order, ordered.masked_fill(dropped, -math.inf).softmax(-1)
