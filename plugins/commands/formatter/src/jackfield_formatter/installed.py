"""The models and shapes of other packages, which entry points name."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from jackfield.errors import PluginError

MODELS, SHAPES = "jackfield.data_models", "jackfield.data_shapes"


def found_in(group: str, base: type[Any]) -> dict[str, Callable[[], type[Any]]]:
    """Return the classes of a group by name, each as a function that imports it; raise ``plugin.requirement``."""

    def loader(entry: Any) -> Callable[[], type[Any]]:
        """Return a function that imports the class of an entry point."""

        def load() -> type[Any]:
            """Import the class."""
            place = f"{group}, {entry.name} = {entry.value} of {entry.dist.name if entry.dist else 'a package'}"
            try:
                found = entry.load()
            except Exception as error:  # the package's code may do anything
                shown = f"{type(error).__name__}: {error}"
                raise PluginError("an entry point cannot be imported", where=place, found=shown) from error
            if not (isinstance(found, type) and issubclass(found, base)):
                raise PluginError(
                    "an entry point names something else",
                    where=place,
                    expected=f"a class derived from {base.__module__}.{base.__name__}",
                    found=repr(found),
                )
            return found

        return load

    return {entry.name: loader(entry) for entry in sorted(entry_points(group=group), key=lambda each: each.name)}
