"""Typed configuration: YAML files and ``a.b=c`` overrides to one frozen :class:`RunConfig`."""

from __future__ import annotations

from jackfield.config.loading import (
    as_plain,
    explain,
    load_config,
    make_config,
    parse_override,
    plugin_sections,
    show,
    validate_plugins,
)
from jackfield.config.sections import (
    AlgorithmConfig,
    CriticConfig,
    DataConfig,
    DeadlineConfig,
    EnvironmentConfig,
    EvaluationConfig,
    EvaluationSampling,
    KLConfig,
    PartConfig,
    PluginSection,
    RayConfig,
    RunConfig,
    RuntimeConfig,
    ScheduleConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CriticConfig",
    "DataConfig",
    "DeadlineConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "EvaluationSampling",
    "KLConfig",
    "PartConfig",
    "PluginSection",
    "RayConfig",
    "RunConfig",
    "RuntimeConfig",
    "ScheduleConfig",
    "as_plain",
    "explain",
    "load_config",
    "make_config",
    "parse_override",
    "plugin_sections",
    "show",
    "validate_plugins",
]
