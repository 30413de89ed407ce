"""Makes a better and a worse answer of each solved problem, for ``jackfield data format --as dpo``."""

from __future__ import annotations

import re
from typing import Any


def pair(record: dict[str, Any]) -> dict[str, Any] | None:
    """Prefer the marked answer to one that is off by one; leave out problems without a mark."""
    marked = re.search(r"<answer>(\d+)</answer>", record["solution"]["text"])
    if marked is None:
        return None
    right = int(marked[1])
    return {"prompt": record["asked"], "chosen": str(right), "rejected": str(right + 1)}
