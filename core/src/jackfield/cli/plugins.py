"""``jackfield plugins list``; the other commands are in jackfield-conformance."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from jackfield.cli import LazyGroup, json_option, show

if TYPE_CHECKING:
    from jackfield.plugins import PluginRecord
    from jackfield.plugins.certificates import Certification

_KINDS = ("engine", "rollout", "agent", "reward", "transfer_queue", "checkpoint_engine")
_COMMANDS = {
    "list": ("jackfield.cli.plugins:list_plugins", "List installed plugins, without importing them."),
    "doctor": ("jackfield_conformance.commands.doctor:doctor", "Try plugins where they will run; print what to fix."),
    "check": ("jackfield_conformance.commands.check:check", "Check that a plugin keeps its contract."),
    "new": ("jackfield_conformance.commands.new:new", "Write a new plugin: a small one that works."),
}
kind_option = click.option("--kind", type=click.Choice(_KINDS), help="Only plugins of this kind.")


@click.group(cls=LazyGroup, commands=_COMMANDS)
def plugins() -> None:
    """List, check and create plugins."""


@click.command("list")
@kind_option
@json_option
def list_plugins(kind: str | None, as_json: bool) -> None:
    """List installed plugins, usable or not, without importing them."""
    import attrs

    from jackfield.plugins import discover
    from jackfield.plugins.certificates import find_certification

    found = [(record, find_certification(record)) for record in discover().records(kind)]
    rows = []
    for record, certificate in found:
        shown, stale = certificate and attrs.asdict(certificate), certificate is not None and bool(certificate.stale)
        kept = {"certified": None if stale else shown, "stale_certificate": shown if stale else None}
        rows.append({**record.as_dict(), "status": "stale" if stale else record.status, **kept})
    show(rows, _table(found, kind))


def stale_note(record: PluginRecord, reason: str) -> str:
    """Return why a certificate is no longer valid, and what to do."""
    return f"{reason}\nfix: jackfield plugins check {record.name} --kind {record.kind}"


def _table(found: list[tuple[PluginRecord, Certification | None]], kind: str | None) -> Iterator[str]:
    if not found:
        yield "no plugins are installed" if kind is None else f"no {kind} plugins are installed"
        return
    rows = [(("NAME", "KIND", "ABI", "DISTRIBUTION", "STATUS", "DESCRIPTION"), "")]
    for record, certificate in found:
        status, note = str(record.status), "" if record.error is None else str(record.error)
        if certificate is not None:
            word = "STALE certificate" if certificate.stale else "certified"
            status = f"{word} {certificate.date} ({certificate.level})"
            note = stale_note(record, certificate.stale) if certificate.stale else ""
        provider, description = f"{record.distribution} {record.version}", record.as_dict()["description"]
        rows.append(((record.name, record.kind, record.abi or "-", provider, status, description), note))
    widths = [max(map(len, column)) for column in zip(*(cells for cells, _ in rows), strict=True)]
    for cells, note in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        if note:
            yield textwrap.indent(note, "    ")
