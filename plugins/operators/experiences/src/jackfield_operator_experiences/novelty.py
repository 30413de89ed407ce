"""A part of the reward for responses that are unlike those that came before."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
from attrs.validators import ge, gt
from numpy.typing import NDArray

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, OperatorType
from jackfield.sdk import option
from jackfield_embeddings import EmbedderConfig, make_embedder
from jackfield_operator_experiences.shaping import groups_of, number_of, text_of


@attrs.frozen(kw_only=True)
class NoveltyConfig:
    """Settings of ``novelty``."""

    weight: float = option(0.2, "weight of the novelty in the reward", ge(0.0))
    only_positive: bool = option(True, "add it to positive rewards only")
    memory: int = option(512, "earlier responses that are remembered, the newest", gt(0))
    nearest: int = option(4, "how many of them a response is compared with, the nearest", gt(0))
    embedder: EmbedderConfig = option(
        factory=lambda: EmbedderConfig(dimensions=256), help="what makes vectors of texts"
    )


class Novelty(Operator):
    """Adds weight * (1 - mean cosine similarity to the nearest earlier responses) to the reward.

    The responses of a group are compared with those of earlier groups only, so that the order of rollouts does not
    matter. The novelty is 0 while none is remembered. Vectors are remembered in half precision, and a checkpoint has
    them.
    """

    type: ClassVar[OperatorType] = "scorer"
    compares = True
    reads = ("response", "reward", "group")
    writes = ("reward", "novelty")

    def __init__(self, config: NoveltyConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        self._embedder = make_embedder(config.embedder, context)
        self._memory: NDArray[np.float16] = np.empty((0, 0), np.float16)

    @property
    def version(self) -> str:
        """Return the embedder's version."""
        return self._embedder.version

    async def start(self) -> None:
        """Load the embedder's model."""
        await self._embedder.start()

    async def close(self) -> None:
        """End the embedder."""
        await self._embedder.close()

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Compare each group with the memory, and then remember it."""
        aside, good = dict[str, str](), dict[str, tuple[str, float]]()
        for row in request.rows:
            try:
                good[row.key] = text_of(row, "response"), number_of(row, "reward")
            except (KeyError, TypeError) as error:
                aside[row.key] = f"{type(error).__name__}: {error}"
        if not good:
            return OperatorResult(set_aside=aside)
        embedded = (await self._embedder.embed([text for text, _ in good.values()])).astype(np.float16)
        vectors, updates = dict(zip(good, embedded, strict=True)), dict[str, dict[str, float]]()
        for rows in groups_of(request).values():  # nothing waits from here on: a cancelled request remembers nothing
            keys = [row.key for row in rows if row.key in good]
            if not keys:
                continue
            own = np.stack([vectors[key] for key in keys])
            for key, novelty in zip(keys, self._novelties(own), strict=True):
                reward = good[key][1]
                added = self.config.weight * novelty if reward > 0.0 or not self.config.only_positive else 0.0
                updates[key] = {"reward": reward + added, "novelty": novelty}
            self._remember([vectors[key] for key in sorted(keys)])
        return OperatorResult(updates=updates, set_aside=aside)

    def _remember(self, vectors: Sequence[NDArray[np.float16]]) -> None:
        known = self._memory.reshape(-1, len(vectors[0]))
        self._memory = np.concatenate([known, np.stack(vectors)])[-self.config.memory :]

    def _novelties(self, vectors: NDArray[np.float16]) -> list[float]:
        if not len(self._memory):
            return [0.0] * len(vectors)
        similar = vectors.astype(np.float64) @ self._memory.astype(np.float64).T
        most = min(self.config.nearest, similar.shape[1])
        nearest = np.sort(similar, axis=1)[:, -most:].mean(axis=1)
        return [min(max(1.0 - each, 0.0), 1.0) for each in nearest.tolist()]

    def state(self) -> Any:
        """Return the remembered vectors."""
        return {"shape": list(self._memory.shape), "vectors": base64.b64encode(self._memory.tobytes()).decode()}

    def restore(self, state: Any) -> None:
        """Continue with remembered vectors."""
        content = np.frombuffer(base64.b64decode(state["vectors"]), np.float16)
        self._memory = content.reshape(state["shape"])
