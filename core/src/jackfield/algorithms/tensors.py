"""Masks, groups of rows, batch statistics and results of losses; it does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import attrs

from jackfield.errors import ConfigError
from jackfield.sdk.samples import sample_name

if TYPE_CHECKING:
    from torch import Tensor

#: Advantages and returns, ``[B, T]``; or one tensor for both, ``[B, T]`` or with a value per row, ``[B]``.
Estimate: TypeAlias = "Tensor | tuple[Tensor, Tensor]"

#: Bound of a log-ratio before exp: e^20 is far outside of any trust region, and finite in float32.
CLAMP = 20.0
_BLOCK = 1 << 17  # numbers per conversion to float64
_FIX = "lower the learning rate, or look at that sample"


@attrs.frozen(kw_only=True, eq=False)
class Term:
    """A summand of a loss: ``values`` per token ``[B, T]``, or one per sequence ``[B]``."""

    values: Tensor
    weight: float = 1.0
    mask: Tensor | None = None  #: None: the response mask
    counts: Mapping[str, float] = attrs.field(factory=dict)  #: counts of the whole batch, if they differ


#: The result of a loss: values per token ``[B, T]``, one per sequence ``[B]``, or several terms; and metrics by name,
#: each with a value (or bool) per token, averaged over tokens, or per row ``[B]``, averaged over sequences.
LossResult: TypeAlias = "tuple[Tensor | tuple[Term, ...], Mapping[str, Tensor]]"


class Groups:
    """Groups of rows with equal integer ids, and vectorised statistics over them."""

    def __init__(self, *ids: Tensor) -> None:
        """Group rows by ``ids``, each ``[B]`` with any values; rows of one group are equal in all of them."""
        index = ids[0]
        for further in ids[1:]:
            inner = further.unique(return_inverse=True)[1]
            index = index.unique(return_inverse=True)[1] * (len(inner) + 1) + inner
        _, index, counts = index.unique(return_inverse=True, return_counts=True)
        self.index: Tensor = index  #: int64 ``[B]``: the number of each row's group
        self.counts: Tensor = counts.double()  #: ``[G]``: rows of each group
        self.sizes: Tensor = self.counts[index]  #: ``[B]``: rows of each row's group
        self.alone: Tensor = self.sizes == 1  #: bool ``[B]``

    def totals(self, rows: Tensor) -> Tensor:
        """Return ``[G, ...]``: the sum of each group's rows (``[B, ...]``)."""
        return rows.new_zeros((len(self.counts), *rows.shape[1:])).index_add(0, self.index, rows)

    def sums(self, rows: Tensor) -> Tensor:
        """Return ``[B, ...]``: for each row the sum over its group."""
        return self.totals(rows)[self.index]

    def means(self, rows: Tensor) -> Tensor:
        """Return for each row (``[B]`` or ``[B, D]``) the mean over its group."""
        return self.sums(rows) / self.sizes.view(-1, *[1] * (rows.dim() - 1))

    def stds(self, rows: Tensor) -> Tensor:
        """Return for each row the standard deviation of its group, over n - 1; 0 for a group of one."""
        squares = self.sums((rows - self.means(rows)).square())
        return (squares / (self.sizes - 1).clamp(min=1).view(-1, *[1] * (rows.dim() - 1))).sqrt()

    def maxima(self, rows: Tensor) -> Tensor:
        """Return for each row (``[B]``) the maximum of its group."""
        lowest = rows.new_full((len(self.counts),), float("-inf"))
        return lowest.scatter_reduce(0, self.index, rows, "amax")[self.index]

    def relative(self, rows: Tensor, eps: float | None = None) -> Tensor:
        """Return x - mean of each row (``[B]`` or ``[B, D]``), divided by (std + eps) if eps is given."""
        centred = rows - self.means(rows)
        return centred if eps is None else centred / (self.stds(rows) + eps)

    def positions(self, keys: Tensor | None = None) -> Tensor:
        """Return each row's place in its group, by key or else by row order, int64 ``[B]``."""
        order = self.index.argsort(stable=True)
        if keys is not None:
            by_key = keys.argsort(stable=True)
            order = by_key[self.index[by_key].argsort(stable=True)]
        starts = (self.counts.cumsum(0) - self.counts).long()
        positions = starts.new_zeros(len(order))
        positions[order] = starts.new_ones(len(order)).cumsum(0) - 1 - starts[self.index[order]]
        return positions

    def log_mean_exp(self, rows: Tensor) -> Tensor:
        """Return for each row log(mean(exp)) of its group."""
        highest = self.maxima(rows)
        return highest + self.means((rows - highest).exp()).log()


