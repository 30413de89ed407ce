"""The pages for users of other frameworks name settings that exist, with values that these settings take."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

from jackfield.abc import KINDS
from jackfield.cli import main
from jackfield.plugins import Registry, installed

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "guides").glob("coming_from_*.md"))
ROW = re.compile(r"^\|(?:[^|]*)\|([^|]*)\|", re.MULTILINE)
SETTING = re.compile(r"`([a-z_]+(?:\.[a-z_]+)*)(?:: ?([\w-]+))?`")


def known(registry: Registry) -> dict[str, str]:
    """All settings, with what the table of settings says of their values; a plugin's by the name of its section."""
    text = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    found = dict(re.findall(r"^\| `([a-z_.]+)` \|([^|]*)\|", text, re.MULTILINE))
    for record in registry.records():
        found |= {f"{record.kind}.{field.name}": "" for field in attrs.fields(record.settings_class)}
    names = {f"{kind}.name": ", ".join(f"`{record.name}`" for record in registry.records(kind)) for kind in KINDS}
    for kind, name in (("algorithm", "algorithm"), ("loss", "algorithm.loss"), ("advantages", "algorithm.advantages")):
        listed = CliRunner().invoke(main, ["algorithms", "list", "--kind", kind]).output
        names[f"{name}.name"] = ", ".join(f"`{line.split()[1]}`" for line in listed.splitlines()[1:])
    return found | names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_exists(page: Path) -> None:
    settings, sections = known(installed()), set()
    for name in settings:
        sections |= {name.rpartition(".")[0], name}
    cells = [cell for cell in ROW.findall(page.read_text(encoding="utf-8")) if "---" not in cell]
    named = [match.groups() for cell in cells for match in SETTING.finditer(cell)]
    assert len(named) > 20
    for name, value in named:
        if "." in name:
            assert name in sections, f"{page.name} names the setting {name}"
        if value is not None and "`" in settings.get(name, ""):
            assert f"`{value}`" in settings[name], f"{page.name} gives {name} the value {value}"
