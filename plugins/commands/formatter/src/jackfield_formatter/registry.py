"""All models by name."""

from __future__ import annotations

from jackfield.errors import ConfigError, did_you_mean
from jackfield_formatter.experience import ExperienceRow
from jackfield_formatter.installed import MODELS, found_in
from jackfield_formatter.models import DataModel, DpoRow, SftRow, TaskRow

_OWN: dict[str, type[DataModel]] = {"task": TaskRow, "sft": SftRow, "dpo": DpoRow, "experience": ExperienceRow}


def model_names() -> list[str]:
    """Return the names of all models, also those of other packages."""
    return [*_OWN, *(name for name in found_in(MODELS, DataModel) if name not in _OWN)]


def model_of(name: str) -> type[DataModel]:
    """Return the model of a name."""
    if name in _OWN:
        return _OWN[name]
    others = found_in(MODELS, DataModel)
    if name not in others:
        known = model_names()
        what = f"there is no model {name!r}{did_you_mean(name, known)}"
        raise ConfigError(what, where="into", expected=f"one of {', '.join(known)}", found=name)
    return others[name]()
