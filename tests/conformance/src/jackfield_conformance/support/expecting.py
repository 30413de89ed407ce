"""What every suite expects in the same way: refusals and finite numbers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

from jackfield.errors import JackfieldError


@contextlib.contextmanager
def refused(
    kind: type[JackfieldError] | tuple[type[JackfieldError], ...],
    *codes: str,
    naming: str | Sequence[str] = (),
    what: str = "the call",
) -> Iterator[None]:
    """The block raises an error of this class, with one of the codes (none: any), whose text holds the names."""
    found: Exception | None = None
    try:
        yield
    except Exception as error:
        found = error
    fits = isinstance(found, kind) and (not codes or found.code in codes)
    assert fits, f"{what}: {' or '.join(codes) or kind} is due, found {found!r}"
    for name in (naming,) if isinstance(naming, str) else naming:
        assert name in str(found), f"the error does not name {name!r}: {found}"


def finite(value: object) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
