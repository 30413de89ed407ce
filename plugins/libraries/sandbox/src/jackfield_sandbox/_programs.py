"""What runs in a process of model-written code, and in the process of its tests. Only the standard library is needed.

The code's process never has expected values. Tests with assertions run in a process of their own, which has proxies of
what the code defines: each call is a message to the code's process, whose answers are plain values.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib
import json
import operator
import os
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jackfield_sandbox.values import CannotSend, decode, encode
from jackfield_sandbox.wire import receive, send

if TYPE_CHECKING:
    import unittest

_MODULES = ("solution", "main", "candidate")  #: names by which tests may import the code
_SPECIAL: dict[str, Callable[..., Any]] = {
    "bool": bool, "eq": operator.eq, "getattr": getattr, "getitem": operator.getitem, "isinstance": isinstance,
    "iter": iter, "len": len, "next": next, "repr": repr, "setattr": setattr, "setitem": operator.setitem, "str": str,
}  # fmt: skip


def _module(name: str, file: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__, sys.argv = file, [file]
    sys.modules[name] = module
    return module


def run_program(code: str, file: str) -> None:
    """Run code as a program, and end the process."""
    status = 0
    try:
        exec(compile(code, file, "exec"), _module("__main__", file).__dict__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    end_process(status)


def end_process(status: int) -> None:
    """Write what is left to write, and end the process."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            status = status or 1
    os._exit(status & 255)


def _load(code: str, file: str) -> dict[str, Any]:
    module = _module("solution", file)
    exec(compile(code, file, "exec"), module.__dict__)
    return module.__dict__


def _find(defined: dict[str, Any], name: str) -> Any:
    """Return a function by its name, or a method of LeetCode's class Solution."""
    if name in defined:
        return defined[name]
    if hasattr(defined.get("Solution"), name):
        return getattr(defined["Solution"](), name)
    raise NameError(f"the code does not define {name}")


def call(code: str, file: str, name: str, arguments: Any, descriptor: int) -> None:
    """Call a function of the code and write its result to a descriptor."""
    value = _find(_load(code, file), name)(*decode(arguments))
    data = json.dumps(encode(value)).encode()
    while data:
        data = data[os.write(descriptor, data) :]
    end_process(0)


def serve(code: str, file: str, channel: socket.socket) -> None:
    """Serve what the code defines to the process of the tests."""
    defined, kept = _load(code, file), []

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "name" in request:
            return {"value": encode(_find(defined, request["name"]), keep)}
        arguments = [decode(each, kept.__getitem__) for each in request["arguments"]]
        keywords = {name: decode(each, kept.__getitem__) for name, each in request["keywords"].items()}
        function = _SPECIAL[request["special"]] if request["special"] else arguments.pop(0)
        value = encode(function(*arguments, **keywords), keep)
        return {"value": value, "after": [encode(each, keep) for each in arguments]}

    modules = {name: one.__name__ for name, one in defined.items() if isinstance(one, types.ModuleType)}
    send(channel, {"names": [name for name in defined if not name.startswith("__")], "modules": modules})
    while True:
        request, _ = receive(channel)
        try:
            reply = answer(request)
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            reply = {"raised": names, "text": str(error)}
        send(channel, reply)


class _Ended(BaseException):
    """The code's process ended, or sent no answer. No test may catch it."""


