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
    found = list(_described(kind))
    show(found, _table(found))


@algorithms.command("show")
@click.argument("name")
@_kind_option
@json_option
def show_algorithm(name: str, kind: str | None, as_json: bool) -> None:
    """Show what NAME is: equation, paper, options, what it needs. One name may stand for parts of several kinds."""
    found = [one for one in _described(kind) if one["name"] == name]
    if not found:
        _unknown(name, kind)
    show(found, ("\n" * bool(number) + "\n".join(_lines(one)) for number, one in enumerate(found)))


def _described(kind: str | None) -> Iterator[dict[str, Any]]:
    from jackfield.algorithms import names, part
    from jackfield.algorithms.named import describe

    for one in _KINDS if kind is None else (kind,):
        for name in names(one):
            yield describe(part(one, name))


def _unknown(name: str, kind: str | None) -> None:
    import difflib

    from jackfield.errors import ConfigError

    known = sorted({one["name"] for one in _described(kind)})
    close = difflib.get_close_matches(name, known, n=1)
    raise ConfigError(
        f"nothing is named {name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""),
        code="algorithm.unknown",
        expected="one of " + ", ".join(known),
        found=name,
    )


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
        if isinstance(value, Mapping):
            value = ", ".join(f"{option}={default}" for option, default in value.items())
        elif isinstance(value, list):
            value = ", ".join(value)
        label = f"  {key.replace('_', ' ')}: "
        yield from textwrap.wrap(str(value), 110, initial_indent=label, subsequent_indent=" " * 4)
