"""Atomic replacement of files, atomic appends, files of JSON lines, and digests that detect damage.

``seal('{"step": 3}')`` is ``{"step": 3, "digest": "…"}``. The digest is the xxh3_128 of the original text in 32
hexadecimal digits.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import numbers
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

_KEY = ', "digest": "'


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[Path]:
    """Yield an empty file to write to, which atomically replaces ``path`` at the end of the block.

    If the block or the replacement fails, the file at ``path`` is unchanged. Missing folders are created. The umask
    applies to ``mode``; ``durable`` syncs the contents first. A device, pipe or folder raises ``FileExistsError``.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "this is no regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.unlink(missing_ok=True)
        partial.touch(mode, exist_ok=False)
        yield partial
        if durable:
            sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes | str, *, mode: int = 0o666, durable: bool = True) -> None:
    """Replace the file at ``path`` atomically. Readers see the old or the new file; see :func:`replacing`."""
    with replacing(path, mode=mode, durable=durable) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


class AppendFile:
    """A file with atomic appends: each is complete or absent, even after a kill or on a full disk.

    ``tail`` ends the file after every append (the bracket that closes a JSON array). A file that is not empty must
    already end with it; a missing file is created.
    """

    def __init__(self, path: Path, tail: bytes = b"") -> None:
        path.touch()
        # Unbuffered: one append is one system call, so that a kill cannot leave a partial append.
        self._file = path.open("r+b", buffering=0)
        self._tail = tail
        self._end = max(path.stat().st_size - len(tail), 0)

    def append(self, data: bytes) -> None:
        """Write ``data`` at the end. If that raises an ``OSError``, the file is unchanged."""
        try:
            self._write(data + self._tail)
        except BaseException:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
                self._write(self._tail)
            raise
        self._end += len(data)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        self._file.seek(self._end)
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]


def sync(path: Path) -> None:
    """Sync a file's contents or a folder's names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync everything in a folder to the disk, the contents of each folder before its names."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)


def digest_of(path: Path) -> str:
    """Return the xxh3_128 of a file's contents in 32 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def seal(text: str) -> str:
    """Add a digest as the last entry of a non-empty JSON object."""
    return f'{text[:-1]}{_KEY}{xxhash.xxh3_128_hexdigest(text.encode())}"}}'


def unseal(content: bytes) -> dict[str, Any]:
    """Return a sealed object without its digest. Raise a ``ValueError`` if the digest does not match."""
    text = content.decode()
    body = text.rpartition(_KEY)[0] + "}"
    if text != seal(body):
        raise ValueError("the contents are not those that were written: their digest is another one")
    found: dict[str, Any] = json.loads(body)
    return found


# JSON allows these characters inside a string, but some readers end a line at them.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def plain_number(value: Any) -> float | int:
    """Return a number of any library as a Python number."""
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def encode_line(line: Mapping[str, Any]) -> bytes:
    """Encode one line of strict JSON in UTF-8.

    A number that is not finite becomes null, and its path is added to the list ``not_finite``. Other types become text.
    """
    not_finite: list[str] = []
    plain = _strict(line, not_finite) | ({"not_finite": not_finite} if not_finite else {})
    text = json.dumps(plain, ensure_ascii=False).translate(_LINE_ENDS)
    return text.encode("utf-8", errors="backslashreplace") + b"\n"  # a lone surrogate becomes its JSON escape


def _strict(value: Any, not_finite: list[str], path: str = "") -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Real):
        if math.isfinite(value):
            return plain_number(value)
        not_finite.append(path)
        return None
    if isinstance(value, Mapping):
        return {str(key): _strict(item, not_finite, f"{path}.{key}".lstrip(".")) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_strict(item, not_finite, f"{path}[{index}]") for index, item in enumerate(value)]
    return str(value)


def read_lines(path: Path, last_step: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file up to ``last_step``.

    A missing file yields nothing. Incomplete lines, from a kill or another program, are skipped.
    """
    if path.exists():
        with path.open("rb") as file:
            for line in map(_line, file):
                if line is not None and (last_step is None or line.get("step", 0) <= last_step):
                    yield line


def _line(raw: bytes) -> dict[str, Any] | None:
    """Parse a line; return None if it is not a JSON object."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def cut_after(path: Path, last_step: int) -> None:
    """Atomically drop the lines after ``last_step``, and incomplete ones, from a file.

    A run that starts at step 0 has restored nothing and keeps nothing. A warning counts complete lines that are not
    JSON objects, because a kill does not produce these.
    """
    if last_step <= 0:
        path.unlink(missing_ok=True)
    elif path.exists():
        damaged = 0
        with replacing(path) as partial, path.open("rb") as old, partial.open("wb") as new:
            for raw in old:
                line = _line(raw)
                damaged += line is None and raw.endswith(b"\n")
                if line is not None and line.get("step", 0) <= last_step:
                    new.write(raw.rstrip(b"\n") + b"\n")
        if damaged:
            logging.getLogger("jackfield").warning("%s: %d damaged lines are left out", path, damaged)
