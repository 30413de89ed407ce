"""A part of the reward for responses that differ from the others of their group."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
import xxhash
from attrs.validators import ge
from numpy.typing import NDArray

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, OperatorType
from jackfield.sdk import option


@attrs.frozen(kw_only=True)
class DiversityConfig:
    """Settings of ``diversity``."""

    weight: float = option(0.5, "weight of the diversity in the reward at the first step", ge(0.0))
    last_weight: float = option(0.3, "weight at the last step; in between it changes evenly", ge(0.0))
    only_correct: bool = option(False, "add it only where the reward is positive")
    dimensions: int = option(512, "size of the embedding: hashed sequences of three characters", ge(16))


class Diversity(Operator):
    """Adds weight * (1 - cosine similarity to the mean embedding of the group) to the reward.

    The idea is Trinity-RFT's (arXiv:2505.17826, section 3.4.2). Texts are embedded as counts of hashed sequences of
    three characters, of length 1, so that no model is needed.
    """

    type: ClassVar[OperatorType] = "scorer"

    def __init__(self, config: DiversityConfig, context: OperatorContext) -> None:
        super().__init__(config, context)

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

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Compare each response with the mean of its group."""
        weight, groups = self._weight(request), dict[str, list[int]]()
        for at, row in enumerate(request.rows):
            groups.setdefault(str(row.values["group"]), []).append(at)
        vectors = np.array([self._embedded(str(row.values["response"])) for row in request.rows])
        updates = dict[str, dict[str, Any]]()
        for places in groups.values():
            mean = vectors[places].mean(axis=0)
            similar = vectors[places] @ (mean / max(float(np.linalg.norm(mean)), 1e-12))
            for at, similarity in zip(places, similar.tolist(), strict=True):
                row, different = request.rows[at], min(max(1.0 - similarity, 0.0), 1.0)
                reward = float(row.values["reward"])
                added = weight * different if reward > 0.0 or not self.config.only_correct else 0.0
                updates[row.key] = {"reward": reward + added, "diversity": different}
        return OperatorResult(updates=updates)

    def _weight(self, request: OperatorRequest) -> float:
        done = request.batch / max(request.steps - 1, 1)
        first, last = self.config.weight, self.config.last_weight
        return float(first + (last - first) * min(done, 1.0))

    def _embedded(self, text: str) -> NDArray[np.float64]:
        vector = np.zeros(self.config.dimensions)
        padded = f"  {text}  "
        for at in range(len(padded) - 2):
            number = xxhash.xxh3_64_intdigest(padded[at : at + 3].encode())
            vector[number % self.config.dimensions] += 1.0
        normed: NDArray[np.float64] = vector / np.linalg.norm(vector)
        return normed
