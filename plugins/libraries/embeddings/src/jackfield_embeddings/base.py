"""What all embedders have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jackfield.abc.reward import HttpClient
from jackfield.clock import Clock
from jackfield.errors import OperatorError

Vectors: TypeAlias = NDArray[np.float64]


class EmbedderContext(Protocol):
    """What an embedder needs of its host; the contexts of operators and of rewards have it."""

    @property
    def clock(self) -> Clock:
        """The clock of every wait."""

    @property
    def http(self) -> HttpClient:
        """The client of requests."""

    @property
    def count(self) -> Callable[[str, float], None]:
        """Adds a number to a counter of the host."""


class Embedder(ABC):
    """Turns texts into vectors."""

    @abstractmethod
    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return an array of shape (number of texts, dimensions), each row of Euclidean length 1."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Return the version of the vectors beside the settings, such as a digest of a model's files."""

    async def start(self) -> None:
        """Load models, before the first call."""
        return

    async def close(self) -> None:
        """End everything the embedder started."""
        return


def normed(vectors: Vectors, where: str) -> Vectors:
    """Return rows of length 1; raise ``operator.embedding`` for a row that has no direction."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not (np.isfinite(lengths).all() and (lengths > 0).all()):
        raise OperatorError(
            "an embedding has no direction",
            code="operator.embedding",
            where=where,
            expected="finite numbers, of which one is not 0",
            found="zeros, NaN or infinity",
            fix="use another model or layer",
        )
    scaled: Vectors = vectors / lengths
    return scaled
