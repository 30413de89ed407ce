"""Typed configuration: YAML files and ``a.b=c`` overrides to one frozen :class:`RunConfig`.

The classes of its sections are in :mod:`jackfield.config.sections`.
"""

from __future__ import annotations

from jackfield.config.loading import (
    as_plain,
    explain,
    load_config,
    make_config,
    resolve_defaults,
    show,
    validate_plugins,
)
from jackfield.config.sections import PluginSection, RunConfig

__all__ = [
    "PluginSection",
    "RunConfig",
    "as_plain",
    "explain",
    "load_config",
    "make_config",
    "resolve_defaults",
    "show",
    "validate_plugins",
]
