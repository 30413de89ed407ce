"""Leaves out rows whose text means nearly the same as that of an earlier row."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import attrs
import msgspec
import numpy as np
from attrs.validators import gt, le
from numpy.typing import NDArray

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, OperatorType
from jackfield.errors import OperatorError
from jackfield.sdk import option
from jackfield_embeddings import EmbedderConfig, make_embedder
from jackfield_operator_models.texts import text_of

_BLOCK = 8192  #: kept rows that are compared at a time: 32 KiB of similarities for each new row
_PART = 1024  #: new rows that are compared at a time
_SLACK = 1e-4  #: products in float32 are this near to those in float64, by which is decided
_DIGITS = 9  #: decimals of a similarity

_Floats = NDArray[np.float32]


@attrs.frozen(kw_only=True)
class SemanticConfig:
    """Settings of ``semantic_duplicates``."""

    column: str = option("prompt", "column with the text")
    similarity: float = option(
        0.95, "cosine similarity of the embeddings of two texts from which they are duplicates", [gt(0.0), le(1.0)]
    )
    embedder: EmbedderConfig = option(factory=EmbedderConfig, help="what makes vectors of texts")


class _Kept:
    """The vectors and keys of kept rows, in two files, of which a later part can be forgotten again."""

    def __init__(self, folder: Path | None) -> None:
        self._temporary = None if folder is not None else tempfile.TemporaryDirectory(prefix="jackfield-semantic-")
        place = folder if folder is not None else Path(str(self._temporary and self._temporary.name))
        self._vectors, self._names = _open(place / "vectors.f32"), _open(place / "keys.jsonl")
        self._names.seek(0)
        self.keys: list[str] = [msgspec.json.decode(line) for line in self._names if line.endswith(b"\n")]
        self._dimensions = 0

    def forget_from(self, number: int, dimensions: int) -> None:
        """Keep the first rows only; ``operator.state`` if there are fewer."""
        self._dimensions = dimensions
        size, wanted = self._vectors.seek(0, 2), number * dimensions * 4
        if len(self.keys) < number or size < wanted:
            what, expected = "files of an operator lost rows that its state has", f"{number} vectors"
            found = f"{len(self.keys)} keys and {size} bytes of vectors"
            raise OperatorError(
                what, code="operator.state", where=str(self._vectors.name), expected=expected, found=found
            )
        del self.keys[number:]
        self._vectors.truncate(wanted)
        names = b"".join(msgspec.json.encode(key) + b"\n" for key in self.keys)
        self._names.truncate(0)
        self._names.seek(0)
        self._names.write(names)

    @property
    def dimensions(self) -> int:
        """The length of a vector; 0 if there is none yet."""
        return self._dimensions

    def block(self, start: int) -> _Floats:
        """Return the vectors from a number on, at most ``_BLOCK``, as an array of shape (rows, dimensions)."""
        count = min(_BLOCK, len(self.keys) - start)
        self._vectors.seek(start * self._dimensions * 4)
        read = self._vectors.read(count * self._dimensions * 4)
        return np.frombuffer(read, np.float32).reshape(count, self._dimensions)

    def add(self, vectors: _Floats, keys: Sequence[str]) -> None:
        """Keep rows."""
        self._dimensions = vectors.shape[1]
        self._vectors.seek(len(self.keys) * self._dimensions * 4)
        self._vectors.write(np.ascontiguousarray(vectors).tobytes())
        self._names.seek(0, 2)
        self._names.write(b"".join(msgspec.json.encode(key) + b"\n" for key in keys))
        self.keys += keys

    def flush(self) -> None:
        """Hand everything to the system, so that it outlives this process."""
        self._vectors.flush()
        self._names.flush()

    def close(self) -> None:
        """Close the files."""
        self._vectors.close()
        self._names.close()
        if self._temporary is not None:
            self._temporary.cleanup()


def _open(file: Path) -> BinaryIO:
    file.touch()
    return file.open("r+b")


class SemanticDuplicates(Operator):
    """Removes a row if the cosine similarity of its embedding to that of an earlier kept row reaches a threshold.

    Each row is compared with all kept rows before it, exactly: n rows of d dimensions take n² d / 2 multiplications and
    4 n d bytes on disk, of which a few megabytes are in memory at a time.
    """

    type: ClassVar[OperatorType] = "deduplicator"

    def __init__(self, config: SemanticConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        self._column = context.column(config.column)
        self._embedder = make_embedder(config.embedder, context)
        self._kept: _Kept | None = None
        self._state = (0, 0)

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the column with the text."""
        return (self._column,)

    @property
    def writes(self) -> tuple[str, ...]:
        """Return no column."""
        return ()

    @property
    def version(self) -> str:
        """That of the embedder, such as a digest of its model."""
        return self._embedder.version

    async def start(self) -> None:
        """Open the files of what has come before, and load the embedder."""
        if self._kept is None:
            kept = _Kept(self.context.folder)
            try:
                kept.forget_from(*self._state)
            except BaseException:
                kept.close()
                raise
            self._kept = kept
        await self._embedder.start()

    async def close(self) -> None:
        """Close the files and the embedder."""
        if self._kept is not None:
            self._state = (len(self._kept.keys), self._kept.dimensions)
            self._kept.close()
            self._kept = None
        await self._embedder.close()

    def state(self) -> list[int]:
        """Return how many rows were kept, and the dimensions of their vectors; what they are is in the files."""
        if self._kept is not None:
            self._kept.flush()
            self._state = (len(self._kept.keys), self._kept.dimensions)
        return list(self._state)

    def restore(self, state: Any) -> None:
        """Forget what was kept after the state was saved."""
        self._state = (int(state[0]), int(state[1]))
        if self._kept is not None:
            self._kept.forget_from(*self._state)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Embed the texts, then compare them in their order: nothing is kept of a call that is cancelled before."""
        kept, texts, aside, removed = self._kept, dict[str, str](), dict[str, str](), dict[str, str]()
        assert kept is not None, "it was started"
        for row in request.rows:
            try:
                texts[row.key] = text_of(row.values, self._column)
            except ValueError as error:
                aside[row.key] = str(error)
        if not texts:
            return OperatorResult(set_aside=aside)
        vectors = (await self._embedder.embed(list(texts.values()))).astype(np.float32)
        keys, before = list(texts), (len(kept.keys), kept.dimensions)
        if before[0] and before[1] != vectors.shape[1]:
            what, expected = "the embedder changed the length of its vectors", str(before[1])
            raise OperatorError(what, code="operator.embedding", expected=expected, found=str(vectors.shape[1]))
        try:
            for start in range(0, len(keys), _PART):
                removed |= self._compared(kept, keys[start : start + _PART], vectors[start : start + _PART])
        except BaseException:
            kept.forget_from(*before)
            raise
        return OperatorResult(removed=removed, set_aside=aside)

    def _compared(self, kept: _Kept, keys: Sequence[str], vectors: _Floats) -> dict[str, str]:
        """Return which of some rows are duplicates, and keep the others."""
        found: list[tuple[float, str] | None] = [None] * len(keys)
        for start in range(0, len(kept.keys), _BLOCK):
            block = kept.block(start)
            left = [at for at, each in enumerate(found) if each is None]
            for at, near in zip(left, self._near(vectors[left] @ block.T), strict=True):
                found[at] = self._first(vectors[at], block, near, kept.keys[start : start + _BLOCK])
        fresh = np.zeros(len(keys), dtype=np.bool_)
        for at, near in enumerate(self._near(vectors @ vectors.T)):
            if found[at] is None:
                found[at] = self._first(vectors[at], vectors, near[fresh[near]], keys)
                fresh[at] = found[at] is None
        kept.add(vectors[fresh], [key for key, is_fresh in zip(keys, fresh.tolist(), strict=True) if is_fresh])
        return {
            key: f"similarity {each[0]:.3f} to {each[1]}"
            for key, each in zip(keys, found, strict=True)
            if each is not None
        }

    def _near(self, similarities: _Floats) -> list[NDArray[np.intp]]:
        """Return, for each row, the numbers of others that may be similar enough."""
        return [np.flatnonzero(row) for row in similarities >= self.config.similarity - _SLACK]

    def _first(
        self, vector: _Floats, others: _Floats, near: NDArray[np.intp], keys: Sequence[str]
    ) -> tuple[float, str] | None:
        """Return the first of the rows ``near`` that is similar enough, with its similarity in float64.

        A product of two vectors does not depend on how many others are computed with it, as that of matrices does.
        """
        wide = vector.astype(np.float64)
        length = float(np.sqrt((wide * wide).sum()))
        for other in near.tolist():
            second = others[other].astype(np.float64)
            similarity = float((wide * second).sum()) / (length * float(np.sqrt((second * second).sum())))
            if round(similarity, _DIGITS) >= self.config.similarity:
                return similarity, keys[other]
        return None
