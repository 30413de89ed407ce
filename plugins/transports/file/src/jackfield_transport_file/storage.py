"""The folder of weights: a folder per transfer, a marker of the newest complete one, and a file per party.

``LATEST.json`` names the newest, ``TRANSFER/index.json`` lists its tensors in their order,
``TRANSFER/weights-*.safetensors`` hold them. Marker and index are replaced by renaming, so a reader sees the
old one or the new one. Only its party appends to a party's file, and keeps it locked while it lives, so the released
lock shows that a process was killed. On a file system whose locks do not work between machines, the deadline shows it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, WeightsError
from jackfield.sdk import replace_file
from jackfield.sdk.buckets import digest

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Convert errors of the file system to ``WeightsError`` (``weights.storage``)."""
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


@attrs.define(eq=False)
class Other:
    """Another party, and its messages so far."""

    name: str  #: as errors call it
    path: Path
    said: dict[str, Any] = attrs.field(factory=dict)  #: the last value of each thing
    broken: str | None = None  #: why it sends no more
    _read: int = 0  #: bytes of its file

    def look(self) -> None:
        """Read new messages. A party that said ``done`` may leave."""
        there = self.path.exists()
        left = there and abandoned(self.path)  # before reading: its last message counts
        if there:
            with self.path.open("rb") as file:
                file.seek(self._read)
                content = file.read()
            lines = content[: content.rfind(b"\n") + 1]
            self._read += len(lines)
            for line in lines.splitlines():
                self.said.update(json.loads(line))
        if self.said.get("broken"):
            self.broken = self.said["broken"]
        elif (left or (self.said and not there)) and not self.said.get("done"):
            self.broken = "died or was cut off"


class Parties:
    """This party, and the others that it watches."""

    def __init__(self, own: Path, seconds: float, poll_seconds: float) -> None:
        """Create this party's file, with a deadline in ``seconds``; ``WeightsError`` if another process has it."""
        self.others: list[Other] = []
        self._clock = Clock()
        self._seconds = seconds
        self._ends = self._clock.time() + seconds
        self._poll_seconds = poll_seconds
        self._folder = own.parent
        if own.exists():
            raise WeightsError(f"{own.name} takes part already", where=str(own))
        with guarded(self._folder):
            partial = own.with_name(f".{own.name}.{secrets.token_hex(4)}")
            self._file = partial.open("xb", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            partial.rename(own)  # only now: nobody may find it without its lock

    def restart(self) -> None:
        """Restart the deadline now."""
        self._ends = self._clock.time() + self._seconds

    def tell(self, message: Mapping[str, Any]) -> None:
        """Write a message for the others."""
        with guarded(self._folder):
            self._file.write(json.dumps(dict(message)).encode() + b"\n")

    def look(self) -> None:
        """Read the others' messages; ``WeightsError`` if one of them broke off."""
        with guarded(self._folder):
            for other in self.others:
                other.look()
        broken = [f"{other.name} {other.broken}" for other in self.others if other.broken is not None]
        if broken:
            raise WeightsError("; ".join(broken))

    async def until(self, ready: Callable[[Other], bool], what: str) -> None:
        """Wait until all others are ``ready`` to do ``what``; errors name a party that is late or broke off."""
        while True:
            self.look()
            late = [other.name for other in self.others if not ready(other)]
            if not late:
                return
            if self._clock.time() >= self._ends:
                raise DeadlineExceeded(
                    f"waited {self._seconds:g} s for {' and '.join(late)} to {what}, in a weight transfer",
                    fix="look at why the peer did not answer, or raise the deadline of the sync",
                )
            await self._clock.sleep(min(self._poll_seconds, max(self._ends - self._clock.time(), 0.0)))

    def close(self, broken: str | None = None) -> None:
        """Leave; ``broken`` is the reason if the transfer has not ended."""
        try:
            if broken is not None and not self._file.closed:
                self.tell({"broken": broken})
        finally:
            self._file.close()


def abandoned(path: Path) -> bool:
    """Return whether no process holds an existing file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it is locked or gone, or there are no locks here
        return False
    return True


MARKER = "LATEST.json"
INDEX = "index.json"
SENDER = "sender"


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    """Write tensors to a file; return their entries ``[name, digest]`` in order."""
    entries = [[name, digest(tensor)] for name, tensor in tensors.items()]
    with guarded(path.parent):
        save_file(dict(tensors), path)
    return entries


def read_shard(path: Path, entries: Sequence[Sequence[Any]]) -> list[tuple[str, torch.Tensor]]:
    """Read the tensors of a file in order; ``weights.digest`` for one that has changed."""
    found = []
    with guarded(path.parent), safe_open(path, framework="pt") as file:
        for name, wanted in entries:
            tensor = file.get_tensor(name)
            have = digest(tensor)
            if have != wanted:
                raise WeightsError(
                    f"tensor {name!r} is not what was written",
                    code="weights.digest",
                    where=str(path),
                    expected=wanted,
                    found=have,
                )
            found.append((name, tensor))
    return found


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a small file; None if there is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return found


def publish(transfer: Path, version: int, shards: Sequence[Sequence[Any]]) -> None:
    """Mark a transfer as complete and the newest."""
    with guarded(transfer.parent):
        index, newest = {"version": version, "shards": list(shards)}, {"version": version, "transfer": transfer.name}
        replace_file(transfer / INDEX, json.dumps(index), durable=False)
        replace_file(transfer.parent / MARKER, json.dumps(newest), durable=False)


def clean(folder: Path, keep: int) -> None:
    """Remove transfers that are not in use: all but the newest whole ones."""
    marked = (read_json(folder / MARKER) or {}).get("transfer")
    whole: list[Path] = []
    broken: list[Path] = []
    for transfer in folder.iterdir():
        if transfer.is_dir() and transfer.name != marked and abandoned(transfer / SENDER):
            (whole if (transfer / INDEX).exists() else broken).append(transfer)
    whole.sort(key=lambda transfer: (transfer / INDEX).stat().st_mtime, reverse=True)
    for transfer in (*broken, *whole[keep - 1 if marked else keep :]):
        with contextlib.suppress(OSError), _alone(transfer):
            shutil.rmtree(transfer)


@contextlib.contextmanager
def _alone(transfer: Path) -> Iterator[None]:
    """Lock the transfer while no process reads it; ``BlockingIOError`` if one does."""
    if not (transfer / INDEX).exists():
        yield
        return
    with (transfer / INDEX).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
