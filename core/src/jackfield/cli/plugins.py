"""``jackfield plugins list|doctor|check|new``."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jackfield.cli import json_option
from jackfield.errors import JackfieldError

if TYPE_CHECKING:
    from jackfield.plugins import PluginRecord
    from jackfield.plugins.certificates import Certification
    from jackfield.plugins.doctor import PluginReport
    from jackfield.plugins.interpreters import InterpreterReport

__all__ = ["plugins"]

_KINDS = ("engine", "rollout", "agent", "reward", "transfer_queue", "checkpoint_engine")
_MARKS = {"ok": "ok     ", "stale": "STALE  ", "problem": "PROBLEM"}
_TIERS = ("base", "capability", "stress", "gpu")
_kind_option = click.option("--kind", type=click.Choice(_KINDS), help="Only plugins of this kind.")


@click.group()
def plugins() -> None:
    """Look at the installed plugins, check one, begin a new one."""


@plugins.command("list")
@_kind_option
@json_option
def list_plugins(kind: str | None, as_json: bool) -> None:
    """List what is installed, usable or not; imports no plugin."""
    from jackfield.plugins import discover
    from jackfield.plugins.certificates import find_certification

    records = discover().records(kind)
    certified = [find_certification(record) for record in records]
    if as_json:
        rows = [
            {**record.as_dict(), "status": _status(record, found), **_certificates(found)}
            for record, found in zip(records, certified, strict=True)
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    if not records:
        click.echo("no plugins are installed" if kind is None else f"no {kind} plugins are installed")
        return
    for line in _table(records, certified):
        click.echo(line)


@plugins.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@_kind_option
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
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds for each plugin and interpreter.",
)
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
    try:
        healthy = _examine(_reports(names, kind, pythons, file, deadline), as_json)
    except Exception as error:  # the doctor itself failed: told apart from a problem that it found
        fields = (
            error.as_dict() if isinstance(error, JackfieldError) else {"message": f"{type(error).__name__}: {error}"}
        )
        click.echo(json.dumps({"error": fields}, indent=2) if as_json else f"could not run: {error}", err=not as_json)
        ctx.exit(2)
    ctx.exit(0 if healthy else 1)


@plugins.command()
@click.argument("name")
@_kind_option
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    type=click.Choice(_TIERS),
    help="Run this tier of checks, too, beside base and capability; repeatable.",
)
@click.option(
    "--certificate",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the JSON certificate here, too.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    default=1800.0,
    show_default=True,
    help="Seconds for all checks together; each has a deadline of its own.",
)
@json_option
@click.pass_context
def check(
    ctx: click.Context,
    name: str,
    kind: str | None,
    tiers: tuple[str, ...],
    certificate: Path | None,
    deadline: float,
    as_json: bool,
) -> None:
    """Check that the plugin NAME keeps its contract (needs jackfield-conformance).

    Exit code: 0 certified, 1 not certified, 2 could not run.
    """
    from jackfield.plugins.certificates import run_checks

    try:
        found, kept = run_checks(name, kind, tiers=tiers, deadline=deadline, quiet=as_json)
        text = json.dumps(found, indent=2)
        if certificate is not None:
            certificate.write_text(text + "\n", encoding="utf-8")
    except (JackfieldError, OSError) as error:
        fields = error.as_dict() if isinstance(error, JackfieldError) else {"message": str(error)}
        click.echo(json.dumps({"error": fields}, indent=2) if as_json else f"could not run: {error}", err=not as_json)
        ctx.exit(2)
    if as_json:
        click.echo(text)
    else:
        click.echo(f"certificate: {certificate or kept}")
    ctx.exit(1 if found["level"] == "none" else 0)


@plugins.command()
@click.argument("kind", type=click.Choice(_KINDS))
@click.argument("name")
def new(kind: str, name: str) -> None:
    """Write a new plugin into ./jackfield-KIND-NAME/: a small one that works, to change into your own."""
    from jackfield.plugins.scaffold import write_scaffold

    folder = write_scaffold(kind, name, Path.cwd())
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        click.echo(f"wrote {file.relative_to(folder.parent)}")
    click.echo(f"next: pip install --editable {folder.name} && jackfield plugins check {name} --kind {kind}")


def _examine(found_out: Iterator[InterpreterReport | PluginReport], as_json: bool) -> bool:
    from jackfield.plugins.interpreters import InterpreterReport

    interpreters: list[InterpreterReport] = []
    reports: list[PluginReport] = []
    for report in found_out:
        if isinstance(report, InterpreterReport):
            interpreters.append(report)
            lines = _interpreter_lines(report)
        else:
            reports.append(report)
            lines = _plugin_lines(report)
        if not as_json:
            for line in lines:
                click.echo(line)
    healthy = not any(r.problem for r in interpreters) and not any(r.problems for r in reports)
    if as_json:
        found = {
            "status": "ok" if healthy else "problems",
            "interpreters": [report.as_dict() for report in interpreters],
            "plugins": [report.as_dict() for report in reports],
        }
        click.echo(json.dumps(found, indent=2))
    elif reports:
        ill = sum(bool(report.problems) for report in reports)
        click.echo(f"{len(reports)} plugins, {ill} with problems")
    return healthy


def _reports(
    names: Sequence[str], kind: str | None, pythons: Sequence[str], file: str | None, deadline: float
) -> Iterator[InterpreterReport | PluginReport]:
    from jackfield.plugins import discover
    from jackfield.plugins.doctor import examine
    from jackfield.plugins.interpreters import preflight

    if pythons:
        for python in pythons:
            yield preflight(python, deadline)
        return
    registry = discover()
    chosen = [registry.resolve(name, kind) for name in names]
    records: Sequence[PluginRecord] = registry.records(kind)
    own: Mapping[str, str] = {}
    if file is not None:
        from jackfield.compose.selection import interpreters, records_of
        from jackfield.config import load_config

        config = load_config(file)
        records = [record for record in records_of(config, registry) if kind in (None, record.kind)]
        own = interpreters(config, registry)
    if names:
        records = tuple(r for r in records if any((r.kind, r.name) == (c.kind, c.name) for c in chosen))
    yield from examine(records, deadline, own)


def _table(records: Sequence[PluginRecord], certified: Sequence[Certification | None]) -> Iterator[str]:
    rows = [("NAME", "KIND", "ABI", "DISTRIBUTION", "STATUS", "DESCRIPTION")]
    for record, found in zip(records, certified, strict=True):
        description = record.manifest.description if record.manifest else ""
        provider = f"{record.distribution} {record.version}"
        status = _status(record, found)
        if found is not None:
            status = f"{'STALE certificate' if found.stale else 'certified'} {found.date} ({found.level})"
        rows.append((record.name, record.kind, record.abi or "-", provider, status, description))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    notes = [_note(record, found) for record, found in zip(records, certified, strict=True)]
    for row, note in zip(rows, ["", *notes], strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[-1]]).rstrip()
        if note:
            yield textwrap.indent(note, "    ")


def _status(record: PluginRecord, found: Certification | None) -> str:
    return "stale" if found is not None and found.stale else record.status


def _note(record: PluginRecord, found: Certification | None) -> str:
    """What is wrong with a plugin, and what to do."""
    if record.error is not None:
        return str(record.error)
    return _stale(record, found.stale) if found is not None and found.stale else ""


def _stale(record: PluginRecord, reason: str) -> str:
    return f"{reason}\nfix: jackfield plugins check {record.name} --kind {record.kind}"


def _certificates(found: Certification | None) -> dict[str, dict[str, str] | None]:
    """The certificate that counts, and the one that does not count any more."""
    shown = None if found is None else found.as_dict()
    stale = shown is not None and bool(shown["stale"])
    return {"certified": None if stale else shown, "stale_certificate": shown if stale else None}


def _interpreter_lines(report: InterpreterReport) -> Iterator[str]:
    versions = ", ".join(f"{name} {version or '-'}" for name, version in report.versions.items())
    mark = _MARKS["ok" if report.problem is None else "problem"]
    yield f"{mark} interpreter {report.path}: Python {report.python or '-'}, {versions}"
    if report.problem is not None:
        yield _indented(report.problem)


def _plugin_lines(report: PluginReport) -> Iterator[str]:
    record = report.record
    tried = f", {report.seconds:.1f} s" if report.python else ""
    yield f"{_MARKS[report.status]} {record.label}, ABI {record.abi or '-'}{tried}"
    for problem in report.problems:
        yield _indented(problem)
    if report.stale:
        yield textwrap.indent(_stale(record, report.stale), "    ")


def _indented(error: JackfieldError) -> str:
    return textwrap.indent(str(error), "    ")
