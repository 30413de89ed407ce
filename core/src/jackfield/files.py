"""Atomic replacement of files, atomic appends, and digests that detect damage.

``seal('{"step": 3}')`` is ``{"step": 3, "digest": "…"}``. The digest is the xxh3_128 of the original text in 32
hexadecimal digits. In a chain each digest also covers the digest of the previous text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

_KEY = ', "digest": "'


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[Path]:
    """Yield an empty file to write to, which atomically replaces ``path`` at the end of the block.

    If the block or the replacement fails, the file at ``path`` is unchanged. Missing folders are created. The umask
    applies to ``mode``; ``durable`` syncs the contents to the disk before the replacement.
    """
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


def seal(text: str, after: str = "") -> str:
    """Add a digest as the last entry of a non-empty JSON object. ``after`` is the previous digest of a chain."""
    return f'{text[:-1]}{_KEY}{xxhash.xxh3_128_hexdigest((after + text).encode())}"}}'


def unseal(content: bytes, after: str = "") -> dict[str, Any]:
    """Return a sealed object without its digest. Raise a ``ValueError`` if the digest does not match."""
    text = content.decode()
    body = text.rpartition(_KEY)[0] + "}"
    if text != seal(body, after):
        raise ValueError("the contents are not those that were written: their digest is another one")
    found: dict[str, Any] = json.loads(body)
    return found
