"""Leaves out rows whose text came before: the same text, or nearly the same."""

from __future__ import annotations

import sqlite3
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import xxhash
from attrs.validators import ge, gt, le
from datasketch import MinHash, MinHashLSH

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, OperatorType
from jackfield.sdk import option
from jackfield_operator_basic.texts import text_of

_COLUMN = "column with the text"
_SCHEME = "affine32"  #: the hash functions of signatures, which are numbers of 32 bits


@attrs.frozen(kw_only=True)
class ExactConfig:
    """Settings of ``exact_duplicates``."""

    column: str = option("prompt", _COLUMN)
    normalise: bool = option(True, "compare without case, accents, punctuation and repeated spaces")


@attrs.frozen(kw_only=True)
class NearConfig:
    """Settings of ``near_duplicates``."""

    column: str = option("prompt", _COLUMN)
    similarity: float = option(
        0.8, "Jaccard similarity of two texts' shingles from which they are duplicates", [gt(0.0), le(1.0)]
    )
    shingle: int = option(5, "words of a shingle; shorter texts are one", gt(0))
    hashes: int = option(128, "hashes of a text: more make the similarity more exact, and cost more", ge(16))


class _Seen:
    """A table of texts by hash, in memory or in a file, of which a later part can be forgotten again."""

    def __init__(self, folder: Path | None) -> None:
        self._table = sqlite3.connect(":memory:" if folder is None else folder / "seen.sqlite", isolation_level=None)
        self._table.execute("PRAGMA synchronous = OFF")
        self._table.execute("CREATE TABLE IF NOT EXISTS seen (hash BLOB PRIMARY KEY, row TEXT, number INTEGER)")
        self._table.execute("BEGIN")

    def forget_from(self, number: int) -> None:
        """Forget the rows from a number on."""
        self._table.execute("DELETE FROM seen WHERE number >= ?", (number,))

    def find(self, hashes: Sequence[bytes]) -> dict[bytes, str]:
        """Return the rows with some hashes."""
        found = dict[bytes, str]()
        for start in range(0, len(hashes), 500):
            part = hashes[start : start + 500]
            marks = ",".join("?" * len(part))
            found.update(self._table.execute(f"SELECT hash, row FROM seen WHERE hash IN ({marks})", part))
        return found

    def all(self) -> list[tuple[bytes, str]]:
        """Return all hashes with their rows."""
        return list(self._table.execute("SELECT hash, row FROM seen ORDER BY number"))

    def add(self, rows: Sequence[tuple[bytes, str, int]]) -> None:
        """Remember rows."""
        self._table.executemany("INSERT OR IGNORE INTO seen VALUES (?, ?, ?)", rows)

    def commit(self) -> None:
        """Write what was added."""
        self._table.execute("COMMIT")
        self._table.execute("BEGIN")

    def close(self) -> None:
        """Close the table."""
        self._table.execute("COMMIT")
        self._table.close()


