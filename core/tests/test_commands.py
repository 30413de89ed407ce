"""Commands of other packages: they are listed without an import, and a missing package says how to install it."""

from __future__ import annotations

import sys

import click
import pytest
from click.testing import CliRunner

from jackfield.cli import main
from jackfield.cli.commands import LazyGroup, plugins


@pytest.mark.parametrize(("group", "name"), [(main, "bench"), (plugins, "new")])
def test_a_missing_package_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch, group: LazyGroup, name: str) -> None:
    monkeypatch.setattr(group, "lazy", {**group.lazy, name: ("jackfield_absent.command", "")})
    monkeypatch.setattr(group, "commands", {each: one for each, one in group.commands.items() if each != name})
    path = [name] if group is main else ["plugins", name]
    refused = CliRunner().invoke(main, [*path, "x"])
    assert 2 == refused.exit_code
    assert f"[plugin.requirement] jackfield {' '.join(path)} needs jackfield-absent" in refused.stderr.replace(
        "main", "jackfield"
    )
    assert f"fix: {sys.executable} -m pip install jackfield-absent" in refused.stderr
    listed = CliRunner().invoke(main, [*path[:-1], "--help"])
    assert (0, True) == (listed.exit_code, f"  {name}" in listed.stdout)


def test_commands_are_listed_once_and_in_order() -> None:
    context = click.Context(main)
    names = main.list_commands(context)
    assert sorted({*names}) == names
    assert {"bench", "run", "plugins"} <= {*names}
