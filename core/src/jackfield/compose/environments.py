"""Environments of a configuration: what has to be in each, and whether it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jackfield.compose.selection import environment_folder
from jackfield.config import RunConfig
from jackfield.errors import ConfigError, PluginError
from jackfield.plugins import PluginRecord, Registry
from jackfield.plugins.doctor import PluginReport, examine
from jackfield.plugins.environments import (
    EnvironmentPlan,
    create_environment,
    environment_python,
    requirement_as_installed,
)

__all__ = ["check_environment", "make_environment"]


def make_environment(config: RunConfig, registry: Registry, name: str, seconds: float) -> tuple[Path, bool]:
    """Make the environment ``name``, unless it is there as described; its folder, and whether it was made.

    Raises:
        ConfigError: there is no such environment in the configuration.
        PluginError: see :func:`~jackfield.plugins.environments.create_environment`.
    """
    if name not in config.environments:
        raise ConfigError(
            f"the configuration has no environment '{name}'",
            where="environments",
            expected=f"one of {', '.join(config.environments) or 'none'}",
            found=name,
            fix=f"describe it under environments.{name}",
        )
    chosen, folder = config.environments[name], environment_folder(config, name)
    there, requires = [record.distribution for record in _workers(config, registry, name)], chosen.requires
    if there:
        there.append(registry.resolve(config.checkpoint_engine.name, "checkpoint_engine").distribution)
    if there and config.runtime.name == "ray":  # whose workers read and write rows, and have one version of Ray
        there.append(registry.resolve(config.transfer_queue.name, "transfer_queue").distribution)
        requires = (*requires, *requirement_as_installed("ray"))
    plan = EnvironmentPlan(
        folder=folder,
        python=chosen.python,
        requires=requires,
        installed=tuple(dict.fromkeys(["jackfield", *there])),
        constraints=None if chosen.constraints is None else Path(chosen.constraints),
        without=chosen.without,
    )
    return folder, create_environment(plan, seconds)


def check_environment(config: RunConfig, registry: Registry, name: str, seconds: float = 120.0) -> Iterator[str]:
    """Try the plugins of an environment's workers in it; the label of each that is fine.

    Raises:
        PluginError: the first problem.
    """
    python = environment_python(environment_folder(config, name))
    records = _workers(config, registry, name)
    for report in examine(records, seconds, {record.kind: python for record in records}):
        problems = report.problems if isinstance(report, PluginReport) else filter(None, (report.problem,))
        for problem in problems:
            assert isinstance(problem, PluginError)
            raise problem
        if isinstance(report, PluginReport):
            yield report.record.label


def _workers(config: RunConfig, registry: Registry, name: str) -> list[PluginRecord]:
    """The plugins of the workers that the configuration sends to the environment."""
    kinds = [kind for kind, chosen in config.runtime.interpreters.items() if chosen == name]
    return [registry.resolve(getattr(config, kind).name, kind) for kind in kinds]
