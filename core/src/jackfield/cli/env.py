"""``jackfield env create NAME FILE``."""

from __future__ import annotations

import time

import click

from jackfield.cli import config_arguments, deadline_option
from jackfield.errors import ConfigError

_LOOK_SECONDS = 120.0  #: for a worker's plugin to be imported in its new environment


@click.group()
def env() -> None:
    """Create environments for workers."""


@env.command()
@click.argument("name")
@config_arguments
@deadline_option(3600.0, "Seconds for all of it.")
def create(name: str, file: str, overrides: tuple[str, ...], deadline: float) -> None:
    """Make the environment NAME of the configuration FILE with venv and pip, and try its workers' plugins there.

    Jackfield, the plugins that run there and the checkpoint engine are installed as they are here. An environment that
    is there as described is left as it is. What a plugin needs and pip did not install is named as missing.
    """
    import attrs

    from jackfield.config import load_config
    from jackfield.plugins import discover
    from jackfield.plugins.environments import create_environment, requirement_as_installed
    from jackfield.plugins.interpreters import environment_python, look

    config, registry, started = load_config(file, overrides), discover(), time.monotonic()
    if name not in config.environments:
        raise ConfigError(
            f"the configuration has no environment '{name}'",
            where="environments",
            expected=f"one of {', '.join(config.environments) or 'none'}",
            found=name,
            fix=f"describe it under environments.{name}",
        )
    settings = config.environments[name]
    workers = [kind for kind, chosen in config.cluster.interpreters.items() if chosen == name]
    shared = ["checkpoint_engine"] if workers else []
    if workers and config.cluster.name == "ray":  # its workers read and write rows, and have one version of Ray
        shared.append("transfer_queue")
        settings = attrs.evolve(settings, requires=(*settings.requires, *requirement_as_installed("ray")))
    records = [registry.resolve(getattr(config, kind).name, kind) for kind in (*workers, *shared)]
    comes_along = tuple(dict.fromkeys(["jackfield", *(record.distribution for record in records)]))
    folder = settings.path(name)
    made = create_environment(settings, folder, comes_along, deadline)
    click.echo(f"{folder}: made in {time.monotonic() - started:.0f} s" if made else f"{folder}: there already")
    for record in records[: len(workers)]:
        found = look(environment_python(folder), record, _LOOK_SECONDS, importing=True)
        attrs.evolve(found, missing=()).check()
        for error in found.missing:
            click.echo(f"missing {record.label} needs {error.expected}: install it there")
        if not found.missing:
            click.echo(f"ok      {record.label} can run there")
