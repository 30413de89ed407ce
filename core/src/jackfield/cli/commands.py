"""Most commands, and what commands share: options, and how results and errors are printed."""

from __future__ import annotations

import importlib
import json
import math
import sys
import textwrap
import time
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from jackfield.errors import ConfigError, JackfieldError, PluginError

_FOLDER = click.argument("folder", type=click.Path(path_type=Path))
_LOOK_SECONDS = 120.0  #: for importing a worker's plugin in its new environment
_PARTS = ("algorithm", "advantages", "loss", "kl", "correction", "aggregation", "distillation", "shaping")
role_option = click.option(
    "--role",
    type=click.Choice(["explore", "reward", "train"]),
    help="Only this role of a run whose roles are processes of their own: start `jackfield queue serve` first.",
)
_part_option = click.option("--kind", type=click.Choice(_PARTS), help="Only components of this kind.")
_KINDS = ("engine", "rollout", "agent", "reward", "transfer_queue", "checkpoint_engine", "operator", "hooks")
kind_option = click.option("--kind", type=click.Choice(_KINDS), help="Only plugins of this kind.")
_JSON = "jackfield.json"


class LazyGroup(click.Group):
    """A click group with commands in modules of other packages, which are imported when they are used."""

    lazy: Mapping[str, tuple[str, str]]  #: module and help by command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *self.lazy})

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the commands without importing them."""
        helps = {name: command.get_short_help_str() for name, command in self.commands.items()}
        offered = {**{name: text for name, (_, text) in self.lazy.items()}, **helps}
        names = [name for name in sorted(offered) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=offered[name]) for name in names]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; one of a package that is not installed ends with what to install."""
        if cmd_name in self.lazy and cmd_name not in self.commands:
            package = (name := self.lazy[cmd_name][0]).partition(".")[0]
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name != package:
                    raise
                needed, fix = (dist := package.replace("_", "-")), f"{sys.executable} -m pip install {dist}"
                details = {"where": sys.executable, "expected": needed, "found": "not installed", "fix": fix}
                report(ctx, PluginError(f"{ctx.command_path} {cmd_name} needs {needed}", **details), exit_code=2)
            self.add_command(getattr(module, cmd_name))
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        own = {name: command.get_short_help_str(formatter.width) for name, command in self.commands.items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted({**{name: text for name, (_, text) in self.lazy.items()}, **own}.items()))


def report(ctx: click.Context, error: Exception, *, exit_code: int = 1) -> NoReturn:
    """Print an error and exit. With ``--json``, print it as an object on stdout."""
    fields = error.as_dict() if isinstance(error, JackfieldError) else {"message": f"{type(error).__name__}: {error}"}
    if ctx.meta.get(_JSON):
        click.echo(json.dumps({"error": fields}, indent=2))
    else:
        click.echo(str(error) if "code" in fields else f"could not run: {fields['message']}", err=True)
    ctx.exit(exit_code)


def show(found: Any, *columns: str) -> None:
    """Print a result: as JSON with ``--json``, else as YAML, or records as a table of the ``columns`` with values.

    Objects in a column are printed as YAML below their record.
    """
    text = json.dumps(found, indent=2, ensure_ascii=False).encode(errors="backslashreplace").decode()
    if click.get_current_context().meta.get(_JSON):
        click.echo(text)
    elif not columns:
        click.echo(_yaml(json.loads(text)), nl=False)
    elif not found:
        click.echo("none")
    else:
        cells = {name: [name.replace("_", " ").upper(), *(_cell(one.get(name)) for one in found)] for name in columns}
        shown = [column for column in cells.values() if any(cell != "-" for cell in column[1:])]
        widths = [max(map(len, column)) for column in shown]
        for record, row in zip([{}, *found], zip(*shown, strict=True), strict=True):
            click.echo("  ".join(map(str.ljust, row, widths)).rstrip())
            if below := {name: record[name] for name in columns if isinstance(record.get(name), Mapping)}:
                click.echo(textwrap.indent(_yaml(below, flow=False), "    "), nl=False)


def _cell(value: Any) -> str:
    """Return a value as it is in a table; ``-`` if it is empty or printed below."""
    if value is None or isinstance(value, Mapping):
        return "-"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text.replace("\n", " ").encode(errors="replace").decode() or "-"  # half of a surrogate pair cannot be shown


