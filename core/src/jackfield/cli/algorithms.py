"""``jackfield algorithms list|show``."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from jackfield.cli import json_option, show

_KINDS = ("algorithm", "advantages", "loss", "kl", "correction", "aggregation", "distillation", "shaping")
_kind_option = click.option("--kind", type=click.Choice(_KINDS), help="Only parts of this kind.")


@click.group()
def algorithms() -> None:
    """List algorithms and their parts."""


@algorithms.command("list")
@_kind_option
@json_option
def list_algorithms(kind: str | None, as_json: bool) -> None:
    """List bundles, estimators, losses and the other parts."""
    found = _described(kind)
    show(found, _table(found))


@algorithms.command("show")
@click.argument("name")
@_kind_option
@json_option
def show_algorithm(name: str, kind: str | None, as_json: bool) -> None:
    """Show what NAME is: equation, paper, options, what it needs. One name may stand for parts of several kinds."""
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


def _table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    width = max(len(one["name"]) for one in found)
    for number, (kind, ones) in enumerate(itertools.groupby(found, key=lambda one: one["kind"])):
        yield ("\n" if number else "") + str(kind)
        for one in ones:
            yield f"  {one['name'].ljust(width)}  {textwrap.shorten(one['equation'], 110, placeholder=' …')}"


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
