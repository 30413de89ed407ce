"""What the suites share: refusals, finite numbers, names of tensors, ends of waits and tasks, a temporary folder."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import math
import shutil
import tempfile
from collections.abc import Awaitable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jackfield.errors import JackfieldError

T = TypeVar("T")
_SLICES = 10


@functools.cache
def temporary_root() -> Path:
    """Create a folder that is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="jackfield-conformance-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def refused(
    kind: type[JackfieldError] | tuple[type[JackfieldError], ...],
    *codes: str,
    naming: str | Sequence[str] = (),
    what: str = "the call",
) -> Iterator[None]:
    """Require that the block raises an error of this class, with one of the codes, whose text has the names.

    Without codes, any code fits.
    """
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


def assert_names(wanted: Collection[str], found: Collection[str], what: str) -> None:
    """Require the same names, each once."""
    doubled = sorted({name for name in found if list(found).count(name) > 1}) if len(found) != len({*found}) else []
    assert not doubled, f"{what}: twice: {doubled[:4]}"
    missing, unknown = sorted({*wanted} - {*found}), sorted({*found} - {*wanted})
    assert not missing, f"{what}: {len(missing)} are missing: {missing[:4]}"
    assert not unknown, f"{what}: {len(unknown)} are not expected: {unknown[:4]}"


def assert_no_tasks(before: Collection[asyncio.Task[Any]], when: str) -> None:
    """Require that no task is running that is not among those of ``before``."""
    left = [task.get_name() for task in asyncio.all_tasks() - {*before} if not task.done()]
    assert not left, f"tasks that are left {when}: {left}"


async def cancelled(task: asyncio.Task[Any], seconds: float, what: str) -> None:
    """Cancel a task, and require that it ends in time."""
    task.cancel()
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        task.cancel()
        raise AssertionError(f"{what} continued for {seconds:g} s after it was cancelled")
    if not task.cancelled():
        task.exception()  # its error is another check's subject


async def settled(tasks: Collection[asyncio.Future[T]], seconds: float) -> None:
    """Wait until all are done, one has failed, or time runs out.

    The time passes in slices, so that a pause of the whole machine does not count against the tasks.
    """
    for _ in range(_SLICES):
        done, pending = await asyncio.wait(tasks, timeout=seconds / _SLICES, return_when=asyncio.FIRST_EXCEPTION)
        if not pending or any(task.cancelled() or task.exception() is not None for task in done):
            return


async def within(seconds: float, awaitable: Awaitable[T], what: str) -> T:
    """Await for a bounded time; then cancel, and raise ``AssertionError``."""
    task = asyncio.ensure_future(awaitable)
    await settled([task], seconds)
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=seconds)
        raise AssertionError(f"{what} has not ended after {seconds:g} s")
    return task.result()
