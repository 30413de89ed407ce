"""The name under which a server that several runs share keeps the rows of one of them."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

__all__ = ["NAME_FILE", "queue_name"]

NAME_FILE = "name.txt"


def queue_name(folder: str | None) -> str:
    """The name of the queue in ``folder``: made by whoever opens it first, kept in ``name.txt``, found by all others.

    It begins with the name of the run's folder, for people, and ends at random: a folder that was removed and made
    again is another queue. Without a folder each call makes a new name.
    """
    mark = uuid.uuid4().hex[:8]
    if folder is None:
        return f"queue-{mark}"
    place = Path(folder).absolute()
    run = place.parent.name if place.name == "queue" else place.name
    place.mkdir(parents=True, exist_ok=True)
    partial = place / f"{NAME_FILE}.{mark}"
    partial.write_text(f"{run}-{mark}", encoding="utf-8")
    try:
        os.link(partial, place / NAME_FILE)  # fails where another process was first
    except FileExistsError:
        pass
    finally:
        partial.unlink()
    return (place / NAME_FILE).read_text(encoding="utf-8", errors="replace")
