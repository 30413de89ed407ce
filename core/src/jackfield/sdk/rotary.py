"""Rotary embeddings whose frequencies depend on the length of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["length_limits"]


def length_limits(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the lengths, in tokens, beyond which a Hugging Face model has other frequencies.

    A pass computes them for its longest row, so rows on both sides of a limit do not go into one pass. With
    ``longrope`` there are two sets of frequencies; with ``dynamic`` each length beyond the limit has its own. A
    sequence that crosses a limit while it is generated keeps keys of the frequencies that it began with, and no pass
    over the whole sequence agrees with it. ``config`` is that of ``config.json``.

    Returns:
        By kind of frequencies, ``longrope`` or ``dynamic``: the lowest limit. Empty: they never depend on the length.
    """
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    limits: dict[str, int] = {}
    for each in (rotary, *(value for value in rotary.values() if isinstance(value, Mapping))):  # by type of layer
        kind = str(each.get("rope_type", each.get("type")))
        if kind in ("longrope", "su"):
            kind, limit = "longrope", each.get("original_max_position_embeddings")
            limit = limit or config.get("original_max_position_embeddings")
        elif "dynamic" in kind:
            kind, limit = "dynamic", None
        else:
            continue
        limit = limit or config.get("max_position_embeddings")
        if limit is not None:
            limits[kind] = min(int(limit), limits.get(kind, int(limit)))
    return limits
