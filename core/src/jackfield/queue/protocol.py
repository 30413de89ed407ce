"""What goes between a queue's controller and its clients in other processes: calls of the queue's own methods.

A client calls a method by name with plain values (:mod:`jackfield.wire`: msgpack, signed, no pickle); which methods
there are, and of which types their arguments and results, is read from :class:`~jackfield.queue.TransferQueue` itself,
and both ends check them. Of three sorts: what is answered once; what is iterated over, item by item as they are asked
for; and what is entered and left.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import typing
from collections.abc import AsyncIterator, Mapping, Set
from pathlib import Path
from typing import Any, Literal, cast

import attrs

from jackfield.errors import QueueError
from jackfield.files import replace_file
from jackfield.heartbeat import Process
from jackfield.queue.samplers import Sampler, SamplerSpec
from jackfield.queue.transfer_queue import TransferQueue
from jackfield.settings import structure
from jackfield.sockets import Keys
from jackfield.wire import Schema

__all__ = ["METHODS", "REPLIES", "REQUESTS", "ControllerAddress", "Method", "method", "plain"]

REQUESTS: dict[str, dict[str, Schema]] = {
    "hello": {"id": int, "name": str, "process": {object}},  #: as attrs gives it
    "call": {"id": int, "method": str, "arguments": {object}},
    "next": {"id": int, "opened": int},  #: of what is iterated over
    "leave": {"id": int, "opened": int, "broken": bool},  #: what was opened by the call of this number
    "cancel": {"id": int},  #: a call that nobody waits for any more
    "alive": {"client": bytes},  #: from a connection of its own, whatever else its process does
    "bye": {"early": bool},  #: whether work of the client is left to do
}

REPLIES: dict[str, dict[str, Schema]] = {
    "value": {"id": int, "value": object},
    "ended": {"id": int},  #: there is no next item
    "error": {"id": int, "error": {object}},
    "alive": {},
    "news": {"text": str},  #: of another client, or the store
    "gone": {"reason": str},  #: the client is none, or none any more
}

#: What of the queue another process may call: all that is not made of other methods, or the client's own.
METHODS = tuple(sorted(TransferQueue.__abstractmethods__ - {"start", "close"}))


@attrs.frozen(eq=False)
class Method:
    """One of :data:`METHODS`."""

    name: str
    sort: Literal["call", "iterator", "context"]
    signature: inspect.Signature
    arguments: type  #: an attrs class of them
    result: type  #: an attrs class with the field ``value``

    def read_arguments(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that came.

        Raises:
            QueueError: they are not what the method takes.
        """
        values: Any = structure(self.arguments, found, self.name, QueueError, finite=False)
        return {
            field.name: made.make() if isinstance(made := getattr(values, field.name), SamplerSpec) else made
            for field in attrs.fields(self.arguments)
        }

    def read_result(self, found: Any) -> Any:
        """A result, or an item, that came.

        Raises:
            QueueError: it is not what the method gives.
        """
        made: Any = structure(self.result, {"value": found}, self.name, QueueError, finite=False)
        return made.value


@functools.cache
def method(name: str) -> Method:
    """A method by name.

    Raises:
        QueueError: ``queue.invalid`` where there is none.
    """
    if name not in METHODS:
        raise QueueError("there is no such method", where=name, expected=f"one of {', '.join(METHODS)}")
    function = getattr(TransferQueue, name)
    hints = typing.get_type_hints(function)
    result = hints.pop("return")
    sort: Literal["call", "iterator", "context"] = "call"
    if typing.get_origin(result) is AsyncIterator:
        sort, (result,) = "iterator", typing.get_args(result)
    elif typing.get_origin(result) is contextlib.AbstractAsyncContextManager:
        sort, result = "context", typing.get_args(result)[0]
    if result is type(None):
        result = Literal[None]
    signature = inspect.signature(function)
    fields: dict[str, Any] = {}
    for parameter, hint in hints.items():
        default = signature.parameters[parameter].default
        kind = SamplerSpec | None if hint == Sampler | None else hint
        given: Any = attrs.NOTHING if default is inspect.Parameter.empty else default
        fields[parameter] = attrs.field(default=given, type=cast(type, kind))
    title = name.title().replace("_", "")
    return Method(
        name=name,
        sort=sort,
        signature=signature,
        arguments=attrs.make_class(f"{title}Arguments", fields, frozen=True, kw_only=True),
        result=attrs.make_class(f"{title}Result", {"value": attrs.field(type=result)}, frozen=True),
    )


def plain(value: Any) -> Any:
    """A value as lists, maps and scalars.

    Raises:
        QueueError: ``queue.invalid`` for anything else than metadata is made of.
    """
    if value is None or isinstance(value, str | int | float | bytes):
        return value
    if isinstance(value, Sampler):
        value = SamplerSpec.of(value)
    if attrs.has(type(value)):
        return {field.name: plain(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, Set):
        return sorted(map(plain, value))
    if isinstance(value, Path):
        return str(value.absolute())  # the controller has a working folder of its own
    raise QueueError(
        f"a {type(value).__name__} cannot go to the queue's controller in another process",
        expected="texts, numbers, lists, and maps from texts: metadata",
        found=repr(value)[:200],
    )


@attrs.frozen(kw_only=True)
class ControllerAddress:
    """Where a controller listens, and what its clients have to know: the file ``address.json``."""

    address: str
    secret: bytes
    keys: Keys | None  #: beyond loopback
    heartbeat_seconds: float  #: after which the one takes the other for dead
    process: Process

    def write(self, path: Path) -> None:
        """Write it, for this user's eyes only: who can read it may change the queue."""
        content = {
            **attrs.asdict(self),
            "secret": self.secret.hex(),
            "keys": None if self.keys is None else self.keys.of_clients(),
        }
        replace_file(path, json.dumps(content), mode=0o600)

    @classmethod
    def read(cls, path: Path) -> ControllerAddress:
        """
        Raises:
            QueueError: ``queue.unreachable`` where there is none, or it cannot be read.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            keys = None if content["keys"] is None else Keys(**content["keys"])
            secret, process = bytes.fromhex(content["secret"]), Process(**content["process"])
            return cls(**{**content, "secret": secret, "keys": keys, "process": process})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise QueueError(
                f"no controller of a queue is to be found: {error}",
                code="queue.unreachable",
                where=str(path),
                expected="the address.json that `jackfield queue serve` writes",
                fix="start `jackfield queue serve` first; name its file in queue.address",
            ) from error
