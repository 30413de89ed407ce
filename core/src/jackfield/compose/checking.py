"""What of a configuration can be refused without its data, its model or any process."""

from __future__ import annotations

from jackfield.algorithms.resolved import ResolvedAlgorithm
from jackfield.compose.mixing import make_sources
from jackfield.compose.resolve import resolve_algorithm
from jackfield.compose.selection import register_parts
from jackfield.config import RunConfig
from jackfield.plugins import HookManager, Registry


def check_parts(config: RunConfig, registry: Registry, manager: HookManager) -> ResolvedAlgorithm:
    """Register the plugins' parts, and check every part that the configuration names with its options.

    Raises:
        ConfigError: those of ``resolve_algorithm``.
        QueueError: a sampler is unknown.
    """
    register_parts(manager.hook)
    make_sources(config.mixing)  # refuses what there is not
    return resolve_algorithm(config, registry.find("rollout", config.rollout.name))
