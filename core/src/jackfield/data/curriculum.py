"""The curricula that are installed, and the training tasks as they see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs

from jackfield.abc.curriculum import Curriculum
from jackfield.data.formats import Task
from jackfield.errors import ConfigError, PluginError, did_you_mean
from jackfield.settings import option, structure


@attrs.frozen
class TrainingTasks:
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
