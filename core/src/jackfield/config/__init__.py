"""Typed configuration: YAML files and ``a.b=c`` overrides to one frozen :class:`RunConfig`."""

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
from jackfield.config.sections import (
    ClusterConfig,
    DataConfig,
    DeadlineConfig,
    EvaluationConfig,
    EvaluationSampling,
    LogProbCheckConfig,
    MixConfig,
    MixingConfig,
    PluginSection,
    QueueConfig,
    RayConfig,
    ReplayConfig,
    RunConfig,
    SamplerConfig,
    ScheduleConfig,
    WeightsConfig,
)

__all__ = [
    "ClusterConfig",
    "DataConfig",
    "DeadlineConfig",
    "EvaluationConfig",
    "EvaluationSampling",
    "LogProbCheckConfig",
    "MixConfig",
    "MixingConfig",
    "PluginSection",
    "QueueConfig",
    "RayConfig",
    "ReplayConfig",
    "RunConfig",
    "SamplerConfig",
    "ScheduleConfig",
    "WeightsConfig",
    "as_plain",
    "explain",
    "load_config",
    "make_config",
    "resolve_defaults",
    "show",
    "validate_plugins",
]
