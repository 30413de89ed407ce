"""The program of a worker process: loads one function and calls it, one JSON line at a time.

Run by its path, not as a module of a package, and with nothing but the standard library, so that it starts fast and
in any interpreter. Standard output belongs to the user's code and goes where standard error goes; answers travel on a
descriptor that the user's code does not know and its forks do not have. A request is ``ID JSON``, and so is its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
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
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from typing import Any

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_LIBRARIES = ("<frozen ", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


def main() -> None:
    """Serve until standard input ends."""
    _die_with_parent(int(sys.argv[1]))
    heartbeat = int(sys.argv[2])
    _beat(heartbeat, float(sys.argv[3]))
    for folder in sys.argv[4:]:
        sys.pycache_prefix, sys.dont_write_bytecode = folder, False
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.register_at_fork(after_in_child=functools.partial(_let_go, requests.fileno(), answers.fileno(), heartbeat))
    serving = os.getpid()
    with asyncio.Runner() as runner:
        function: Callable[..., Any] | None = None
        for line in requests:
            id, _, text = line.partition(b" ")
            request = json.loads(text)
            try:
                if function is None:
                    function = _load(request)
                    value = None
                else:
                    _limit_cpu(request["cpu_seconds"])
                    value = function(**request["arguments"])
                    if inspect.isawaitable(value):
                        value = runner.run(_wait(value))
                answer = json.dumps({"value": value}, default=_scalar)
            except BaseException as error:  # SystemExit is the user's code's, too
                answer = json.dumps({"error": _describe(error)})
            if os.getpid() != serving:  # a fork that the user's code has made, and that came back here
                os._exit(0)
            answers.write(b"%b %b\n" % (id, answer.encode()))
            answers.flush()


def _let_go(*descriptors: int) -> None:
    """Point descriptors elsewhere: a fork neither takes requests nor answers them."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)


async def _wait(value: Any) -> Any:
    return await value


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before
        os._exit(1)


def _beat(descriptor: int, seconds: float) -> None:
    """Have a thread say that this process lives, now and then: see ``jackfield.heartbeat``."""
    os.set_inheritable(descriptor, False)
    os.set_blocking(descriptor, False)

    def live() -> None:
        pause = threading.Event()
        with contextlib.suppress(BrokenPipeError):
            while True:
                with contextlib.suppress(BlockingIOError):  # the parent does not look at the moment
                    os.write(descriptor, b".")
                pause.wait(seconds)

    threading.Thread(target=live, name="jackfield-heartbeat", daemon=True).start()


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
    sys.path.insert(0, os.path.dirname(path))  # the file's neighbours, as when it is run as a script
    spec.loader.exec_module(module)
    return module


def _limit_cpu(seconds: float) -> None:
    """Let this process use so much more CPU time: the end of an endless loop when nobody is left to kill it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _scalar(value: Any) -> Any:
    """NumPy's and torch's scalars are numbers to their users."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"the result is not JSON: it contains {type(value).__module__}.{type(value).__qualname__}")


def _describe(error: BaseException) -> str:
    """The exception and the line of the user's code, then the frames; those of this file say nothing."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    head, newline, rest = traceback.format_exception_only(error)[-1].strip().partition("\n")
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return "".join([head, place, newline, rest, "\n", *traceback.format_list(frames[-5:])]).strip()


if __name__ == "__main__":
    main()
