"""``jackfield plugins new``: write a complete project of a small plugin that works.

The templates are files below ``templates/``, see the README there.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

import click

from jackfield import __version__
from jackfield.abc import ABI_VERSIONS, KINDS
from jackfield.errors import PluginError
from jackfield.plugins.registry import GROUPS

_SUFFIX = ".template"
_PACKAGE_FOLDER = "__package__"
_NAME = re.compile(r"[a-z][a-z0-9]*(?:[_-][a-z0-9]+)*")
_LONGEST_NAME = 40
_PLACEHOLDER = re.compile(r"(?<!\$)\{\{(\w+)\}\}")  # `${{ … }}` is GitHub's

#: The end of the class's name, and the first sentence of the plugin, by kind.
_KINDS: dict[str, tuple[str, str]] = {
    "engine": ("Engine", "Trains a causal language model on one device"),
    "rollout": ("Server", "Generates with a causal language model in this process"),
    "agent": ("Agent", "Has the model review its own answer"),
    "reward": ("Reward", "Scores a number by its distance from the ground truth"),
    "transfer_queue": ("Queue", "Stores columns of samples"),
    "checkpoint_engine": ("CheckpointEngine", "Moves weights from the trainer to inference workers"),
}


@click.command()
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("name")
def new(kind: str, name: str) -> None:
    """Write a new plugin into ./jackfield-KIND-NAME/: a small one that works, to change into your own."""
    folder = write_scaffold(kind, name, Path.cwd())
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        click.echo(f"wrote {file.relative_to(folder.parent)}")
    click.echo(f"next: pip install --editable {folder.name} && jackfield plugins check {name} --kind {kind}")


def available_kinds() -> tuple[str, ...]:
    """Return the kinds that there are templates for."""
    return tuple(kind for kind in KINDS if _templates(kind).is_dir())


def write_scaffold(kind: str, name: str, parent: Path) -> Path:
    """Write the project ``jackfield-KIND-NAME`` into a folder of its own in ``parent``, and return that.

    The name is lower-case words of letters and digits, the first a letter, joined by ``_`` or ``-``.

    Raises:
        PluginError: ``plugin.scaffold``: an unknown kind, a bad name, or something is there already. Nothing is
            written then.
    """
    values = _values(kind, name)
    target = parent / f"jackfield-{kind}-{name}"
    if target.exists() or target.is_symlink():
        fix = "choose another name, or move what is there out of the way"
        raise _refused(f"{target.name} is there already", "no file or folder of this name", target, fix)
    # written beside its place and then moved, so that an interrupted call leaves no half project
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=parent))
    try:
        for path, text in _texts(kind, values):
            file = scratch / "project" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        (scratch / "project").rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _values(kind: str, name: str) -> dict[str, str]:
    """Return the values of the placeholders."""
    if kind not in available_kinds():
        expected = "one of " + ", ".join(available_kinds())
        raise _refused(f"there is no scaffold for the kind '{kind}'", expected, repr(kind), "choose one of them")
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        expected = (
            "lower-case letters and digits, words joined by '_' or '-', the first character a letter, at most"
            f" {_LONGEST_NAME} characters: llama_judge"
        )
        raise _refused("a plugin cannot have this name", expected, repr(name), f"for example: {_near_name(name)}")
    suffix, description = _KINDS[kind]
    return {
        "name": name,
        "kind": kind,
        "package": f"jackfield_{kind}_{name.replace('-', '_')}",
        "distribution": f"jackfield-{kind}-{name}".replace("_", "-"),
        "class_name": "".join(word.capitalize() for word in re.split("[_-]", name)) + suffix,
        "group": GROUPS[kind],
        "abi": ABI_VERSIONS[kind],
        "description": description,
        "jackfield": ".".join(__version__.split(".")[:2]),
    }


def _refused(message: str, expected: str, found: object, fix: str) -> PluginError:
    return PluginError(message, code="plugin.scaffold", expected=expected, found=found, fix=fix)


def _near_name(name: str) -> str:
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    near = "_".join(words).lstrip("0123456789_")[:_LONGEST_NAME].rstrip("_")
    return near or "my_plugin"


def _texts(kind: str, values: Mapping[str, str]) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield path and content of each file; files of the kind replace common ones."""
    found: dict[PurePosixPath, Traversable] = {}
    for folder in ("common", kind):
        found.update(_walk(_templates(folder), PurePosixPath()))
    for path, source in sorted(found.items()):
        where = PurePosixPath(*(values["package"] if part == _PACKAGE_FOLDER else part for part in path.parts))
        yield (
            PurePosixPath(_filled(str(where), values, path)),
            _filled(source.read_text(encoding="utf-8"), values, path),
        )


def _walk(folder: Traversable, path: PurePosixPath) -> Iterator[tuple[PurePosixPath, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, path / entry.name)
        elif entry.name.endswith(_SUFFIX):
            yield path / entry.name.removesuffix(_SUFFIX), entry


def _filled(text: str, values: Mapping[str, str], path: PurePosixPath) -> str:
    def value(found: re.Match[str]) -> str:
        assert found[1] in values, f"the template {path} has the unknown placeholder {found[0]}"
        return values[found[1]]

    return _PLACEHOLDER.sub(value, text)


def _templates(folder: str) -> Traversable:
    return files("jackfield_conformance") / "templates" / folder
