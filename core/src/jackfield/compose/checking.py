"""What of a configuration can be refused without its data, its model or any process."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from jackfield.algorithms import Algorithm, algorithm, part
from jackfield.algorithms.registry import signature
from jackfield.compose.mixing import make_sources
from jackfield.compose.recipe import Recipe, make_recipe
from jackfield.compose.selection import register_parts
from jackfield.config import PartConfig, RunConfig
from jackfield.errors import ConfigError
from jackfield.plugins import HookManager, Registry

__all__ = ["check_parts"]

_OF_EVERY_LOSS = ("length_norm",)  #: read by whoever averages token losses


def check_parts(config: RunConfig, registry: Registry, manager: HookManager) -> Recipe:
    """Register the plugins' parts, and check every part that the configuration names with its options.

    Raises:
        ConfigError: ``config.unknown-key`` or ``config.wrong-type`` with the option's path; those of ``make_recipe``.
        QueueError: a sampler is unknown.
    """
    register_parts(manager.hook)
    make_sources(config.queue)  # refuses what there is not
    chosen = algorithm(config.algorithm.name)
    for kind, own, given in _parts(config, chosen):
        name = own if given is None or given.name is None else given.name
        if name is not None and given is not None:
            _check_options(kind, name, given.options, f"algorithm.{kind}.options")
    return make_recipe(config, registry.find("rollout", config.rollout.name))


def _parts(config: RunConfig, chosen: Algorithm) -> tuple[tuple[str, str | None, PartConfig | None], ...]:
    return (
        ("loss", chosen.loss, config.algorithm.loss),
        ("advantages", chosen.advantages, config.algorithm.advantages),
    )


def _check_options(kind: str, name: str, options: Mapping[str, Any], where: str) -> None:
    """Refuse options that a part does not have, and numbers and texts that are none."""
    known = signature(part(kind, name).function)
    if known.open:
        return
    allowed = {**known.options, **dict.fromkeys(_OF_EVERY_LOSS if kind == "loss" else ())}
    for key, value in options.items():
        path = f"{where}.{key}"
        if key not in allowed:
            close = get_close_matches(str(key), list(allowed), n=1)
            raise ConfigError(
                f"{kind} {name} has no option {key!r}" + (f" (did you mean {close[0]!r}?)" if close else ""),
                code="config.unknown-key",
                where=path,
                expected="one of " + ", ".join(allowed) if allowed else "no options",
                found=key,
                fix=f"`jackfield algorithms show {name}` says what each option does",
            )
        _check_type(allowed[key], value, path)


def _check_type(default: Any, value: Any, where: str) -> None:
    """Compare a value with the option's default; a null default says nothing, and null is for the part to refuse."""
    kinds: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int, float), float: (int, float), str: (str,)}
    accepted = kinds.get(type(default))
    fits = value is None or accepted is None or isinstance(value, accepted)
    if not fits or (isinstance(value, bool) and accepted is not None and bool not in accepted):
        raise ConfigError(
            f"wrong value at {where}",
            code="config.wrong-type",
            where=where,
            expected=f"a value like the default, {default!r}",
            found=repr(value),
            fix="write numbers such as 1.0e-3: YAML reads 1e-3 as a text",
        )
