"""Keeps Data-Juicer from the network, from other programs and from installing packages, which its operators do unasked.

A recipe that downloads or installs something gives another result tomorrow, and needs what a worker may not have.
"""

from __future__ import annotations

import contextlib
import contextvars
import ipaddress
import os
import sys
from collections.abc import Iterator
from typing import Any

#: Variables under which libraries look for models only where they are stored already.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PIP_NO_INDEX": "1",
    "UV_OFFLINE": "1",
}
_PROGRAMS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
_NAMES = ("socket.getaddrinfo", "socket.gethostbyname")

_closed: contextvars.ContextVar[bool] = contextvars.ContextVar("closed", default=False)
_refused: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("refused", default=None)
_hooked = False


class Refused(RuntimeError):
    """An operator wanted the network, a program or a package that is not installed."""


@contextlib.contextmanager
def closed() -> Iterator[list[str]]:
    """Refuse the network, programs and installations in the calls of this block; yield what was refused.

    An operator may catch the error, so callers look at the list, too.
    """
    _hook()
    seen = list[str]()
    before, noting = _closed.set(True), _refused.set(seen)
    variables = {name: os.environ.get(name) for name in OFFLINE}
    os.environ.update(OFFLINE)
    try:
        yield seen
    finally:
        _refused.reset(noting)
        _closed.reset(before)
        for name, value in variables.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def is_closed() -> bool:
    """Return whether this code runs in such a block."""
    return _closed.get()


def refused() -> tuple[str, ...]:
    """Return what was refused in this block so far."""
    return tuple(_refused.get() or ())


def refuse(what: str) -> None:
    """Raise :class:`Refused`, and note it for the block."""
    if (seen := _refused.get()) is not None:
        seen.append(what)
    raise Refused(what)


def _hook() -> None:
    global _hooked
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event[:3] not in ("soc", "sub", "os.") or not _closed.get():
        return
    if event in _PROGRAMS and not _looks_for_library():
        named = arguments[1] if event == "subprocess.Popen" else arguments[0]
        words = [os.fsdecode(each) for each in named] if isinstance(named, list | tuple) else [os.fsdecode(named)]
        shown = [os.path.basename(words[0]), *(word for word in words[1:] if not os.path.isabs(word))]
        refuse(f"it starts the program {' '.join(shown)[:100]}")
    if event in _NAMES and not _is_local(arguments[0]):
        refuse(f"it connects to {os.fsdecode(arguments[0])}")
    if event == "socket.connect" and isinstance(arguments[1], tuple) and not _is_local(arguments[1][0]):
        refuse(f"it connects to {arguments[1][0]}")


def _looks_for_library() -> bool:
    """Return whether ctypes asks where a library is; the programs that it starts for that change nothing."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__") == "ctypes.util":
            return True
        frame = frame.f_back
    return False


def _is_local(host: Any) -> bool:
    name = os.fsdecode(host) if host is not None else ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name in ("", "localhost")