class _Code:
    """The code's process, as that of the tests sees it."""

    def __init__(self, channel: socket.socket, longest: int) -> None:
        self._channel, self._longest = channel, longest
        self.broken: str | None = None  #: why there are no more answers
        self.defined = self._receive()

    def _receive(self) -> dict[str, Any]:
        try:
            message, _ = receive(self._channel, self._longest)
            if isinstance(message, dict):
                return message
            self.broken = "the code's process sent no answer"
        except (EOFError, OSError):
            self.broken = "the code raised or ended its process"
        except (ValueError, RecursionError) as error:
            self.broken = f"the code's process sent no answer: {error}"
        raise _Ended(self.broken)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request; an exception of the code is raised here."""
        if self.broken:
            raise _Ended(self.broken)
        try:
            send(self._channel, request)
        except OSError:
            self.broken = "the code ended its process"
            raise _Ended(self.broken) from None
        reply = self._receive()
        if "raised" in reply:
            self._raise(reply, ends=request.get("special") == "next")
        return reply

    def _raise(self, reply: dict[str, Any], ends: bool) -> None:
        for name in reply["raised"]:
            kind = getattr(builtins, str(name), None)
            if kind is StopIteration and not ends:  # it would end a loop of the tests without a failure
                kind = RuntimeError
            if isinstance(kind, type) and issubclass(kind, Exception):
                try:
                    error = kind(str(reply.get("text")))
                except TypeError:  # such as UnicodeDecodeError
                    error = ValueError(str(reply.get("text")))
                raise error
        self.broken = f"the code raised {reply['raised'][:1]}"
        raise _Ended(self.broken)

    def value(self, content: Any) -> Any:
        """Return a value that the code's process sent."""
        try:
            return decode(content, lambda handle: _Remote(self, handle))
        except (ValueError, RecursionError) as error:
            self.broken = f"the code's process sent no value: {error}"
            raise _Ended(self.broken) from error

    def named(self, name: str) -> Any:
        """Return what the code calls so."""
        return self.value(self.ask({"name": name}).get("value"))

    def call(self, special: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a function of the code's process; lists and the like change as there."""
        encoded = [encode(each, _handle) for each in arguments]
        named = {name: encode(each, _handle) for name, each in keywords.items()}
        reply = self.ask({"special": special, "arguments": encoded, "keywords": named})
        first = 0 if special else 1  # not the function
        sent = zip(encoded[first:], arguments[first:], reply.get("after", ()), strict=False)
        for before, mine, after in sent:
            if before != after and isinstance(mine, list | dict | set | bytearray):
                _replace(mine, self.value(after))
        return self.value(reply.get("value"))


def _replace(mine: Any, content: Any) -> None:
    if isinstance(mine, list | bytearray):
        mine[:] = content
    else:
        mine.clear()
        mine.update(content)


def _handle(value: Any) -> int:
    if isinstance(value, _Remote):
        handle: int = value._handle
        return handle
    raise CannotSend(f"a {type(value).__name__} of the tests cannot be sent to the code")


class _Remote:
    """An object of the code's process. It is equal to no plain value, whatever its class says."""

    __slots__ = ("_code", "_handle")
    __hash__ = object.__hash__

    def __init__(self, code: _Code, handle: int) -> None:
        object.__setattr__(self, "_code", code)
        object.__setattr__(self, "_handle", handle)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._code.call("", self, *arguments, **keywords)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Remote) and self._code.call("eq", self, other) is True

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, _Remote) and self._code.call("isinstance", instance, self) is True

    def __getattr__(self, name: str) -> Any:
        return self._code.call("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._code.call("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._code.call("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._code.call("setitem", self, key, value)

    def __bool__(self) -> bool:
        return bool(self._code.call("bool", self))

    def __iter__(self) -> Any:
        return self._code.call("iter", self)

    def __next__(self) -> Any:
        return self._code.call("next", self)

    def __len__(self) -> int:
        return int(self._code.call("len", self))

    def __str__(self) -> str:
        return str(self._code.call("str", self))

    def __repr__(self) -> str:
        return str(self._code.call("repr", self))


def judge(tests: socket.socket, channel: socket.socket, longest: int) -> None:
    """Receive a test, run it against the code's process, and send the verdict."""
    test, _ = receive(tests)
    reason, is_broken, code = "", False, None
    try:
        code = _Code(channel, longest)
        _run_test(test, code)
    except CannotSend as error:
        reason, is_broken = str(error), True
    except BaseException as error:
        reason = _reason(error, test["source"])
    reason = reason or (code.broken if code and code.broken else "")
    send(tests, {"passed": not reason, "reason": reason, "is_broken": is_broken})
    end_process(0)


def _names(code: _Code) -> dict[str, Any]:
    """Return what the code defines by its names; those of built-ins and of the standard library mean what they do."""
    space: dict[str, Any] = {}
    for name in map(str, code.defined["names"]):
        module = name if name in sys.stdlib_module_names else code.defined["modules"].get(name)
        if module in sys.stdlib_module_names:
            space[name] = importlib.import_module(module)
        elif module is None and not hasattr(builtins, name):
            space[name] = code.named(name)
    return space


def _run_test(test: dict[str, Any], code: _Code) -> None:
    space = _names(code)
    for name in _MODULES:
        _module(name, "tests.py").__dict__.update(space)
    if test["entry"]:
        space["candidate"] = code.named(test["entry"])
        space.setdefault(test["entry"], space["candidate"])
    space["__name__"] = "tests"
    exec(compile(test["source"], "tests.py", "exec"), space)
    kind, _, name = test["call"].partition(".")
    if name:
        _run_case(space[kind](name))
    elif kind:
        space[kind](*([space["candidate"]] if kind == "check" else []))


def _run_case(case: unittest.TestCase) -> None:
    import unittest  # here, because it takes as long as the rest

    result = unittest.TestResult()
    case.run(result)
    for _, text in (*result.failures, *result.errors):
        raise AssertionError(text.strip().splitlines()[-1])


def _reason(error: BaseException, source: str) -> str:
    text = traceback.format_exception_only(error)[-1].strip() if not isinstance(error, _Ended) else str(error)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "tests.py"]
    with contextlib.suppress(IndexError, TypeError):
        return f"{source.splitlines()[lines[-1] - 1].strip()}: {text}"  # type: ignore[operator]
    return text