def spread(rows: Tensor, mask: Tensor, like: Tensor) -> Tensor:
    """Put a value per row (``[B]``) on each masked token: ``[B, T]`` of ``like``'s dtype."""
    return rows.to(like.dtype).unsqueeze(-1).masked_fill(mask == 0, 0.0)


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``[B]``: the mean over each row's masked tokens; 0 for a row without any."""
    kept = values.masked_fill(mask == 0, 0.0)
    return kept.sum(-1) / (mask != 0).sum(-1).clamp(min=1)


def row_sums(values: Tensor) -> Tensor:
    """Return the sum of each row, ``[B]``, in float64: equal rewards differ from their mean by far less than any eps.

    Rows are summed in blocks that fit a cache, because a sum in another dtype first converts its whole input.
    """
    sums = values.new_empty(len(values)).double()
    rows = max(1, _BLOCK // max(values.shape[-1], 1))
    for start in range(0, len(values), rows):
        sums[start : start + rows] = values[start : start + rows].sum(-1, dtype=sums.dtype)
    return sums


def masked_mean_std(values: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (n - 1) where ``keep``: float64, 0 if undefined."""
    wide = values.new_empty(0).double().dtype
    count = keep.sum()
    mean = values.masked_fill(~keep, 0.0).sum(dtype=wide) / count.clamp(min=1)
    squares = (values - mean.to(values.dtype)).masked_fill(~keep, 0.0).square_().sum(dtype=wide)
    return mean, (squares / (count - 1).clamp(min=1)).sqrt()


class ModelTokens:
    """The model tokens of a mask ``[B, T]``, packed to the left: column t has the t-th model token of each row."""

    def __init__(self, mask: Tensor) -> None:
        self.keep: Tensor = mask != 0
        self._position: Tensor | None = None
        if bool((self.keep[:, 1:] & ~self.keep[:, :-1]).any()) or not bool(self.keep[:, :1].all()):
            self._position = self.keep.cumsum(-1) - 1  # -1 before the first model token

    def pack(self, values: Tensor) -> Tensor:
        """Return ``[B, T]``: the values of model tokens, then zeros."""
        kept = values.masked_fill(~self.keep, 0.0)
        return kept if self._position is None else self._scatter(kept)

    def credit(self, rewards: Tensor) -> Tensor:
        """Return packed rewards, each with the rewards of the observations up to the next model token."""
        if self._position is not None:
            return self._scatter(rewards.masked_fill(self._position < 0, 0.0))
        kept = rewards.masked_fill(~self.keep, 0.0)
        after = rewards.masked_fill(self.keep, 0.0).sum(-1, keepdim=True)
        last = (self.keep.sum(-1, keepdim=True) - 1).clamp(min=0)
        return kept.scatter_add_(1, last, after) if rewards.shape[1] else kept

    def unpack(self, packed: Tensor) -> Tensor:
        """Return packed values as ``[B, T]``, 0 where the mask is 0. ``packed`` may be overwritten."""
        if self._position is not None:
            packed = packed.gather(1, self._position.clamp(min=0))
        return packed.masked_fill_(~self.keep, 0.0)

    def _scatter(self, values: Tensor) -> Tensor:
        assert self._position is not None
        return values.new_zeros(values.shape).scatter_add_(1, self._position.clamp(min=0), values)


def discounted_sums(values: Tensor, factor: float) -> Tensor:
    """Return x_t = values_t + factor x_{t+1} along each row of ``[B, T]``, as a new tensor."""
    if factor == 1.0:
        return values.flip(-1).cumsum(-1).flip(-1)
    steps = values.new_empty(values.T.shape).copy_(values.T)  # a time step is contiguous
    for t in range(len(steps) - 2, -1, -1):
        steps[t].add_(steps[t + 1], alpha=factor)
    return steps.T.contiguous()


def credited_returns(token_rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return the reward to go of each model token, float ``[B, T]``; 0 where the mask is 0.

    Only model tokens discount. A reward on an observation token is credited to the model token before it.
    """
    if gamma == 1.0:
        return discounted_sums(token_rewards, 1.0).masked_fill(mask == 0, 0.0)
    tokens = ModelTokens(mask)
    return tokens.unpack(discounted_sums(tokens.credit(token_rewards), gamma))


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return log(pi / pi_old) per token, within ±20."""
    return (log_probs - old_log_probs).clamp(-CLAMP, CLAMP)


def row_log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return log(pi(y) / pi_old(y)) per row, ``[B]``; both are 0 where the mask is 0."""
    return (log_probs - old_log_probs).sum(-1)


def clean(tensors: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Check shapes and values of tensors (``[B, T]``) and return them with 0 where the mask is 0."""
    require_shapes(tensors, mask.shape)
    require_finite(tensors, mask)
    return {name: value.masked_fill(mask == 0, 0.0) for name, value in tensors.items()}


def require_shapes(tensors: Mapping[str, Tensor], *shapes: Sequence[int]) -> None:
    """Raise ``algorithm.input`` for a tensor without one of these shapes (of the response mask, or of its rows)."""
    for name, tensor in tensors.items():
        if tensor.shape not in shapes:
            expected, found = " or ".join(str(tuple(shape)) for shape in shapes), str(tuple(tensor.shape))
            message = f"{name} does not have the shape of response_mask"
            raise ConfigError(message, code="algorithm.input", where=name, expected=expected, found=found)


def require_finite(tensors: Mapping[str, Tensor], mask: Tensor | None, fix: str = _FIX) -> None:
    """Raise ``algorithm.not-finite`` for NaN or infinity on masked tokens (``[B, T]``), naming the first.

    If all values are finite, there is one device synchronisation. Without a mask, the first dimension is rows.
    """
    bad = {name: ~tensor.detach().isfinite() for name, tensor in tensors.items()}
    if mask is not None:
        bad = {name: flags & (mask != 0) for name, flags in bad.items()}
    if not bad or not bool(sum(flags.sum() for flags in bad.values())):
        return
    name = next(name for name, flags in bad.items() if bool(flags.any()))
    place = bad[name].nonzero()[0].tolist()
    where = f"row {place[0]}" if mask is None else f"row {place[0]}, response token {place[1]}"
    message = f"{name} is {float(tensors[name].detach()[tuple(place)])}"
    raise ConfigError(message, code="algorithm.not-finite", where=where, fix=fix)


@contextmanager
def naming_rows(names: Tensor | Sequence[str] | None) -> Iterator[None]:
    """Replace ``row N`` in errors of :func:`require_finite` by ``names[N]``: a text, or a row of the whole batch,
    which is named as :func:`~jackfield.sdk.samples.naming_samples` says.
    """
    try:
        yield
    except ConfigError as error:
        number, comma, rest = str(error.where).removeprefix("row ").partition(",")
        if error.code == "algorithm.not-finite" and number.isdigit() and names is not None:
            name = names[int(number)]
            error.where = f"{name if isinstance(name, str) else sample_name(int(name))}{comma}{rest}"
        raise