def _yaml(value: Any, *, flow: bool | None = None) -> str:
    """Format plain values as YAML without line breaks in texts. By default, objects of plain values are on one line."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def represent_str(self, data: str) -> yaml.ScalarNode:
            return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if "\n" in data else None)

    Dumper.add_representer(str, Dumper.represent_str)
    options: Any = {"allow_unicode": True, "default_flow_style": flow, "sort_keys": False, "width": math.inf}
    return str(yaml.dump(value, Dumper=Dumper, **options))


def config_arguments(command: click.decorators.FC) -> click.decorators.FC:
    """Add the arguments FILE and OVERRIDES, which :func:`jackfield.config.load_config` takes."""
    return click.argument("file", type=click.Path(dir_okay=False))(click.argument("overrides", nargs=-1)(command))


def deadline_option(default: float, help: str) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """Return the option ``--deadline``, in seconds."""
    positive = click.FloatRange(min=0, min_open=True)
    return click.option("--deadline", type=positive, default=default, show_default=True, help=help)


def json_option(command: click.decorators.FC) -> click.decorators.FC:
    """Add ``--json`` to a command as ``as_json``; results and errors are then JSON."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        ctx.meta[_JSON] = value
        return value

    return click.option("--json", "as_json", is_flag=True, callback=remember, help="Print JSON.")(command)


@click.command()
@config_arguments
@click.option("--address", metavar="HOST:PORT", help="Run in this Ray cluster.")
@role_option
def run(file: str, overrides: tuple[str, ...], address: str | None, role: Any) -> None:
    """Run training, or its stages, from a config FILE. OVERRIDES are settings such as schedule.steps=10."""
    from jackfield.config import load_stages

    if address is not None:
        overrides = (*overrides, "cluster.name=ray", f"cluster.ray.address={address}")
    *_, config = (stages := load_stages(file, overrides, served=role is not None)).values()
    from jackfield.compose.builder import Stop

    stop = Stop(config.checkpoint.grace_seconds)
    try:
        with stop.listening():
            from jackfield.compose.run import run_stages

            result = run_stages(stages, click.echo, role=role or "all", stop=stop)
    except CancelledError:
        if stop.code is None:
            raise
        click.echo(f"ended; the same command goes on from the newest checkpoint in {config.folder}, if there is one")
        sys.exit(stop.code)
    if role == "explore":
        click.echo(f"explored up to weights {result.steps}; see {result.folder}")
    elif role == "reward":
        click.echo(f"{result.steps} groups rewarded; see {result.folder}")
    elif result.stopped:
        click.echo(
            f"stopped after {result.steps} steps; the same command {'goes on' if result.steps else 'begins again'}"
        )
        sys.exit(stop.code)
    else:
        if result.finished_before:
            click.echo(f"{result.folder} holds the finished run; raise a limit, or take another folder")
        done = f"{result.steps} steps done; model in {result.model}"
        click.echo(done if config.mode != "explore" else f"{result.steps} batches of samples in {result.folder}")


@click.command()
@_FOLDER
@click.argument("count", type=int, required=False)
@deadline_option(3600.0, "Seconds to wait until the run has COUNT.")
@json_option
def replicas(folder: Path, count: int | None, deadline: float, as_json: bool) -> None:
    """List, add or remove replicas of an active run.

    With COUNT, the run in FOLDER gets or loses replicas until it has COUNT. A new one gets requests once it has
    acknowledged the engine's weights. A removed one gets no new requests and finishes its current ones; after
    deadlines.drain seconds, the rest are generated again on other replicas.
    """
    from attrs import asdict

    from jackfield.cluster.control import scale_replicas

    rows = [asdict(state) for state in scale_replicas(folder, count, seconds=deadline)]
    show(rows, *rows[0])


@click.group()
def checkpoint() -> None:
    """List checkpoints and export models."""


