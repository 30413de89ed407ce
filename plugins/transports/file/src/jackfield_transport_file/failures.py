"""Errors of the file system, and what they are called here."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from jackfield.errors import WeightsError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Errors of the file system become ours.

    Raises:
        WeightsError: ``weights.storage``.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = any(getattr(error, "errno", None) == code or f"(os error {code})" in str(error) for code in _FULL)
        what = "there is no room for the weights" if full else "the folder of the weights cannot be used"
        raise WeightsError(
            f"{what}: {error}",
            code="weights.storage",
            where=str(folder),
            expected=_room(folder) if full else None,
            fix="make room, or lower keep" if full else "check that trainer and explorers may write there",
        ) from error


def _room(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return f"more than the {shutil.disk_usage(folder).free} bytes that are free"
    return "a folder that can be written to"
