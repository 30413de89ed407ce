"""What a worker process does: it loads the user's code and calls it. It needs only the standard library."""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import resource
import socket
import struct
import sys
import sysconfig
import traceback
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from jackfield_user_code import _digest, _frames, _tree

_LIBRARIES = ("<frozen ", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
_OWN_FILES = os.path.dirname(__file__) + os.sep
_REQUEST_BYTES = 2**31  #: a message from the trusted end
_MOST_CHILDREN = 64  #: processes that calls may leave behind before their worker is replaced
#: the id of the call that runs, or the negative id of the one that ran last, in memory that is shared with the parent
NOTE = struct.Struct("q")

_CALL = "__call__"

Functions = dict[str, Callable[..., Any]]


class Found:
    """The user's code after its import: what the target names, its module, and the module that adapts it."""

    def __init__(self, request: dict[str, Any]) -> None:
        sys.path.extend(path for path in request["sys_path"] if path not in sys.path)
        place, _, name = request["target"].rpartition(":")
        if place.startswith("@"):  # @GROUP:NAME
            self.target: Any = _entry_point(place[1:], name)
            self.module: Any = sys.modules.get(getattr(self.target, "__module__", ""))
        else:
            self.module = self.target = _file_module(place) if place.endswith(".py") else importlib.import_module(place)
            for part in name.split("."):
                self.target = _attribute(self.target, part)
        adapter = request["adapter"]
        self.adapter = None if adapter is None else _file_module(adapter, alone=True)

    def make(self, request: dict[str, Any]) -> tuple[Functions, dict[str, Any]]:
        """Return the functions that can be called, by name, and what there is to say about them."""
        if self.adapter is not None:
            functions, about = self.adapter.adapt(self.target, self.module, request)
        else:
            functions, about = {"call": _function(self.target, request)}, {}
        is_any_async = any(map(is_async, functions.values()))
        about |= {"functions": sorted(functions), "async": is_any_async}
        return functions, {**about, "digest": _digest.digest(self.module)}


def _function(found: Any, request: dict[str, Any]) -> Callable[..., Any]:
    keywords, method = request["keywords"], request["method"]
    if inspect.isclass(found):
        made: Callable[..., Any] = getattr(found(**keywords), method)
        return made
    if not inspect.isroutine(found) and hasattr(found, method):
        found = getattr(found, method)
    return functools.partial(found, **keywords)


def is_async(function: Any) -> bool:
    """Return whether calls of a function are coroutines, as far as its definition tells."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, _CALL, None))


def _entry_point(group: str, name: str) -> Any:
    there = importlib.metadata.entry_points(group=group)
    found = [each for each in there if each.name == name]
    if not found:
        raise LookupError(
            f"no installed package has an entry point {name!r} in {group!r}; there are {sorted(there.names)}"
        )
    return found[0].load()


def _attribute(place: Any, name: str) -> Any:
    if hasattr(place, name):
        return getattr(place, name)
    own = [each for each, value in vars(place).items() if callable(value) and not each.startswith("_")]
    own = [each for each in own if getattr(vars(place)[each], "__module__", None) == place.__name__] or own
    raise AttributeError(
        f"{place.__name__} has no {name!r}; it has {', '.join(own[:20]) or 'nothing that can be called'}"
    )


class _Source(importlib.machinery.SourceFileLoader):
    """Compiles a file as it is now: bytecode that is kept may be of another version of the same second and size."""

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)


def _file_module(path: str, alone: bool = False) -> Any:
    name = os.path.basename(path).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path, loader=_Source(name, path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if not alone:
        sys.modules.setdefault(name, module)
        sys.path.insert(0, os.path.dirname(path))  # imports beside the file work, as in a script
    spec.loader.exec_module(module)
    return module


def serve(channel: socket.socket, found: Found | None, request: dict[str, Any], note: Any) -> None:
    """Answer calls until the other end closes. Without ``found`` the code is imported here."""
    os.register_at_fork(after_in_child=functools.partial(_let_go, channel.fileno()))
    try:
        functions, about = (found or Found(request)).make(request)
        answer = json.dumps([0, "ok", about], default=_scalar)
    except BaseException as error:  # SystemExit is the user's code's, too
        answer = json.dumps([0, "failed", getattr(error, "refusal", None) or describe(error)])
        functions, about = {}, {"async": False}
    channel.sendall(_frames.packed(f"[{answer}]"))
    if about["async"]:
        asyncio.run(_serve_many(channel, functions, note))
    else:
        _serve_one_by_one(channel, functions, note)


def _serve_one_by_one(channel: socket.socket, functions: Functions, note: Any) -> None:
    serving, reader, runner = os.getpid(), _frames.Reader(_REQUEST_BYTES), asyncio.Runner()
    while data := channel.recv(1 << 18):
        for calls in reader.feed(data):
            for id, name, arguments, cpu_seconds in calls:
                NOTE.pack_into(note, 0, id)
                try:
                    _limit_cpu(cpu_seconds)
                    value = functions[name](**arguments)
                    if inspect.isawaitable(value):
                        value = runner.run(_wait(value))
                    answer = json.dumps([id, "ok", value], default=_scalar)
                except BaseException as error:
                    answer = json.dumps([id, "failed", describe(error)])
                if os.getpid() != serving:  # a fork of the user's code that returned to here
                    os._exit(0)
                NOTE.pack_into(note, 0, 0)
                channel.sendall(
                    _frames.packed(f"[{answer}]" if not _leaves_many() else f'[{answer},[0,"retire",null]]')
                )


def _leaves_many() -> bool:
    """Return whether calls have left so many processes behind that this one should be replaced."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it has no children, mostly
        return False
    return len(_tree.children(os.getpid())) > _MOST_CHILDREN


async def _wait(value: Any) -> Any:
    return await value


async def _serve_many(channel: socket.socket, functions: Functions, note: Any) -> None:
    loop = asyncio.get_running_loop()
    serving = _Serving(functions, note, loop)
    channel.setblocking(False)
    await loop.create_connection(lambda: serving, sock=channel)
    await serving.ended


class _Noted(Coroutine[Any, Any, str]):
    """A call whose id is noted while it runs, which tells the parent who blocks the event loop."""

    def __init__(self, call: Coroutine[Any, Any, str], id: int, note: Any, process: int, channel: int) -> None:
        self._call, self._id, self._note, self._process, self._channel = call, id, note, process, channel

    def send(self, value: Any) -> Any:
        """Run the call until it waits."""
        NOTE.pack_into(self._note, 0, self._id)
        try:
            return self._call.send(value)
        finally:
            self._stopped()

    def throw(self, *error: Any) -> Any:
        """Run the call with an exception until it waits."""
        NOTE.pack_into(self._note, 0, self._id)
        try:
            return self._call.throw(*error)
        finally:
            self._stopped()

    def _stopped(self) -> None:
        if os.getpid() != self._process:  # a fork of the user's code that returned to here
            os._exit(0)
        try:
            os.fstat(self._channel)
        except OSError:  # the user's code has closed it: nothing works any more, and this call is why
            os._exit(1)
        NOTE.pack_into(self._note, 0, -self._id)

    def close(self) -> None:
        """End the call."""
        self._call.close()

    def __await__(self) -> Generator[Any, Any, str]:
        raise NotImplementedError


class _Serving(asyncio.Protocol):
    """The calls of a process that makes many at a time, and the connection that they come from."""

    def __init__(self, functions: Functions, note: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._functions, self._note, self._loop, self._process = functions, note, loop, os.getpid()
        self._reader = _frames.Reader(_REQUEST_BYTES)
        self._tasks: dict[int, asyncio.Task[str]] = {}
        self._answers: list[str] = []
        self.ended: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport: Any = transport
        self._channel = transport.get_extra_info("socket").fileno()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the process, whatever the user's code still does."""
        os._exit(0)

    def data_received(self, data: bytes) -> None:
        """Begin calls, or cancel them."""
        for calls in self._reader.feed(data):
            for id, name, arguments, _ in calls:
                if name is None:
                    self._cancel(id)
                    continue
                call = _Noted(self._call(id, name, arguments), id, self._note, self._process, self._channel)
                task = self._tasks[id] = self._loop.create_task(call)
                task.add_done_callback(functools.partial(self._done, id))

    async def _call(self, id: int, name: str, arguments: dict[str, Any]) -> str:
        try:
            value = self._functions[name](**arguments)
            if inspect.isawaitable(value):
                value = await value
            return json.dumps([id, "ok", value], default=_scalar)
        except asyncio.CancelledError as error:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            return json.dumps([id, "failed", describe(error)])  # the user's code has cancelled itself
        except BaseException as error:
            return json.dumps([id, "failed", describe(error)])

    def _cancel(self, id: int) -> None:
        if id in self._tasks:
            self._tasks[id].cancel()
            self._answer(f'[{id},"cancelling",null]')

    def _done(self, id: int, task: asyncio.Task[str]) -> None:
        del self._tasks[id]
        self._answer(f'[{id},"cancelled",null]' if task.cancelled() else task.result())

    def _answer(self, answer: str) -> None:
        """Send an answer, together with others of the same turn of the event loop."""
        if not self._answers:
            self._loop.call_soon(self._flush)
        self._answers.append(answer)

    def _flush(self) -> None:
        answers, self._answers = self._answers, []
        self._transport.write(_frames.packed(f"[{','.join(answers)}]"))


def _let_go(*descriptors: int) -> None:
    """Redirect descriptors, so that a fork neither takes nor answers requests."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _limit_cpu(seconds: float | None) -> None:
    """Limit further CPU time, which ends an endless loop when no parent is left to kill it."""
    if seconds is None:
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _scalar(value: Any) -> Any:
    """Convert scalars of NumPy and torch to numbers."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    if inspect.iscoroutine(value):
        value.close()
    raise TypeError(f"the result is not JSON: it contains {type(value).__module__}.{type(value).__qualname__}")


def describe(error: BaseException) -> str:
    """Return the exception, the line of the user's code and its frames, without those of this package."""
    if isinstance(error, MemoryError):
        traceback.clear_frames(error.__traceback__)  # which may hold the memory
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_OWN_FILES)]
    head, newline, rest = traceback.format_exception_only(error)[-1].strip().partition("\n")
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    text = "".join([head, place, newline, rest, "\n", *traceback.format_list(frames[-5:])]).strip()
    return text.encode(errors="backslashreplace").decode()  # no message can carry a lone surrogate
