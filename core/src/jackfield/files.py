"""Files that stay whole: replacement in one move, appends that are whole or absent, and digests that show damage.

``seal('{"step": 3}')`` is ``{"step": 3, "digest": "…"}``: 32 hexadecimal digits, the xxh3_128 of the text before. In a
chain each text's digest also covers the digest of the text before it.
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
    """Yield an empty file to write to, which takes the place of ``path`` in one move at the end.

    Where the block or the move fails, the file at ``path`` is as before. Missing folders are made. ``mode`` is less the
    process's umask; ``durable`` brings the contents to the disk before the move.
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
    """Replace the file at ``path`` in one move; readers see the old or the new one. See :func:`replacing`."""
    with replacing(path, mode=mode, durable=durable) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


class AppendFile:
    """An append-only file in which each append is whole or absent, also when the process is killed or a disk fills.

    Args:
        path: opened at its end; made when it does not exist.
        tail: bytes that end the file after every append (the bracket that closes a JSON array). A file that is not
            empty must end with them already.
    """

    def __init__(self, path: Path, tail: bytes = b"") -> None:
        path.touch()
        # Unbuffered: one append is one write of the operating system, so that a kill leaves none half done.
        self._file = path.open("r+b", buffering=0)
        self._tail = tail
        self._end = max(path.stat().st_size - len(tail), 0)

    def append(self, data: bytes) -> None:
        """Write ``data`` at the end; when that raises an ``OSError`` the file is as before."""
        try:
            self._write(data + self._tail)
        except BaseException:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
                self._write(self._tail)
            raise
        self._end += len(data)

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        self._file.seek(self._end)
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]


def sync(path: Path) -> None:
    """Bring a file's contents, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Bring everything in the folder to the disk, the contents of each folder before its own names."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)


def digest_of(path: Path) -> str:
    """Compute the xxh3_128 of a file's contents: 32 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def seal(text: str, after: str = "") -> str:
    """Add the digest of a non-empty JSON object's text as its last entry, ``after`` the digest before it in a chain."""
    return f'{text[:-1]}{_KEY}{xxhash.xxh3_128_hexdigest((after + text).encode())}"}}'


def unseal(content: bytes, after: str = "") -> dict[str, Any]:
    """Read the object that was sealed, without its digest; a ``ValueError``: the contents are others."""
    text = content.decode()
    body = text.rpartition(_KEY)[0] + "}"
    if text != seal(body, after):
        raise ValueError("the contents are not those that were written: their digest is another one")
    found: dict[str, Any] = json.loads(body)
    return found
