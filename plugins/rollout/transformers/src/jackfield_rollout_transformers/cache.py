"""The KV cache of a changing batch: one row per sequence, each left-aligned, written in place.

Shapes: ``R`` rows, ``H`` key/value heads, ``L`` positions, ``D`` head dimension, ``U`` prompts of a prefill pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_FIRST_ROWS = 8
_FIRST_LENGTH = 32


class _BatchLayer(CacheLayerMixin):
    """Keys and values of one layer, ``[R, H, L, D]``.

    Memory starts as zeros: a masked position has weight 0, and 0 times uninitialised memory could be NaN.
    """

    is_sliding = False

    keys: Any  #: a tensor, once the layer is initialized
    values: Any

    def __init__(self, cache: BatchCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, length = self._cache.rows, self._cache.length
        self.keys = _zeros_like(key_states, rows, length)
        self.values = _zeros_like(value_states, rows, length)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values, ``[U, H, P, D]`` (prefill) or ``[R, H, 1, D]`` (decode); return those to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache = self._cache
        if cache.is_prefill:
            length = key_states.shape[2]
            for buffer, states in ((self.keys, key_states), (self.values, value_states)):
                buffer[:, :, :length].index_copy_(0, cache.target_rows, states.index_select(0, cache.source_rows))
            return key_states, value_states
        rows, heads = key_states.shape[:2]
        index = cache.write_index(heads)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            dimension = states.shape[3]
            buffer.view(-1, dimension).index_copy_(0, index, states.reshape(rows * heads, dimension))
        return self.keys[:rows, :, : cache.attended], self.values[:rows, :, : cache.attended]

    def resize(self, rows: int, length: int, keep_rows: int, keep_length: int) -> None:
        """Move to buffers of another size, keeping the leading ``keep_rows`` x ``keep_length``."""
        if self.is_initialized:
            self.keys = _resized(self.keys, rows, length, keep_rows, keep_length)
            self.values = _resized(self.values, rows, length, keep_rows, keep_length)

    def move(self, target: Tensor, source: Tensor, length: int) -> None:
        """Copy rows ``source`` over rows ``target`` (disjoint), ``length`` positions."""
        for buffer in (self.keys, self.values) if self.is_initialized else ():
            view = buffer[:, :, :length]
            view.index_copy_(0, target, view.index_select(0, source))

    def clear(self, rows: Tensor) -> None:
        """Zero some rows."""
        for buffer in (self.keys, self.values) if self.is_initialized else ():
            buffer.index_fill_(0, rows, 0)

    def release(self) -> int:
        """Release the memory; return the bytes."""
        freed: int = self.keys.nbytes + self.values.nbytes if self.is_initialized else 0
        self.keys = self.values = None
        self.is_initialized = False
        return freed

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self._cache.is_prefill else self._cache.attended), 0

    def get_seq_length(self) -> int:
        return 0 if self._cache.is_prefill else self._cache.attended - 1

    def get_max_length(self) -> int:
        return -1


class BatchCache(Cache):
    """A cache with the library's interface, whose rows come and go.

    Before a forward pass the decoder calls :meth:`begin_prefill` (each prompt attends only to itself, so the pass
    needs no mask) or :meth:`begin_decode` (one token per row, masked by length).
    """

    def __init__(self, layers: int, max_rows: int, max_tokens: int | None = None) -> None:
        self.rows = 0
        self.length = 0
        self.is_prefill = True
        self.attended = 0
        self.target_rows = self.source_rows = self._positions = torch.zeros(0, dtype=torch.int64)
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._indexes: dict[int, Tensor] = {}
        super().__init__(layers=[_BatchLayer(self) for _ in range(layers)])

    def reserve(self, rows: int, length: int, keep_rows: int, keep_length: int) -> None:
        """Make room for ``rows`` rows of ``length`` tokens, keeping the leading ``keep_rows`` x ``keep_length``."""
        if rows <= self.rows and length <= self.length:
            return
        new_rows, new_length = self.rows, self.length
        if rows > self.rows:
            new_rows = min(max(2 * self.rows, rows, _FIRST_ROWS), self._max_rows)
        if length > self.length:
            new_length = max(2 * self.length, -(-length // _FIRST_LENGTH) * _FIRST_LENGTH)
        if self._max_tokens is not None and new_rows * new_length > self._max_tokens:
            new_rows, new_length = rows, length
        for layer in self.layers:
            layer.resize(new_rows, new_length, keep_rows, keep_length)
        self.rows, self.length = new_rows, new_length

    def begin_prefill(self, target_rows: Tensor, source_rows: Tensor) -> None:
        """Announce a pass over prompts ``[U, P]``; row ``target_rows[i]`` stores prompt ``source_rows[i]``."""
        self.is_prefill, self.target_rows, self.source_rows = True, target_rows, source_rows

    def begin_decode(self, positions: Tensor, attended: int) -> None:
        """Announce a pass of one token per row at ``positions`` ``[R]``, attending to ``attended``."""
        self.is_prefill, self._positions, self.attended = False, positions, attended
        self._indexes = {}

    def write_index(self, heads: int) -> Tensor:
        """Return where a decode pass writes, ``[R * H]``: indexes into ``[R * H * L, D]``."""
        index = self._indexes.get(heads)
        if index is None:
            rows = self._positions.shape[0]
            first = torch.arange(0, rows * heads * self.length, self.length, device=self._positions.device)
            index = (first.view(rows, heads) + self._positions[:, None]).view(-1)
            self._indexes[heads] = index
        return index

    def move(self, target: Tensor, source: Tensor, length: int) -> None:
        """Copy rows ``source`` over rows ``target`` (disjoint), ``length`` positions."""
        for layer in self.layers:
            layer.move(target, source, length)

    def clear(self, rows: Tensor) -> None:
        """Clear some rows."""
        for layer in self.layers:
            layer.clear(rows)

    def release(self) -> int:
        """Release all memory; return the bytes."""
        self.rows = self.length = 0
        return sum(layer.release() for layer in self.layers)


def _zeros_like(states: Tensor, rows: int, length: int) -> Tensor:
    return states.new_zeros(rows, states.shape[1], length, states.shape[3])


def _resized(old: Tensor, rows: int, length: int, keep_rows: int, keep_length: int) -> Tensor:
    new = _zeros_like(old, rows, length)
    new[:keep_rows, :, :keep_length] = old[:keep_rows, :, :keep_length]
    return new
