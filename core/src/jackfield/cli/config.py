"""The commands ``jackfield config``, ``jackfield env`` and ``jackfield algorithms``."""

from __future__ import annotations

import itertools
import textwrap
import time
from collections.abc import Iterator, Mapping
from typing import Any

import click

from jackfield.cli import config_arguments, deadline_option, json_option, show
from jackfield.errors import ConfigError

_LOOK_SECONDS = 120.0  #: for importing a worker's plugin in its new environment
_KINDS = ("algorithm", "advantages", "loss", "kl", "correction", "aggregation", "distillation", "shaping")
_kind_option = click.option("--kind", type=click.Choice(_KINDS), help="Only components of this kind.")


@click.group()
def config() -> None:
    """Show, explain and validate a config file."""


@config.command("show")
@config_arguments
def show_config(file: str, overrides: tuple[str, ...]) -> None:
    """Print the whole resolved configuration as YAML, including defaults."""
    from jackfield import config

    click.echo(config.show(config.load_config(file, overrides)), nl=False)


@config.command("explain")
@config_arguments
def explain_config(file: str, overrides: tuple[str, ...]) -> None:
    """Print every setting with its value and description, and its default if different."""
    from jackfield import config
    from jackfield.plugins import discover

    for path, value, default, text in config.explain(config.load_config(file, overrides), discover()):
        changed = "" if value == default else f"  (default: {default!r})"
        click.echo(f"{path} = {value!r}{changed}" + (f"\n    {text}" if text else ""))


@config.command()
@config_arguments
@json_option
def validate(file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check all settings, including those of plugins and components. Paths need not exist.

    With --json, print the resolved algorithm and what it needs.
    """
    from jackfield.compose.checks import hooks_of
    from jackfield.compose.inputs import check_samplers
    from jackfield.compose.resolve import resolve_algorithm, rollout_bound
    from jackfield.config import load_config, validate_plugins
    from jackfield.plugins import discover

    loaded, registry = load_config(file, overrides), discover()
    validate_plugins(loaded, registry)
    hooks_of(loaded, registry)
    check_samplers(loaded.mixing)
    algorithm = resolve_algorithm(loaded, registry.find("rollout", loaded.rollout.name))
    described = {**algorithm.as_plain(), "replica_bound": rollout_bound(loaded)}
    show({"file": file, "algorithm": described}, [f"{file}: valid"])


@click.group()
def env() -> None:
    """Create environments for workers."""


@env.command()
@click.argument("name")
@config_arguments
@deadline_option(3600.0, "Seconds for the whole command.")
def create(name: str, file: str, overrides: tuple[str, ...], deadline: float) -> None:
    """Make the environment NAME of FILE with venv and pip, and import its plugins there.

    It gets the same versions of Jackfield, of the checkpoint engine and of the plugins that run there. An environment
    that already matches its description is not changed. Requirements of plugins that pip did not install are listed.
    """
    import attrs

    from jackfield.config import load_config
    from jackfield.plugins import discover
    from jackfield.plugins.interpreters import create_environment, environment_python, look, requirement_as_installed

    config, registry, started = load_config(file, overrides), discover(), time.monotonic()
    if name not in config.environments:
        known, fix = ", ".join(config.environments) or "none", f"describe it under environments.{name}"
        details = {"where": "environments", "expected": f"one of {known}", "found": name, "fix": fix}
        raise ConfigError(f"the configuration has no environment '{name}'", **details)
    settings = config.environments[name]
    workers = [kind for kind, chosen in config.cluster.interpreters.items() if chosen == name]
    shared = ["checkpoint_engine"] if workers else []
    if workers and config.cluster.name == "ray":  # its workers access samples and need the same version of Ray
        shared.append("transfer_queue")
        settings = attrs.evolve(settings, requires=(*settings.requires, *requirement_as_installed("ray")))
    records = [registry.resolve(getattr(config, kind).name, kind) for kind in (*workers, *shared)]
    comes_along = tuple(dict.fromkeys(["jackfield", *(record.distribution for record in records)]))
    folder = settings.path(name)
    made = create_environment(settings, folder, comes_along, deadline)
    click.echo(f"{folder}: made in {time.monotonic() - started:.0f} s" if made else f"{folder}: there already")
    for record in records[: len(workers)]:
        found = look(environment_python(folder), record, _LOOK_SECONDS, importing=True)
        found.check(complete=False)
        for error in found.missing:
            click.echo(f"missing {record.label} needs {error.expected}: install it there")
        if not found.missing:
            click.echo(f"ok      {record.label} can run there")


@click.group()
def algorithms() -> None:
    """List algorithms and their components."""


@algorithms.command("list")
@_kind_option
@json_option
def list_algorithms(kind: str | None, as_json: bool) -> None:
    """List bundles, estimators, losses and other components."""
    found = _described(kind)
    width, lines = max(len(one["name"]) for one in found), list[str]()
    for part, ones in itertools.groupby(found, key=lambda one: str(one["kind"])):
        lines += [*([""] if lines else []), part]
        for one in ones:
            equation = textwrap.shorten(one["equation"], 110, placeholder=" …")
            lines.append(f"  {one['name'].ljust(width)}  {equation}")
    show(found, lines)


@algorithms.command("show")
@click.argument("name")
@_kind_option
@json_option
def show_algorithm(name: str, kind: str | None, as_json: bool) -> None:
    """Show equation, paper, options and inputs of the components that are named NAME."""
    from jackfield.algorithms.registry import unknown_part

    known = _described(kind)
    found = [one for one in known if one["name"] == name]
    if not found:
        raise unknown_part(kind or "part", name, sorted({one["name"] for one in known}))
    show(found, "\n\n".join("\n".join(_lines(one)) for one in found).splitlines())


def _described(kind: str | None) -> list[dict[str, Any]]:
    from jackfield.algorithms import names, part
    from jackfield.algorithms.named import describe

    return [describe(part(one, name)) for one in _KINDS if kind in (None, one) for name in names(one)]


def _lines(one: Mapping[str, Any]) -> Iterator[str]:
    yield f"{one['name']} ({one['kind']})"
    yield from textwrap.wrap(one["equation"], 110, initial_indent="  ", subsequent_indent="  ")
    for key, value in one.items():
        if key in ("kind", "name", "equation") or not value:
            continue
        pairs = [f"{name}={default}" for name, default in value.items()] if isinstance(value, Mapping) else value
        text = ", ".join(pairs) if isinstance(pairs, list) else str(value)
        label = f"  {key.replace('_', ' ')}: "
        yield from textwrap.wrap(text, 110, initial_indent=label, subsequent_indent=" " * 4)
