"""How rows are split into micro-batches, within a number of tokens and with nearly the same number in each.

Shapes: ``B`` rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch

_SPREAD = 2  #: attention spreads packed rows to at most this many times the tokens of a micro-batch


def plan_shared(
    lengths: torch.Tensor, prompts: torch.Tensor, groups: torch.Tensor, max_tokens: int
) -> list[torch.Tensor]:
    """Split rows whose attention is padded, and whose prompts count once in a micro-batch.

    ``lengths``, ``prompts`` and ``groups`` (rows of one group have the same prompt) are int64 ``[B]``. There are as
    few micro-batches as the limit allows; then the largest of them is made smaller, unless that cuts a group. Similar
    lengths stay together, and rows of one group where they fit. A row above the limit goes alone.
    """
    units = _units(lengths.tolist(), prompts.tolist(), groups.tolist())
    group = groups.tolist()

    def copies(filled: list[list[int]]) -> int:
        """Return how many prompts are computed."""
        return sum(len({group[row] for row in rows}) for rows in filled)

    found = _fill(units, max_tokens, max_tokens)
    low, high = 1, max_tokens
    mean = -(-sum(unit.prompt + sum(unit.own) for unit in units) // max(1, len(found)))
    if units and units[0].prompt + units[0].own[0] <= mean:  # no row goes alone, so less than the mean is not enough
        low = min(mean, max_tokens)
    while low < high:
        middle = (low + high) // 2
        tried = _fill(units, middle, max_tokens)
        if len(tried) <= len(found) and copies(tried) <= copies(found):
            found, high = tried, middle
        else:
            low = middle + 1
    return [torch.tensor(rows) for rows in found]


class _Unit(NamedTuple):
    """The rows of a group, longest first."""

    prompt: int  #: its tokens
    rows: list[int]
    own: list[int]  #: tokens of each row beside the prompt


def _units(lengths: list[int], prompts: list[int], groups: list[int]) -> list[_Unit]:
    """Return the rows of each group, and groups with the longest row first."""
    units: dict[int, _Unit] = {}
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        unit = units.setdefault(groups[row], _Unit(prompts[row], [], []))
        unit.rows.append(row)
        unit.own.append(lengths[row] - prompts[row])
    return list(units.values())


def _fill(units: Sequence[_Unit], capacity: int, max_tokens: int) -> list[list[int]]:
    """Fill one micro-batch after the other with at most ``capacity`` tokens."""
    filled: list[list[int]] = []
    rows, tokens, longest, spread = list[int](), 0, 0, _SPREAD * max_tokens
    for unit in units:
        prompt, size = unit.prompt, len(unit.rows)
        whole = prompt + sum(unit.own)
        together = size == 1 or (whole <= capacity and size * (prompt + unit.own[0]) <= spread)
        parts = [(unit.rows, whole - prompt, unit.own[0])] if together else list(zip(*_alone(unit), strict=True))
        inside = False  # whether the micro-batch has the prompt of this unit
        for part, own, longest_own in parts:
            more = own if inside else own + prompt
            padded = (len(rows) + len(part)) * max(longest, prompt + longest_own)
            if rows and (tokens + more > capacity or padded > spread):
                filled.append(rows)
                rows, tokens, longest = [], 0, 0
                more = own + prompt
            rows.extend(part)
            tokens, longest, inside = tokens + more, max(longest, prompt + longest_own), True
    return [*filled, rows] if rows else filled


def _alone(unit: _Unit) -> tuple[list[list[int]], list[int], list[int]]:
    return [[row] for row in unit.rows], unit.own, unit.own


def plan_separate(lengths: torch.Tensor, max_tokens: int) -> list[torch.Tensor]:
    """Split rows of ``lengths`` int64 ``[B]`` whose tokens stand one after the other, with nothing between them.

    The longest row goes first, each to the micro-batch with the fewest tokens. A row above the limit goes alone.
    """
    cost = lengths.tolist()
    order = torch.argsort(lengths, descending=True, stable=True).tolist()
    count = max(1, -(-sum(cost) // max_tokens)) if cost else 0
    while count:
        filled: list[list[int]] = [[] for _ in range(count)]
        heap = [(0, index) for index in range(count)]
        for row in order:
            tokens, index = heapq.heappop(heap)
            filled[index].append(row)
            heapq.heappush(heap, (tokens + cost[row], index))
        if all(len(rows) <= 1 or sum(cost[row] for row in rows) <= max_tokens for rows in filled):
            return [torch.tensor(rows) for rows in filled if rows]
        count += 1
    return []


def plan_padded(lengths: torch.Tensor, max_tokens: int) -> list[torch.Tensor]:
    """Split rows of ``lengths`` int64 ``[B]`` into micro-batches of at most ``max_tokens`` padded tokens.

    The longest rows come first, so lengths within a micro-batch are similar. A row above the limit goes alone.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    micro_batches: list[torch.Tensor] = []
    start = 0
    while start < len(order):
        most = max(1, max_tokens // max(1, int(lengths[order[start]])))
        micro_batches.append(order[start : start + most])
        start += most
    return micro_batches
