"""The program of a worker process. It loads one function and calls it, one call at a time.

It is run by its path, not as a module of a package, and needs only the standard library, so it starts fast in any
interpreter. It speaks the messages of ``jackfield.sdk.rpc.wire`` as JSON. The user's code cannot reach the socket, its
forks do not inherit it, and its output goes elsewhere.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import resource
import signal
import socket
import struct
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from typing import Any

_HEAD, _MAGIC = struct.Struct(">4sI"), b"JKR1"  # of a message: magic and bytes
_CALL, _REPLY = 3, 4  # tags of messages
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_LIBRARIES = ("<frozen ", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


def main() -> None:
    """Serve until the other end of the socket closes."""
    descriptor, parent = map(int, sys.argv[-2:])
    _die_with_parent(parent)
    for folder in sys.argv[1:-2]:
        sys.pycache_prefix, sys.dont_write_bytecode = folder, False
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    os.register_at_fork(after_in_child=functools.partial(_let_go, descriptor))
    serving, functions = os.getpid(), _Functions()
    with asyncio.Runner() as runner:
        for kind, *fields in _messages(channel):
            if kind != _CALL:
                continue
            id, method, arguments = fields[:3]
            try:
                value = getattr(functions, method.rpartition(".")[2])(*arguments)
                if inspect.isawaitable(value):
                    value = runner.run(_wait(value))
                answer = {"value": json.dumps(value, default=_scalar)}
            except BaseException as error:  # SystemExit is the user's code's, too
                answer = {"error": _describe(error)}
            if os.getpid() != serving:  # a fork of the user's code that returned to here
                os._exit(0)
            reply = json.dumps([_REPLY, id, answer, None]).encode()
            channel.sendall(_HEAD.pack(_MAGIC, len(reply)) + reply)


def _messages(channel: socket.socket) -> Iterator[list[Any]]:
    """Read messages until the other end closes."""
    stream = channel.makefile("rb")
    while len(head := stream.read(_HEAD.size)) == _HEAD.size:
        _, size = _HEAD.unpack(head)
        yield json.loads(stream.read(size))


class _Functions:
    """The functions that the other end calls."""

    function: Callable[..., Any]

    def load(self, request: dict[str, Any]) -> None:
        self.function = _load(request)

    def call(self, arguments: str, cpu_seconds: float) -> Any:
        _limit_cpu(cpu_seconds)
        return self.function(**json.loads(arguments))


def _let_go(*descriptors: int) -> None:
    """Redirect descriptors, so that a fork neither takes nor answers requests."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)


async def _wait(value: Any) -> Any:
    return await value


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before
        os._exit(1)


def _load(request: dict[str, Any]) -> Callable[..., Any]:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if request["memory_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"], request["memory_bytes"]))
    sys.path.extend(path for path in request["sys_path"] if path not in sys.path)
    place, _, name = request["target"].rpartition(":")
    found: Any = _file_module(place) if place.endswith(".py") else importlib.import_module(place)
    for part in name.split("."):
        found = getattr(found, part)
    keywords, method = request["keywords"], request["method"]
    if inspect.isclass(found):
        return _method(found(**keywords), method)
    if not inspect.isroutine(found) and hasattr(found, method):
        found = _method(found, method)
    return functools.partial(found, **keywords)


def _method(instance: Any, name: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(instance, name)
    return method


def _file_module(path: str) -> Any:
    name = os.path.basename(path).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    sys.path.insert(0, os.path.dirname(path))  # imports beside the file work, as in a script
    spec.loader.exec_module(module)
    return module


def _limit_cpu(seconds: float) -> None:
    """Limit further CPU time, which ends an endless loop when no parent is left to kill it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _scalar(value: Any) -> Any:
    """Convert scalars of NumPy and torch to numbers."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"the result is not JSON: it contains {type(value).__module__}.{type(value).__qualname__}")


def _describe(error: BaseException) -> str:
    """Return the exception, the line of the user's code and its frames, without those of this file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    head, newline, rest = traceback.format_exception_only(error)[-1].strip().partition("\n")
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    text = "".join([head, place, newline, rest, "\n", *traceback.format_list(frames[-5:])]).strip()
    return text.encode(errors="backslashreplace").decode()  # no message can carry a lone surrogate


if __name__ == "__main__":
    main()
