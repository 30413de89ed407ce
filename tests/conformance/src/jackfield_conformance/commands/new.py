"""``jackfield plugins new``: write a complete project with a small working plugin, from the files in ``templates/``."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import click

from jackfield import __version__
from jackfield.abc import ABI_VERSIONS, KINDS
from jackfield.errors import PluginError
from jackfield.plugins.registry import GROUPS

_TEMPLATES = Path(__file__).parents[1] / "templates"
_SUFFIX = ".template"
_PACKAGE_FOLDER = "__package__"
_NAME = re.compile(r"[a-z][a-z0-9]*(?:[_-][a-z0-9]+)*")
_LONGEST_NAME = 40
_PLACEHOLDER = re.compile(r"(?<!\$)\{\{(\w+)\}\}")  # `${{ … }}` is GitHub's

#: The suffix of the class's name, and the plugin's first sentence, by kind.
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
    """Write a new plugin into ./jackfield-KIND-NAME/: a small working one as a starting point."""
    folder = write_scaffold(kind, name, Path.cwd())
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        click.echo(f"wrote {file.relative_to(folder.parent)}")
    click.echo(f"next: pip install --editable {folder.name} && jackfield plugins check {name} --kind {kind}")


def available_kinds() -> tuple[str, ...]:
    """Return the kinds that have templates."""
    return tuple(kind for kind in KINDS if (_TEMPLATES / kind).is_dir())


def write_scaffold(kind: str, name: str, parent: Path) -> Path:
    """Write the project into the new folder ``jackfield-KIND-NAME`` in ``parent``, and return the folder.

    The name is lower-case words of letters and digits, the first a letter, joined by ``_`` or ``-``. An unknown kind, a
    bad name or an existing folder is refused (``plugin.scaffold``).
    """
    values = _values(kind, name)
    target = parent / f"jackfield-{kind}-{name}"
    if target.exists() or target.is_symlink():
        fix = "choose another name, or move what is there out of the way"
        raise _refused(f"{target.name} is there already", "no file or folder of this name", target, fix)
    # write to a temporary folder and move it, so that an interrupted call leaves no partial project
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
        words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
        near = "_".join(words).lstrip("0123456789_")[:_LONGEST_NAME].rstrip("_") or "my_plugin"
        raise _refused("a plugin cannot have this name", expected, repr(name), f"for example: {near}")
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


def _texts(kind: str, values: Mapping[str, str]) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield path and content of each file; files of the kind replace common ones."""
    found: dict[PurePosixPath, Path] = {}
    for folder in (_TEMPLATES / "common", _TEMPLATES / kind):
        for file in folder.rglob(f"*{_SUFFIX}"):
            found[PurePosixPath(file.relative_to(folder).as_posix().removesuffix(_SUFFIX))] = file
    for path, source in sorted(found.items()):
        where = PurePosixPath(*(values["package"] if part == _PACKAGE_FOLDER else part for part in path.parts))
        text = source.read_text(encoding="utf-8")
        yield PurePosixPath(_filled(str(where), values, path)), _filled(text, values, path)


def _filled(text: str, values: Mapping[str, str], path: PurePosixPath) -> str:
    def value(found: re.Match[str]) -> str:
        assert found[1] in values, f"the template {path} has the unknown placeholder {found[0]}"
        return values[found[1]]

    return _PLACEHOLDER.sub(value, text)
