"""Tries every plugin where it will run, and says what is wrong and how to fix it.

Each plugin gets a process of its own (of a configured interpreter, ``[env].python`` of its manifest, or this one) and a
deadline, so that one
that hangs, crashes or ends the process is named and reaches no other.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import attrs

from jackfield.errors import CODES, JackfieldError, PluginError, PluginImportError
from jackfield.plugins.certificates import find_certification
from jackfield.plugins.discovery import PluginRecord
from jackfield.plugins.handshake import check_interpreter
from jackfield.plugins.interpreters import ChildResult, InterpreterReport, preflight, run_child

__all__ = ["PluginReport", "examine"]


@attrs.frozen(kw_only=True)
class PluginReport:
    """What was found out about one plugin."""

    record: PluginRecord
    python: str | None  #: path of the interpreter where it was tried; None: it was not
    versions: Mapping[str, str | None]  #: there, of jackfield, torch and ray
    seconds: float
    problems: tuple[JackfieldError, ...]
    stale: str = ""  #: why its certificate does not count any more; empty: it counts, or there is none

    @property
    def status(self) -> Literal["ok", "stale", "problem"]:
        """The worst that was found."""
        return "problem" if self.problems else "stale" if self.stale else "ok"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        identity = ("name", "kind", "abi", "distribution", "version")
        return {
            **{name: getattr(self.record, name) for name in identity},
            "status": self.status,
            "stale": self.stale,
            "python": self.python,
            "versions": dict(self.versions),
            "seconds": round(self.seconds, 3),
            "problems": [problem.as_dict() for problem in self.problems],
        }


def examine(
    records: Iterable[PluginRecord], deadline: float = 30.0, pythons: Mapping[str, str] | None = None
) -> Iterator[InterpreterReport | PluginReport]:
    """Try plugins, one after the other.

    Args:
        records: the plugins; those that are broken already are reported as they are.
        deadline: seconds for each plugin and for each interpreter.
        pythons: interpreters by kind of plugin, in the place of what manifests say.

    Yields:
        A report on each interpreter before the first plugin that needs it, and on each plugin.
    """
    interpreters: dict[str | None, InterpreterReport] = {}
    for record in records:
        if record.error is not None or record.manifest is None:
            problems = () if record.error is None else (record.error,)
            yield PluginReport(record=record, python=None, versions={}, seconds=0.0, problems=problems)
            continue
        python = (pythons or {}).get(record.kind, record.manifest.env.python)
        if python not in interpreters:
            interpreters[python] = preflight(python, deadline)
            yield interpreters[python]
        yield _try(record, interpreters[python], deadline)


def _try(record: PluginRecord, interpreter: InterpreterReport, deadline: float) -> PluginReport:
    seconds = 0.0
    problem = interpreter.problem or _strange(record, interpreter, deadline)
    if problem is not None:
        problems: tuple[JackfieldError, ...] = (problem,)
    else:
        result = run_child(interpreter.path, ["-m", "jackfield.plugins.probe", record.kind, record.name], deadline)
        seconds, problems = result.seconds, tuple(_problems(record, interpreter, result))
    return PluginReport(
        record=record,
        python=interpreter.path,
        versions=interpreter.versions,
        seconds=seconds,
        problems=problems,
        stale=certification.stale if (certification := find_certification(record)) else "",
    )


def _strange(record: PluginRecord, interpreter: InterpreterReport, deadline: float) -> PluginError | None:
    """Whether another interpreter has another Jackfield, or another version of the plugin."""
    if interpreter.path == os.path.abspath(sys.executable):
        return None
    try:
        check_interpreter(record, interpreter.path, deadline)
    except PluginError as error:
        return error
    return None


def _problems(record: PluginRecord, interpreter: InterpreterReport, result: ChildResult) -> Iterator[JackfieldError]:
    """What the child told, or how it fell silent."""
    stage = None
    for line in result.stdout.splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if not isinstance(told, dict):
            continue
        if "problems" in told:
            yield from (_error(fields) for fields in told["problems"])
            return
        stage = told.get("stage", stage)
    if stage is None:
        yield PluginError(
            f"the interpreter {interpreter.path} cannot probe the plugin",
            code="plugin.interpreter",
            where=record.label,
            expected="an installation of jackfield like this one",
            found=f"{result.ending}, {result.last_words}; jackfield {interpreter.versions.get('jackfield')}",
            fix=f"{interpreter.path} -m pip install --upgrade jackfield",
        )
        return
    late = result.returncode is None
    yield PluginImportError(
        f"{stage} did not end in time" if late else f"{stage} ended the interpreter",
        where=record.label,
        expected="an import that ends, and leaves the interpreter alive",
        found=", ".join(filter(None, (result.ending, result.last_words))),
        fix="correct the plugin's module; raise --deadline if it is only slow"
        if late
        else "correct the plugin's module",
    )


def _error(fields: Mapping[str, Any]) -> PluginError:
    """An error that a child has sent; another Jackfield may have codes that this one does not know."""
    code = fields["code"] if fields["code"] in CODES else PluginError.default_code
    details = {name: fields.get(name) for name in ("where", "expected", "found", "fix")}
    return PluginError(fields["message"], code=code, **details)
