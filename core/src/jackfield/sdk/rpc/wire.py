"""The wire protocol: messages, their encoding, contracts of services and identities of processes."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import socket
import struct
import typing
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs
import msgspec
import xxhash

from jackfield.clock import Clock
from jackfield.errors import JackfieldError, RpcError
from jackfield.sdk.arrays import pack, unpack

HEAD = struct.Struct(">4sI")  #: magic with the version, and the length of the message in bytes
MAGIC = b"JKR1"
LIMIT = 1 << 26  #: maximum bytes of a message
STRANGER_LIMIT = 1 << 12  #: maximum bytes before the other end has proved that it knows the secret
_SUBJECTS = ("request_id", "id", "version", "keys")  #: fields that identify the subject of an argument
_ARRAY, _NAME = 1, "array"  #: msgpack's code of a NumPy array, and its name in the packed bytes
_CAN_RUN = "RSI"  #: states of a thread that is neither stopped, frozen nor waiting for a device


@attrs.frozen(kw_only=True)
class Process:
    """The identity of a process, which differs from later processes with the same id."""

    pid: int
    host: str = attrs.field(factory=socket.gethostname)
    place: str = ""  #: processes with the same place see each other: boot and process namespace
    began: int = 0  #: ticks between the boot and its start

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the local process with an id."""
        return cls(pid=pid, place=_place(), began=_stat(f"/proc/{pid}/stat")[1])

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def is_near(self) -> bool:
        """Return whether this machine's kernel can report the state of the process."""
        return bool(self.place) and self.place == _place()

    def can_run(self) -> bool:
        """Return whether any thread of a near process can run."""
        folder = f"/proc/{self.pid}/task"
        try:
            return any(_stat(f"{folder}/{thread}/stat")[0] in _CAN_RUN for thread in os.listdir(folder))
        except OSError:  # it has ended
            return False

    def kill(self) -> bool:
        """Kill the process if it is near and still the same. Return whether it was killed."""
        state, began = _stat(f"/proc/{self.pid}/stat")
        if self.is_near and began == self.began and state not in "ZX":
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)
                return True
        return False


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux
        return ""


def _stat(file: str) -> tuple[str, int]:
    """Return the state of a process or thread and its start time, or ``X`` and 0 if there is none."""
    try:
        fields = Path(file).read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[19])


class Hello(msgspec.Struct, array_like=True, tag=1):
    """The first message of both ends of a connection, a challenge."""

    nonce: bytes


class Welcome(msgspec.Struct, array_like=True, tag=2):
    """The response to a challenge, with the identity of the sender."""

    proof: bytes  #: HMAC of both nonces
    name: str
    process: Process
    contracts: dict[str, str] = {}  #: fingerprint by service
    session: str = ""  #: the server's id of the connection; from a client: the session whose heartbeats it carries


class Call(msgspec.Struct, array_like=True, tag=3):
    """A call of ``service.method``. Id 0 asks for no reply."""

    id: int
    method: str  #: or ``next`` and ``leave``, for the iteration that the call with the id in the arguments opened
    arguments: msgspec.Raw  #: an array, in the order of the signature
    seconds: float | None = None  #: the deadline, counted from receipt


class Reply(msgspec.Struct, array_like=True, tag=4):
    """The value that a call returned, or the error that it raised."""

    id: int
    value: msgspec.Raw
    error: dict[str, Any] | None = None


class Cancel(msgspec.Struct, array_like=True, tag=5):
    """A request to cancel a call. The call still gets its reply."""

    id: int


class Heartbeat(msgspec.Struct, array_like=True, tag=6):
    """A message that shows that the process is alive."""

    news: str = ""  #: what happened to another client, for the log


class Goodbye(msgspec.Struct, array_like=True, tag=7):
    """The announcement that a connection ends on purpose."""

    reason: str = ""


Message: TypeAlias = Hello | Welcome | Call | Reply | Cancel | Heartbeat | Goodbye


