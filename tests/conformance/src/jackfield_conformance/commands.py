"""The commands of ``jackfield plugins`` that plugin authors use.

``new`` writes a complete project with a small working plugin, from the files in ``templates/``. ``check`` runs the
checks where a plugin runs, and keeps the certificate. ``doctor`` tries plugins where they will run, and says what to
fix: each gets a process of its own (of a configured interpreter, ``[env].python`` of its manifest, or this one) and a
deadline, so that one that hangs, crashes or ends the process is named and reaches no other.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jackfield import __version__
from jackfield.abc import ABI_VERSIONS, KINDS
from jackfield.cli.commands import deadline_option, json_option, kind_option, report, show
from jackfield.errors import JackfieldError, PluginError
from jackfield.files import replace_file
from jackfield.plugins import PluginRecord, discover
from jackfield.plugins.interpreters import Introduction, look, resolve_interpreter, run_bounded
from jackfield.plugins.registry import GROUPS
from jackfield_conformance.certificates import certificate_folder, find_certification, read_certificate
from jackfield_conformance.registry import TIERS

_TEMPLATES = Path(__file__).parent / "templates"
_SUFFIX = ".template"
_PACKAGE_FOLDER = "__package__"
_NAME = re.compile(r"[a-z][a-z0-9]*(?:[_-][a-z0-9]+)*")
_LONGEST_NAME = 40
_PLACEHOLDER = re.compile(r"(?<!\$)\{\{(\w+)\}\}")  # `${{ … }}` is GitHub's

#: The suffix of the class's name, and the plugin's first sentence, by kind.
_KINDS: dict[str, tuple[str, str]] = {
    "engine": ("Engine", "Trains a causal language model on one device"),
    "rollout": ("Server", "Generates with a causal language model in this process"),
    "agent": ("Agent", "Has the model guess a number over several turns"),
    "reward": ("Reward", "Scores a number by its distance from the ground truth"),
    "transfer_queue": ("Queue", "Stores columns of samples"),
    "checkpoint_engine": ("CheckpointEngine", "Moves weights from the trainer to inference workers"),
    "operator": ("Filter", "Keeps rows with a number of sentences within bounds"),
    "algorithm": ("", "A loss, an estimator and an algorithm of the two"),
}


@click.command()
@click.argument("kind", type=click.Choice((*KINDS, "algorithm")))
@click.argument("name")
def new(kind: str, name: str) -> None:
    """Write a new plugin into ./jackfield-KIND-NAME/: a small working one as a starting point."""
    folder = write_scaffold(kind, name, Path.cwd())
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        click.echo(f"wrote {file.relative_to(folder.parent)}")
    kind = _plugin_kind(kind)
    click.echo(f"next: pip install --editable {folder.name} && jackfield plugins check {name} --kind {kind}")


def _plugin_kind(kind: str) -> str:
    """Return the kind of what a scaffold makes: an algorithm is a package of hooks."""
    return "hooks" if kind == "algorithm" else kind


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
    if kind not in _KINDS:
        expected = "one of " + ", ".join(_KINDS)
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
        "kind": _plugin_kind(kind),
        "package": f"jackfield_{kind}_{name.replace('-', '_')}",
        "distribution": f"jackfield-{kind}-{name}".replace("_", "-"),
        "class_name": "".join(word.capitalize() for word in re.split("[_-]", name)) + suffix,
        "group": GROUPS[_plugin_kind(kind)],
        "abi": ABI_VERSIONS[_plugin_kind(kind)],
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


@click.command()
@click.argument("name")
@kind_option
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    type=click.Choice(TIERS),
    help="Run this tier of checks, too, beside base and capability; repeatable.",
)
@click.option(
    "--certificate",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the JSON certificate here, too.",
)
@deadline_option(1800.0, "Seconds for all checks together; each has a deadline of its own.")
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
    try:
        found, kept = run_checks(name, kind, tiers=tiers, deadline=deadline, quiet=as_json)
        if certificate is not None:
            certificate.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    except (JackfieldError, OSError) as error:
        report(ctx, error, exit_code=2)
    show(found if as_json else {"certificate": str(certificate or kept)})
    ctx.exit(1 if found["level"] == "none" else 0)


def run_checks(
    name: str, kind: str | None = None, *, tiers: Collection[str] = (), deadline: float = 1800.0, quiet: bool = False
) -> tuple[dict[str, Any], Path | None]:
    """Run the conformance checks on an installed plugin, and keep the certificate; ``plugin.check`` if that fails.

    They run in the plugin's own interpreter, and print to this process's stdout, or with ``quiet`` to its stderr.
    ``tiers`` run beside the default ones; ``deadline`` is in seconds, for all checks together. Return the certificate,
    also of a plugin that failed, and the file where it is kept; None if it cannot be written.
    """
    record = discover().resolve(name, kind)
    python = resolve_interpreter(record.manifest.env.python if record.manifest else None)
    with tempfile.TemporaryDirectory(prefix="jackfield-certificate-") as folder:
        file = Path(folder, "certificate.json")
        command = [python, "-P", "-m", "jackfield_conformance", "--plugin", f"{record.kind}:{record.name}"]
        command += ["--certificate", str(file), *(f"--tier={tier}" for tier in tiers)]
        sys.stdout.flush()
        code = run_bounded(command, deadline, stdout=2 if quiet else None)
        found = read_certificate(file)
    if code is None:
        raise PluginError(
            "the conformance checks did not end in time",
            code="plugin.check",
            where=record.label,
            expected=f"an end within {deadline:g} s",
            fix="look at the last check that is named above, or raise --deadline",
        )
    if found is None:
        raise PluginError(
            "the conformance checks could not be run",
            code="plugin.check",
            where=record.label,
            expected="jackfield-conformance in the interpreter of the plugin",
            found=f"exit code {code} of {python} -m jackfield_conformance, and no certificate; see its output above",
            fix=f"{python} -m pip install jackfield-conformance",
        )
    try:
        return found, keep(found)
    except OSError:
        return found, None


def keep(certificate: Mapping[str, Any]) -> Path:
    """Write a certificate where ``find_certification`` looks; replace an older one of the plugin."""
    file = certificate_folder() / f"{certificate['kind']}-{certificate['plugin']}.json"
    replace_file(file, json.dumps(certificate, indent=2) + "\n")
    return file


_MARKS = {"ok": "ok     ", "optional": "-      ", "stale": "STALE  ", "problem": "PROBLEM"}


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

    A plugin whose engine is not installed, such as vllm, is optional: this is no problem, unless the plugin is NAMEd or
    in FILE. Exit code: 0 fine, 1 problems, 2 could not run.
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
            plugins.append(_report(record, found, echo, wanted=bool(names or file)))
    except Exception as error:  # the doctor itself failed, which is not a problem that it found
        report(ctx, error, exit_code=2)
    ill, optional = (sum(each["status"] == status for each in plugins) for status in ("problem", "optional"))
    healthy = not ill and not any(each["problems"] for each in interpreters.values())
    status = "ok" if healthy else "problems"
    if as_json:
        show({"status": status, "interpreters": [*interpreters.values()], "plugins": plugins})
    elif plugins:
        without = f", {optional} optional ones without their engine" if optional else ""
        click.echo(f"{len(plugins)} plugins, {ill} with problems{without}")
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


def _lacks_engine(record: PluginRecord, problems: Sequence[JackfieldError]) -> bool:
    """Return whether what a plugin lacks is what installing it does not install, such as vLLM itself.

    Other requirements may have another version then: an engine that is not there cannot have brought its own.
    """
    lines = map(Requirement, metadata.requires(record.distribution) or ())
    comes_along = {canonicalize_name(line.name) for line in lines if not line.marker or line.marker.evaluate()}
    for problem in problems:
        needed = re.match(r"(?:the module )?([\w.-]+)", str(problem.expected))
        if problem.code != "plugin.requirement" or needed is None:
            return False
        if _is_absent(problem) and canonicalize_name(needed[1]) in comes_along:
            return False
    return any(map(_is_absent, problems))


def _is_absent(problem: JackfieldError) -> bool:
    return str(problem.found).startswith(("not installed", "not there"))


def _report(
    record: PluginRecord, found: Introduction | None, echo: Callable[[str], None], *, wanted: bool
) -> dict[str, Any]:
    """Print and return the JSON-ready report on a plugin; ``found`` is None if its record is already broken.

    A plugin that is ``wanted`` is not optional.
    """
    problems = found.problems if found is not None else (record.error,) if record.error is not None else ()
    certification = find_certification(record)
    stale = certification.stale if certification else ""
    status = "problem" if problems else "stale" if stale else "ok"
    if problems and found is not None and found.usable and not wanted and _lacks_engine(record, problems):
        status = "optional"
    tried = f", {found.seconds:.1f} s" if found else ""
    echo(f"{_MARKS[status]} {record.label}, ABI {record.abi or '-'}{tried}")
    notes: Iterable[Any] = problems
    if status == "optional":
        notes = [f"not installed: {problem.expected}" for problem in problems if _is_absent(problem)]
    for note in [*map(str, notes), *([stale] if stale else [])]:
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
