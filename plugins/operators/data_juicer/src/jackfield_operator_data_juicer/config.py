"""The settings of ``data_juicer``, which are read where Data-Juicer need not be installed."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import attrs
import yaml

from jackfield.errors import ConfigError, did_you_mean
from jackfield.sdk import option

TEXT = "text"  #: Data-Juicer's usual name of the column with the text


@functools.cache
def known() -> dict[str, Any]:
    """Return what ``operators.json`` says: by name, type, thresholds, and why an operator is refused."""
    found: dict[str, Any] = json.loads((files(__package__) / "operators.json").read_text(encoding="utf-8"))
    return found


@attrs.frozen(kw_only=True)
class DataJuicerConfig:
    """Settings of ``data_juicer``."""

    op: str = option("", "name of an operator of Data-Juicer, such as text_length_filter")
    settings: Mapping[str, Any] = option(factory=dict, help="the operator's settings, by Data-Juicer's names")
    thresholds: Mapping[str, Any] = option(
        factory=dict,
        help="those of the settings that only the decision of a filter reads, so that other values need no new "
        "statistics; known ones move here from settings",
    )
    columns: Mapping[str, str] = option(
        factory=dict, help="columns by the key with which operators read them; by default text_key: prompt"
    )
    recipe: str | None = option(None, "a recipe of Data-Juicer in the place of op: a YAML file with the list `process`")

    def __attrs_post_init__(self) -> None:
        """Refuse settings beside a recipe, and move thresholds to where they belong."""
        if self.recipe is not None and (self.op or self.settings or self.thresholds):
            what, found = "a recipe names its operators and their settings itself", self.op or str(dict(self.settings))
            raise ConfigError(what, where="recipe", expected="no op and no settings beside it", found=found)
        later = known()["operators"].get(self.op, {}).get("thresholds", ())
        moved = {name: value for name, value in self.settings.items() if name in later}
        rest = {name: value for name, value in self.settings.items() if name not in later}
        object.__setattr__(self, "settings", rest)
        object.__setattr__(self, "thresholds", {**moved, **self.thresholds})

    def stages(self) -> list[dict[str, Any]]:
        """Return the settings of the stages for which these stand: one for each operator of a recipe."""
        if self.recipe is None:
            self.check_name()
            return [attrs.asdict(self)]
        recipe, columns = _read(self.recipe), dict(self.columns)
        texts = recipe.get("text_keys", TEXT)
        text = texts[0] if isinstance(texts, list) and texts else texts
        if isinstance(text, str) and text != TEXT:
            columns.setdefault("text_key", text)
        return [
            {"op": name, "settings": own, "columns": columns}
            for name, own in (self._entry(number, entry) for number, entry in enumerate(recipe["process"]))
        ]

    def check_name(self) -> None:
        """Refuse settings that name no operator."""
        if not self.op:
            what, expected = "no operator of Data-Juicer is named", "op: NAME, or recipe: FILE"
            raise ConfigError(what, code="config.missing-key", where="op", expected=expected, found="none")

    def _entry(self, number: int, entry: Any) -> tuple[str, dict[str, Any]]:
        """Return name and settings of an operator: ``name: {setting: value}``, ``name:`` or ``name``."""
        entry = {entry: None} if isinstance(entry, str) else entry
        if isinstance(entry, Mapping) and len(entry) == 1:
            ((name, own),) = entry.items()
            if isinstance(name, str) and isinstance(own, Mapping | None):
                return name, dict(own or {})
        expected = "the name of an operator with its settings"
        raise ConfigError(
            "an entry of a recipe is no operator",
            where=f"{self.recipe}, process[{number}]",
            expected=expected,
            found=str(entry)[:200],
        )


def _read(path: str) -> dict[str, Any]:
    try:
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        found = f"{type(error).__name__}: {error}"
        raise ConfigError("a recipe cannot be read", where=path, expected="a YAML file", found=found) from error
    if not isinstance(recipe, dict) or not isinstance(recipe.get("process"), list) or not recipe["process"]:
        raise ConfigError("a recipe has no operators", where=path, expected="a list `process`", found=str(recipe)[:200])
    if paths := recipe.get("custom_operator_paths"):
        what, fix = "a recipe loads code of its own", "make it an operator of Jackfield: docs/plugins/operator.md"
        raise ConfigError(what, where=f"{path}, custom_operator_paths", expected="none", found=str(paths), fix=fix)
    return recipe


def unknown_name(name: str, names: list[str]) -> str:
    """Return a hint at the operator that was meant."""
    return f"Data-Juicer has no operator '{name}'{did_you_mean(name, names)}"
