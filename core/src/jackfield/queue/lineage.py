"""What rows were made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

__all__ = ["Lineage", "ancestors", "with_lineage"]


@attrs.frozen
class Lineage:
    """How a row came to be, where it was made of others."""

    operation: str
    parents: tuple[str, ...]  #: keys, of this queue or of another one


def ancestors(keys: Iterable[str], known: Mapping[str, Lineage]) -> dict[str, Lineage]:
    """What is known of rows, of their parents, and so on."""
    found: dict[str, Lineage] = {}
    left = list(keys)
    while left:
        key = left.pop()
        if key in known and key not in found:
            found[key] = known[key]
            left.extend(known[key].parents)
    return found


def with_lineage(
    tags: Sequence[Mapping[str, Any]], lineage: Sequence[Lineage | None] | None
) -> Sequence[Mapping[str, Any]]:
    """Rows' tags with ``operation`` and ``parents``, for everybody who looks at tags."""
    if lineage is None:
        return tags
    return [
        dict(each) if made is None else {**each, "operation": made.operation, "parents": list(made.parents)}
        for each, made in zip(tags, lineage, strict=True)
    ]
