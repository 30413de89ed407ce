"""The input of a check: one plugin, ready to be built."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from jackfield.plugins import Manifest, PluginRecord


@attrs.frozen(kw_only=True, eq=False)
class Subject:
    """One plugin under one check. A mutant is not installed and has no ``record``."""

    kind: str
    name: str
    cls: Any  #: the plugin's class
    config: Any  #: an instance of ``config_class``, made from ``settings``
    config_class: Any
    settings: Mapping[str, Any] = attrs.field(factory=dict)  #: of a small instance
    capabilities: Mapping[str, str] = attrs.field(factory=dict)  #: name to declared level
    fixture: Mapping[str, Any] = attrs.field(factory=dict)  #: the result of the plugin's fixture function
    folder: Path  #: fresh and empty for each check
    abi: str = "1.0"
    record: PluginRecord | None = None

    @property
    def label(self) -> str:
        """Return the name for messages."""
        return f"{self.kind}:{self.name}"

    @property
    def manifest(self) -> Manifest | None:
        """Return the plugin's manifest, if it is installed and readable."""
        return None if self.record is None else self.record.manifest

    def has(self, capability: str) -> bool:
        """Return whether the plugin declares a capability as ``full`` or ``partial``."""
        return self.capabilities.get(capability) in ("full", "partial")

    def make(self, context: Any, **settings: Any) -> Any:
        """Create an object of the plugin on this context; ``settings`` replace those of its fixture."""
        if not settings:
            return self.cls(self.config, context)
        from jackfield.settings import structure

        return self.cls(structure(self.config_class, {**self.settings, **settings}), context)

    def plain(self) -> dict[str, Any]:
        """Return plain values for :meth:`of_plain` in another process; of the fixture only ``device``."""
        found = {name: getattr(self, name) for name in ("cls", "config_class")}
        classes = {name: [cls.__module__, cls.__qualname__] for name, cls in found.items()}
        fixture = {name: self.fixture[name] for name in ("device",) if name in self.fixture}
        return {**classes, "kind": self.kind, "name": self.name, "settings": dict(self.settings), "fixture": fixture}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any], folder: Path) -> Subject:
        """Create the subject that :meth:`plain` describes."""
        from jackfield.settings import structure

        found: dict[str, Any] = {"folder": folder}
        for name in ("cls", "config_class"):
            module, path = plain[name]
            found[name] = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        return cls(**{**plain, **found, "config": structure(found["config_class"], plain["settings"])})

    def at(self, folder: Path) -> Subject:
        """Return the same plugin with another folder."""
        return attrs.evolve(self, folder=folder)
