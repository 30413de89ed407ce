"""Curricula, which choose the tasks of batches by the rewards of earlier ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs

from jackfield.data.formats import Task
from jackfield.errors import ConfigError, PluginError, did_you_mean
from jackfield.settings import option, structure

if TYPE_CHECKING:
    import numpy as np


@attrs.frozen
class CurriculumTasks:
    """The training tasks, as a curriculum sees them."""

    _tasks: Sequence[Task]

    def __len__(self) -> int:
        return len(self._tasks)

    def values(self, name: str) -> list[Any]:
        """Return a field of each task's record, or its ``data_source``; raise ``config.invalid-value`` if one has none.

        All tasks are read for it.
        """
        if name == "data_source":
            return [task.data_source for task in self._tasks]
        found = [task.fields.get(name) for task in self._tasks]
        if None in found:
            task = self._tasks[found.index(None)]
            what, fix = f"a task has no field {name!r}", "let an operator of data.pipeline.tasks write it"
            details: Any = {
                "where": "data.curriculum",
                "expected": f"records with {name}",
                "found": task.place,
                "fix": fix,
            }
            raise ConfigError(what, **details)
        return found


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
        """Return the numbers of ``count`` tasks for a batch, first those of its groups, then those of retries.

        ``random`` has a seed of its own for each batch. A number comes twice only where there are too few tasks.
        """

    @abstractmethod
    def learn(self, rewards: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Learn from the groups of a step: the number of each one's task, and the rewards of its rollouts."""

    def metrics(self) -> Mapping[str, float]:
        """Return numbers that each step reports as ``curriculum/NAME``."""
        return {}

    @abstractmethod
    def state_dict(self) -> Mapping[str, Any]:
        """Return what was learnt, as JSON values."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, after :meth:`begin`."""


CURRICULA: dict[str, Callable[..., Curriculum]] = {}  #: by the name that configurations use


def register_curriculum(name: str, make: Callable[..., Curriculum]) -> None:
    """Register a curriculum, an attrs class; raise ``plugin.hooks`` if another one has the name."""
    if CURRICULA.setdefault(name, make) is not make:
        what, fix = f"there is a curriculum named {name!r} already", "choose another name"
        raise PluginError(what, code="plugin.hooks", where=f"curriculum:{name}", fix=fix)


@attrs.frozen(kw_only=True)
class CurriculumSpec:
    """The section that chooses a curriculum."""

    name: str = option(help="a curriculum of an installed package of hooks, such as thompson of jackfield-curricula")
    options: Mapping[str, Any] = option(factory=dict, help="the curriculum's own settings")

    def make(self) -> Curriculum:
        """Create the curriculum; an unknown name or option raises a ``ConfigError``."""
        if self.name not in CURRICULA:
            what = f"no curriculum is named {self.name!r}{did_you_mean(self.name, CURRICULA)}"
            expected = f"one of {', '.join(sorted(CURRICULA)) or '(none is installed)'}"
            fix = "install the package that has it, such as jackfield-curricula"
            raise ConfigError(what, where="data.curriculum.name", expected=expected, found=self.name, fix=fix)
        made = cast(Any, CURRICULA[self.name])
        return cast(Curriculum, structure(made, dict(self.options), where="data.curriculum.options"))