class _Duplicates(Operator):
    """Both kinds: a row is removed if a hash of its text is that of an earlier row."""

    type: ClassVar[OperatorType] = "deduplicator"

    def __init__(self, config: Any, context: OperatorContext) -> None:
        super().__init__(config, context)
        self._column, self._read = context.column(config.column), 0
        self._seen: _Seen | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the column with the text."""
        return (self._column,)

    @property
    def writes(self) -> tuple[str, ...]:
        """Return no column."""
        return ()

    async def start(self) -> None:
        """Open the table of what has come before."""
        self._seen = _Seen(self.context.folder)
        self._seen.forget_from(self._read)

    async def close(self) -> None:
        """Close the table."""
        if self._seen is not None:
            self._seen.close()
            self._seen = None

    def state(self) -> int:
        """Return how many rows were read; what they are is in the table."""
        if self._seen is not None:
            self._seen.commit()
        return self._read

    def restore(self, state: Any) -> None:
        """Forget what was read after the state was saved."""
        self._read = int(state)
        if self._seen is not None:
            self._seen.forget_from(self._read)


class ExactDuplicates(_Duplicates):
    """Removes rows whose text an earlier row has."""

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Look texts up by their 128-bit hashes."""
        assert self._seen is not None, "it was started"
        texts, aside = _texts(request, self._column)
        normalised = {key: normal(text) if self.config.normalise else text for key, text in texts.items()}
        hashes = {key: xxhash.xxh3_128_digest(text.encode()) for key, text in normalised.items()}
        known, removed, fresh = self._seen.find(list(hashes.values())), dict[str, str](), list[tuple[bytes, str, int]]()
        for number, row in enumerate(request.rows, self._read):
            if (own := hashes.get(row.key)) is None:
                continue
            if (first := known.setdefault(own, row.key)) is not row.key:
                removed[row.key] = f"the same as {first}"
            else:
                fresh.append((own, row.key, number))
        self._seen.add(fresh)
        self._read += len(request.rows)
        return OperatorResult(removed=removed, set_aside=aside)


class NearDuplicates(_Duplicates):
    """Removes rows whose text is nearly that of an earlier row: MinHash with an index of bands, both of datasketch."""

    def __init__(self, config: NearConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        self._index = MinHashLSH(threshold=config.similarity, num_perm=config.hashes)
        self._signatures = dict[str, MinHash]()

    async def start(self) -> None:
        """Open the table, and build the index of what has come before."""
        await super().start()
        assert self._seen is not None, "it was started"
        for signature, row in self._seen.all():
            self._add(
                row,
                MinHash(
                    self.config.hashes,
                    self.context.seed,
                    scheme=_SCHEME,
                    hashvalues=np.frombuffer(signature, np.uint32),
                ),
            )

    def _add(self, row: str, made: MinHash) -> None:
        self._index.insert(row, made)
        self._signatures[row] = made

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Compare each text with those that share a band of hashes."""
        assert self._seen is not None, "it was started"
        texts, aside = _texts(request, self._column)
        shingles = [_shingles(text, self.config.shingle) for text in texts.values()]
        signatures = MinHash.generator(shingles, num_perm=self.config.hashes, seed=self.context.seed, scheme=_SCHEME)
        removed, fresh = dict[str, str](), list[tuple[bytes, str, int]]()
        for number, (key, made) in enumerate(zip(texts, signatures, strict=True), self._read):
            alike = [(made.jaccard(self._signatures[each]), each) for each in self._index.query(made)]
            nearest, first = max(alike, default=(0.0, ""))
            if nearest >= self.config.similarity:
                removed[key] = f"{nearest:.2f} the same as {first}"
            else:
                self._add(key, made)
                fresh.append((made.hashvalues.tobytes(), key, number))
        self._seen.add(fresh)
        self._read += len(request.rows)
        return OperatorResult(removed=removed, set_aside=aside)


def _texts(request: OperatorRequest, column: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the texts of rows by key, and the reason of each row without one."""
    texts, aside = dict[str, str](), dict[str, str]()
    for row in request.rows:
        try:
            texts[row.key] = text_of(row.values, column)
        except KeyError:
            aside[row.key] = f"there is no column {column!r}"
        except TypeError as error:
            aside[row.key] = str(error)
    return texts, aside


def _shingles(text: str, size: int) -> list[bytes]:
    words = normal(text).split()
    return [" ".join(words[at : at + size]).encode() for at in range(max(len(words) - size + 1, 1))]


def normal(text: str) -> str:
    """Return a text without case, accents, punctuation and repeated spaces."""
    if text.isascii():
        kept = "".join(letter if letter.isalnum() else " " for letter in text.lower())
    else:
        plain = unicodedata.normalize("NFKD", text).casefold()
        kept = "".join(letter if letter.isalnum() else " " for letter in plain if not unicodedata.combining(letter))
    return " ".join(kept.split())
