"""A part of the reward for responses that differ from the others of their group."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
from attrs.validators import ge, gt, optional

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, OperatorType
from jackfield.sdk import option
from jackfield_embeddings import EmbedderConfig, make_embedder
from jackfield_operator_experiences.shaping import groups_of, number_of, text_of


@attrs.frozen(kw_only=True)
class DiversityConfig:
    """Settings of ``diversity``."""

    weight: float = option(0.5, "weight of the diversity in the reward at the first step", ge(0.0))
    last_weight: float = option(0.3, "weight at the end; in between it changes evenly", ge(0.0))
    steps: int | None = option(None, "steps until the last weight; null: all steps of the run", optional(gt(1)))
    only_correct: bool = option(False, "add it only where the reward is positive")
    embedder: EmbedderConfig = option(factory=EmbedderConfig, help="what makes vectors of texts")


class Diversity(Operator):
    """Adds weight * (1 - cosine similarity to the mean embedding of the group) to the reward.

    The idea is Trinity-RFT's (arXiv:2505.17826, section 3.4.2). By default, texts are embedded as counts of hashed
    sequences of three characters, so that no model is needed.
    """

    type: ClassVar[OperatorType] = "scorer"

    def __init__(self, config: DiversityConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        self._embedder = make_embedder(config.embedder, context)

    @property
    def reads(self) -> tuple[str, ...]:
        """Responses, rewards and groups."""
        return ("response", "reward", "group")

    @property
    def writes(self) -> tuple[str, ...]:
        """The reward with diversity, and the diversity."""
        return ("reward", "diversity")

    @property
    def compares(self) -> bool:
        """Whole groups are compared."""
        return True

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
        """Compare each response with the mean of its group."""
        weight, aside, updates = self._weight(request), dict[str, str](), dict[str, dict[str, Any]]()
        for rows in groups_of(request).values():
            good = dict[str, tuple[str, float]]()
            for row in rows:
                try:
                    good[row.key] = text_of(row, "response"), number_of(row, "reward")
                except (KeyError, TypeError) as error:
                    aside[row.key] = f"{type(error).__name__}: {error}"
            if not good:
                continue
            vectors = await self._embedder.embed([text for text, _ in good.values()])
            mean = vectors.mean(axis=0)
            similar = vectors @ (mean / max(float(np.linalg.norm(mean)), 1e-12))
            for (key, (_, reward)), similarity in zip(good.items(), similar.tolist(), strict=True):
                different = min(max(1.0 - similarity, 0.0), 1.0)
                added = weight * different if reward > 0.0 or not self.config.only_correct else 0.0
                updates[key] = {"reward": reward + added, "diversity": different}
        return OperatorResult(updates=updates, set_aside=aside)

    def _weight(self, request: OperatorRequest) -> float:
        done = request.batch / max((self.config.steps or request.steps) - 1, 1)
        first, last = self.config.weight, self.config.last_weight
        return float(first + (last - first) * min(done, 1.0))
