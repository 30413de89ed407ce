"""The commands of ``jackfield config``."""

from __future__ import annotations

from typing import Any

import click

from jackfield.cli.commands import LazyGroup, config_arguments, json_option, role_option, show


@click.group(cls=LazyGroup)
def config() -> None:
    """Show, explain and validate a config file, and describe all settings."""


@config.command("show")
@config_arguments
def show_config(file: str, overrides: tuple[str, ...]) -> None:
    """Print the whole resolved configuration as YAML, including defaults."""
    from jackfield import config

    click.echo("---\n".join(map(config.show, config.load_stages(file, overrides).values())), nl=False)


@config.command("explain")
@config_arguments
@role_option
@click.option("--changed", is_flag=True, help="Print only the settings that differ from their defaults.")
def explain_config(file: str, overrides: tuple[str, ...], role: Any, changed: bool) -> None:
    """Say what the schedule does and who has which devices, and print every setting with value, help and default."""
    from jackfield.compose.checks import check_file, describe_lengths
    from jackfield.compose.devices import describe_devices
    from jackfield.compose.libraries import describe_tasks
    from jackfield.compose.schedules import describe
    from jackfield.config import automatic_plugins, explain
    from jackfield.plugins import discover

    for name, (loaded, algorithm) in check_file(file, overrides, role or "all").items():
        head, registry = [f"stage {name}, in {loaded.folder}:"] if name else [], discover()
        devices = describe_devices(loaded, registry, role or "all", algorithm)
        said = [*describe(loaded, algorithm, role or "all"), *describe_lengths(loaded), *describe_tasks(loaded)]
        automatic = automatic_plugins(loaded)
        click.echo("\n".join(head if changed else [*head, *said, *devices, ""]))
        for path, value, default, text in explain(loaded, registry):
            if not (changed and value in (default, automatic.get(path))):
                other = "" if value == default else f"  (default: {default!r})"
                click.echo(f"{path} = {value!r}{other}" + (f"\n    {text}" if text else ""))


@config.command()
@config_arguments
@role_option
@json_option
def validate(file: str, overrides: tuple[str, ...], role: Any, as_json: bool) -> None:
    """Check all settings as a run does, and print the algorithm (of each stage). Paths need not exist."""
    from jackfield.compose.checks import check_file

    checked = check_file(file, overrides, role or "all")
    found = {name: {**made.as_plain(), "replica_bound": one.rollout_bound} for name, (one, made) in checked.items()}
    show({"file": file, "status": "valid", **({"algorithm": found[""]} if "" in found else {"stages": found})})