class Codec:
    """An encoder of values as msgpack, or as JSON for a peer that has only the standard library.

    As msgpack, values may be NumPy arrays of numbers, too, where the type is ``Any``; they arrive read-only.

    Raises ``rpc.value`` for a value that does not consist of plain values and attrs instances or has another type.
    Exceptions of attrs validators propagate.
    """

    def __init__(self, name: Literal["msgpack", "json"] = "msgpack") -> None:
        module: Any = msgspec.msgpack if name == "msgpack" else msgspec.json
        made = lambda kind, value: Clock() if issubclass(kind, Clock) else kind(value)  # noqa: E731
        self._encoder = module.Encoder(enc_hook=_plain)
        more: Any = {"ext_hook": _array} if name == "msgpack" else {}
        self._decoder = functools.cache(lambda kind: module.Decoder(kind, dec_hook=made, **more))

    def encode(self, value: Any) -> bytes:
        """Encode a value as bytes."""
        try:
            encoded: bytes = self._encoder.encode(value)
        except (TypeError, OverflowError, ValueError, RecursionError) as error:
            raise RpcError(f"a value cannot go to another process: {error}", code="rpc.value") from error
        return encoded

    def decode(self, content: Any, kind: Any, where: str) -> Any:
        """Decode a value of type ``kind``; errors say ``where`` it came from."""
        try:
            return self._decoder(kind).decode(content)
        except JackfieldError:
            raise
        except Exception as error:  # of msgspec or of a validator
            raise RpcError(f"a value of another type came: {error}", code="rpc.value", where=where) from error


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())  # the other process has its own working directory
    if isinstance(value, Clock):
        return None  # each process has its own clock
    if type(value).__module__ == "numpy":
        return msgspec.msgpack.Ext(_ARRAY, pack({_NAME: value}))
    raise TypeError(f"it contains a {type(value).__name__}")


def _array(code: int, content: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"values of the kind {code} are not known")
    return unpack(content)[_NAME]


class Method:
    """A method that can be called remotely."""

    def __init__(self, cls: type, name: str) -> None:
        function = getattr(cls, name)
        hints, self.signature = typing.get_type_hints(function), inspect.signature(function)
        self.name, self.result = name, hints["return"]  #: the type of the result, or of an item
        self.streams = typing.get_origin(self.result) is AsyncIterator
        if self.streams:
            (self.result,) = typing.get_args(self.result)
        fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
        for each in list(self.signature.parameters.values())[1:]:
            kind = str if hints[each.name] == str | Path else hints[each.name]
            fields.append((each.name, kind) if each.default is each.empty else (each.name, kind, each.default))
        #: the type of the arguments, which travel as an array in the order of the signature
        self.arguments = msgspec.defstruct(name, fields, array_like=True, forbid_unknown_fields=True)


class Contract:
    """The methods of a class that may be called from another process."""

    def __init__(
        self,
        cls: type,
        methods: Iterable[str] | None = None,
        *,
        without: Iterable[str] = (),
        undo: Mapping[str, str] | None = None,
    ) -> None:
        """Read the signatures of the methods of ``cls``, whose annotations are the types of arguments and results.

        By default these are all public coroutine functions and generators but those of ``without``. ``undo`` has, by
        method, the method that gives back a result that arrives after its caller was cancelled.
        """
        self.undo = dict(undo or {})
        names = {name for name in dir(cls) if _is_remote(cls, name)} - set(without) if methods is None else methods
        self.methods = {name: Method(cls, name) for name in sorted(names)}
        kinds = [kind for each in self for kind in (each.arguments, each.result)]
        _, classes = msgspec.json.schema_components(kinds, schema_hook=lambda kind: {"title": kind.__name__})
        fields = {name: list(schema.get("properties", ())) for name, schema in sorted(classes.items())}
        described = [(each.name, str(each.signature)) for each in self], fields
        self.fingerprint = xxhash.xxh3_64_hexdigest(repr(described).encode())

    def __iter__(self) -> typing.Iterator[Method]:
        return iter(self.methods.values())


def subject(arguments: Iterable[Any]) -> str:
    """Return the subject of a call for error messages, such as ``train/3/0/1``."""
    for argument in arguments:
        fields = {name: getattr(argument, name) for name in _SUBJECTS if hasattr(argument, name)}
        fields = argument if isinstance(argument, dict) else fields
        found = next((fields[name] for name in _SUBJECTS if name in fields), argument)
        if isinstance(found, tuple | list) and found and isinstance(found[0], str):
            return found[0] + (f" and {len(found) - 1} more" if len(found) > 1 else "")
        if isinstance(found, str | int):
            return str(found)
    return ""


def _is_remote(cls: type, name: str) -> bool:
    function = inspect.getattr_static(cls, name)
    yields = str(getattr(function, "__annotations__", {}).get("return", "")).startswith("AsyncIterator")
    return not name.startswith("_") and (yields or inspect.iscoroutinefunction(function))
