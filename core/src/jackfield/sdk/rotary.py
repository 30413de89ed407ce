"""Rotary embeddings whose frequencies depend on the length of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def length_limits(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the lengths, in tokens, above which a Hugging Face model uses other frequencies, by kind.

    A pass computes frequencies for its longest row, so rows below and above a limit must not share a pass. With
    ``longrope`` there are two sets of frequencies; with ``dynamic`` each length above the limit has its own. A
    sequence that crosses a limit during generation keeps keys with the frequencies that it began with, and no pass
    over the whole sequence gives the same result. ``config`` is the content of ``config.json``.
    The lowest limit counts; the result is empty if frequencies never depend on the length.
    """
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    limits: dict[str, int] = {}
    for each in (rotary, *(value for value in rotary.values() if isinstance(value, Mapping))):  # one per layer type
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
