"""The base of curricula, which choose the tasks of batches by the rewards of earlier ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np


class CurriculumTasks(Protocol):
    """The training tasks, as a curriculum sees them."""

    def __len__(self) -> int:
        """Return the number of tasks."""

    def values(self, name: str) -> list[Any]:
        """Return a field of each task's record, or its ``data_source``; raise ``config.invalid-value`` if one has none.

        All tasks are read for it.
        """


class Curriculum(ABC):
    """The base of curricula. One is an attrs class whose fields are its settings.

    The same settings, tasks, seed and rewards give the same choices; what :meth:`load_state_dict` gets continues bit
    for bit.
    """

    @abstractmethod
    def begin(self, tasks: CurriculumTasks) -> None:
        """Look at the tasks, before anything else is called."""

    @abstractmethod
    def choose(self, batch: int, count: int, random: np.random.Generator) -> Sequence[int]:
        """Return the numbers of ``count`` tasks: of a batch, or for groups in the place of those that are dropped.

        ``random`` has a seed of its own for each call. A number comes twice only where there are too few tasks.
        """

    @abstractmethod
    def learn(self, rewards: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Learn from the groups of a step, in a fixed order: the number of a task, and its rewards."""

    def metrics(self) -> Mapping[str, float]:
        """Return numbers that each step reports as ``curriculum/NAME``."""
        return {}

    @abstractmethod
    def state_dict(self) -> Mapping[str, Any]:
        """Return what was learnt, as JSON values."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, after :meth:`begin`."""
