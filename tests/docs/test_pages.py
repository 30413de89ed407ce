"""Pages that speak of code name what is there."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from jackfield.abc import ABI_VERSIONS, KINDS
from jackfield.cli import main
from jackfield.plugins.manifest import Manifest

DOCS = Path(__file__).parents[2] / "docs"


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def leaves(command: click.Command, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(command, click.Group):
        return [(path, command)]
    context = click.Context(command)
    names = command.list_commands(context)
    found = [(name, command.get_command(context, name)) for name in names]
    return [leaf for name, inner in found if inner is not None for leaf in leaves(inner, (*path, name))]


def test_the_readme_and_the_landing_page_say_the_same() -> None:
    """The pitch, the code, which a test runs, and the curve."""
    index, readme = read("index.md"), (DOCS.parent / "README.md").read_text(encoding="utf-8")
    pitch = re.findall(r"\A# Jackfield\n\n(.*?)\n\n", readme, re.S)
    assert pitch == re.findall(r"\A# Jackfield\n\n(.*?)\n\n", index, re.S)
    code = (DOCS.parent / "examples" / "python" / "six_lines.py").read_text(encoding="utf-8")
    assert f"```python\n{code}```" in readme
    assert "../examples/python/six_lines.py" in index
    for picture in ("images/quickstart_three_seeds.png",):
        assert f"](docs/{picture})" in readme
        assert f"{{image}} {picture}" in index
    claims = [re.findall(r"^This is `make quickstart`.*?in 30 steps", text, re.M | re.S) for text in (index, readme)]
    assert claims[0] == claims[1] != []


def test_every_command_and_option_is_documented() -> None:
    text = read("reference/cli.md")
    for path, command in leaves(main, ("jackfield",)):
        assert " ".join(path) in text
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.opts[0] in text, f"{' '.join(path)} {option.opts[0]}"


def test_every_version_of_a_contract_is_documented() -> None:
    text = read("reference/abi.md")
    for kind, version in ABI_VERSIONS.items():
        assert re.search(rf"^\| `{kind}` \|.*\| {re.escape(version)} \|$", text, re.M), kind


def test_every_key_of_a_manifest_is_documented() -> None:
    text = read("plugins/index.md")
    for name in Manifest.__annotations__:
        assert f"`{name}`" in text or f"`[{name}" in text, name


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_of_a_contract_is_documented(kind: str) -> None:
    from jackfield.abc import CONTRACTS
    from jackfield.plugins.manifest import public_members

    text = read(f"plugins/{kind}.md")
    for name in public_members(CONTRACTS[kind]):
        assert name == "__init__" or re.search(rf"\b{name}\b", text), name


@pytest.mark.needs("module:jackfield_conformance")
@pytest.mark.parametrize("kind", KINDS)
def test_checks_point_to_places_that_are_there(kind: str) -> None:
    """A conformance check that fails names the page of its kind, and a heading in it."""
    from jackfield_conformance.registry import checks

    for check in checks(kind):
        page, _, anchor = check.page.partition("#")
        if page != f"docs/plugins/{kind}.md":
            continue
        headings = re.findall(r"^#+ (.*)$", (DOCS.parent / page).read_text(encoding="utf-8"), re.M)
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{check.id}: {check.page}"