@checkpoint.command("list")
@_FOLDER
@json_option
def list_checkpoints(folder: Path, as_json: bool) -> None:
    """List checkpoints of the run in FOLDER, oldest first; mark those with missing files."""
    from jackfield.trainer.checkpoint import Checkpoint, CheckpointStore

    rows: list[dict[str, Any]] = []
    for step, each in CheckpointStore(folder / "checkpoints").checkpoints().items():
        if isinstance(each, Checkpoint):
            rows.append({"step": step, "folder": str(each.folder), "bytes": each.bytes})
        else:
            damaged = {"where": str(each.where), "expected": each.expected, "found": each.found}
            rows.append({"step": step, "damaged": damaged})
    show(rows, "step", "folder", "bytes", "damaged")


@checkpoint.command()
@_FOLDER
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--merge", is_flag=True, help="Merge the LoRA adapter into its base model and write the whole model.")
@click.option("--averaged", is_flag=True, help="Write the average of optimizer.ema_decay instead of the weights.")
def export(folder: Path, out: Path, merge: bool, averaged: bool) -> None:
    """Write the model of a checkpoint to OUT, a Hugging Face folder for from_pretrained.

    FOLDER is a checkpoint or a run's folder (its newest undamaged checkpoint is used). If the run trains an adapter,
    OUT holds the adapter for PEFT, unless --merge is given. OUT also gets a model card.
    """
    from jackfield.compose.export import export_checkpoint
    from jackfield.trainer.checkpoint import find_checkpoint

    found = find_checkpoint(folder)
    export_checkpoint(found, out, merge=merge, averaged=averaged)
    click.echo(f"model of step {found.step} in {out}")


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
    there = [each.get("name") for each in config.data.pipeline.entries if each.get("interpreter") == name]
    records = [registry.resolve(getattr(config, kind).name, kind) for kind in workers]
    records += [registry.resolve(str(operator), "operator") for operator in dict.fromkeys(there)]
    others = [registry.resolve(getattr(config, kind).name, kind) for kind in shared]
    comes_along = tuple(dict.fromkeys(["jackfield", *(record.distribution for record in (*records, *others))]))
    folder = settings.path(name)
    made = create_environment(settings, folder, comes_along, deadline)
    click.echo(f"{folder}: made in {time.monotonic() - started:.0f} s" if made else f"{folder}: there already")
    for record in records:
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
@_part_option
@json_option
def list_algorithms(kind: str | None, as_json: bool) -> None:
    """List bundles, estimators, losses and other components, also those of installed packages of hooks."""
    found = _described(kind)
    for each in () if as_json else found:
        each["equation"] = textwrap.shorten(each["equation"], 110, placeholder=" …")
    show(found, "kind", "name", "origin", "equation")


@algorithms.command("show")
@click.argument("name")
@_part_option
@json_option
def show_algorithm(name: str, kind: str | None, as_json: bool) -> None:
    """Show origin, equation, paper, options and inputs of the components that are named NAME."""
    from jackfield.algorithms.registry import unknown_part

    known = _described(kind)
    found = [one for one in known if one["name"] == name]
    if not found:
        raise unknown_part(kind or "part", name, sorted({one["name"] for one in known}))
    show(found)


def _described(kind: str | None) -> list[dict[str, Any]]:
    from jackfield.compose.parts import describe_parts

    return describe_parts([one for one in _PARTS if kind in (None, one)])


@click.group(cls=LazyGroup)
def plugins() -> None:
    """List, check and create plugins."""


@plugins.command("list")
@kind_option
@json_option
def list_plugins(kind: str | None, as_json: bool) -> None:
    """List installed plugins, usable or not, without importing them.

    Certificates of conformance are shown if jackfield-conformance, which verifies them, is installed.
    """
    import attrs

    from jackfield.plugins import discover

    certificates, found = None, []
    with suppress(ModuleNotFoundError):
        certificates = importlib.import_module("jackfield_conformance.certificates")
    for record in discover().records(kind):
        certificate = certificates.find_certification(record) if certificates else None
        fields = {**record.as_dict(), "certified": None, "stale_certificate": None}
        if certificate is not None and certificate.stale:
            fields |= {"status": "stale", "stale_certificate": attrs.asdict(certificate)}
        elif certificate is not None:
            fields["certified"] = attrs.asdict(certificate) if as_json else f"{certificate.date} ({certificate.level})"
        found.append(fields)
    names = ("name", "kind", "abi", "distribution", "version", "status", "certified", "description")
    show(found, *names, "error", "stale_certificate")
