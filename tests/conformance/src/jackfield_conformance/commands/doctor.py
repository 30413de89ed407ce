"""``jackfield plugins doctor``: try plugins where they will run, and say what to fix.

Each plugin gets a process of its own (of a configured interpreter, ``[env].python`` of its manifest, or this one) and a
deadline, so that one that hangs, crashes or ends the process is named and reaches no other.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

from jackfield.cli.commands import deadline_option, json_option, kind_option, report, show
from jackfield.plugins import PluginRecord, discover
from jackfield.plugins.interpreters import Introduction, look
from jackfield_conformance.certificates import find_certification

_MARKS = {"ok": "ok     ", "stale": "STALE  ", "problem": "PROBLEM"}


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@kind_option
@click.option(
    "--python",
    "pythons",
    multiple=True,
    metavar="PATH",
    help="Look at this interpreter instead of plugins; repeatable.",
)
@click.option(
    "--config",
    "file",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Try the plugins of this configuration, each in the interpreter that it has there.",
)
@deadline_option(30.0, "Seconds for each plugin and interpreter.")
@json_option
@click.pass_context
def doctor(
    ctx: click.Context,
    names: tuple[str, ...],
    kind: str | None,
    pythons: tuple[str, ...],
    file: str | None,
    deadline: float,
    as_json: bool,
) -> None:
    """Try plugins where they will run, all or those NAMEd, and print what to fix.

    Exit code: 0 fine, 1 problems, 2 could not run.
    """
    interpreters: dict[str, dict[str, Any]] = {}
    plugins: list[dict[str, Any]] = []
    echo: Callable[[str], None] = (lambda text: None) if as_json else click.echo
    try:
        records, own = ([], {}) if pythons else _chosen(names, kind, file)
        for python in pythons:
            _tell(interpreters, look(python, seconds=deadline), echo)
        for record in records:
            found = None
            if record.error is None and record.manifest is not None:
                found = look(own.get(record.kind, record.manifest.env.python), record, deadline, importing=True)
                _tell(interpreters, found, echo)
            plugins.append(_report(record, found, echo))
    except Exception as error:  # the doctor itself failed, which is not a problem that it found
        report(ctx, error, exit_code=2)
    ill = sum(bool(each["problems"]) for each in plugins)
    healthy = not ill and not any(each["problems"] for each in interpreters.values())
    status = "ok" if healthy else "problems"
    if as_json:
        show({"status": status, "interpreters": [*interpreters.values()], "plugins": plugins})
    elif plugins:
        click.echo(f"{len(plugins)} plugins, {ill} with problems")
    ctx.exit(0 if healthy else 1)


def _chosen(
    names: tuple[str, ...], kind: str | None, file: str | None
) -> tuple[Iterable[PluginRecord], Mapping[str, str]]:
    """Return the plugins to try, and the interpreters that a configuration gives to kinds."""
    registry = discover()
    chosen = {(each.kind, each.name) for each in (registry.resolve(name, kind) for name in names)}
    records: Iterable[PluginRecord] = registry.records(kind)
    own: Mapping[str, str] = {}
    if file is not None:
        from jackfield.compose.checks import interpreters
        from jackfield.config import load_config

        config = load_config(file)
        records = [registry.resolve(name, each) for each, name in config.plugins.items() if kind in (None, each)]
        own = interpreters(config, registry)
    return [record for record in records if not names or (record.kind, record.name) in chosen], own


def _tell(interpreters: dict[str, dict[str, Any]], found: Introduction, echo: Callable[[str], None]) -> None:
    """Report on an interpreter, the first time that it is seen."""
    if found.path in interpreters:
        return
    status, problems = ("ok", ()) if found.usable else ("problem", found.problems)
    interpreters[found.path] = {
        "path": found.path,
        "status": status,
        "python": found.python,
        "versions": dict(found.versions),
        "seconds": round(found.seconds, 3),
        "problems": [problem.as_dict() for problem in problems],
    }
    versions = ", ".join(f"{name} {version or '-'}" for name, version in found.versions.items())
    echo(f"{_MARKS[status]} interpreter {found.path}: Python {found.python or '-'}, {versions}")
    for problem in problems:
        echo(textwrap.indent(str(problem), "    "))


def _report(record: PluginRecord, found: Introduction | None, echo: Callable[[str], None]) -> dict[str, Any]:
    """Print and return the JSON-ready report on a plugin; ``found`` is None if its record is already broken."""
    problems = found.problems if found is not None else (record.error,) if record.error is not None else ()
    certification = find_certification(record)
    stale = certification.stale if certification else ""
    status = "problem" if problems else "stale" if stale else "ok"
    tried = f", {found.seconds:.1f} s" if found else ""
    echo(f"{_MARKS[status]} {record.label}, ABI {record.abi or '-'}{tried}")
    for note in [*map(str, problems), *([stale] if stale else [])]:
        echo(textwrap.indent(note, "    "))
    return {
        **{name: getattr(record, name) for name in ("name", "kind", "abi", "distribution", "version")},
        "status": status,
        "stale": stale,
        "python": found.path if found else None,
        "versions": dict(found.versions) if found else {},
        "seconds": round(found.seconds, 3) if found else 0.0,
        "problems": [problem.as_dict() for problem in problems],
    }
