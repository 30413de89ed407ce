"""Counts of hashed sequences of characters, which need no model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import xxhash

from jackfield_embeddings.base import Embedder, Vectors, normed

_LENGTH = 3  #: characters of a sequence


class HashedEmbedder(Embedder):
    """Embeds a text as the counts of its sequences of three characters, each at the place of its hash."""

    def __init__(self, dimensions: int = 512) -> None:
        self._dimensions = dimensions

    @property
    def version(self) -> str:
        """The number of this way of hashing."""
        return "hashed-1"

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Count the sequences of each text, with two spaces at its beginning and end."""
        vectors = np.zeros((len(texts), self._dimensions))
        for row, text in zip(vectors, texts, strict=True):
            padded = f"  {text}  "
            hashes = [_hash(padded[at : at + _LENGTH]) % self._dimensions for at in range(len(padded) - _LENGTH + 1)]
            row += np.bincount(hashes, minlength=self._dimensions)
        return normed(vectors, "hashed")


@lru_cache(maxsize=1 << 17)
def _hash(sequence: str) -> int:
    # Half of a surrogate pair, which JSON may have, is no UTF-8.
    return xxhash.xxh3_64_intdigest(sequence.encode(errors="surrogatepass"))
