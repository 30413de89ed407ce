"""The settings of the sandbox."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs.validators import ge, gt, le

from jackfield.errors import ConfigError
from jackfield.sdk import option

_PYTHON_FENCES = ("", "python", "py", "python3")


@attrs.frozen(kw_only=True)
class Config:
    """Settings of where code and tests are, how they run, and what a result is worth."""

    tests_field: str | None = option(None, "Field of extra_info with the tests, as a.b; null: the ground truth.")
    entry_point_field: str = option(
        "entry_point", "Field of extra_info, as a.b, with the name of the function that the tests call."
    )
    extract: Literal["last", "first", "whole"] = option(
        "last", "Which fenced block of the response is the code; whole: all of the response."
    )
    fences: tuple[str, ...] | None = option(
        None, "Languages of fenced blocks that count; null: python, py, python3 and none; any with `command`."
    )
    preamble: str = option("", "Code before that of the response, such as `from typing import *`.")
    preamble_field: str | None = option(
        None, "Field of extra_info, as a.b, with further code before it, such as HumanEval's prompt."
    )
    command: tuple[str, ...] | None = option(
        None, "Interpreter of another language, such as [node], for tests by input and output; null: Python."
    )
    file: str | None = option(None, "Name of the program's file, such as main.js; null: main.py, or main with command.")
    python: str | None = option(None, "Python interpreter that runs code and tests; null: this one.")
    compare: Literal["exact", "whitespace", "float"] = option(
        "whitespace",
        "exact: equal output, except for newlines at its end; whitespace: equal words; float: equal words, numbers "
        "within tolerance.",
    )
    tolerance: float | None = option(None, "float: largest absolute or relative difference; null: 1e-6.", gt(0.0))
    score: Literal["fraction", "all"] = option(
        "fraction", "fraction: the share of passed tests; all: 1 if every test passes, else 0 (stops at a failure)."
    )
    isolation: Literal["auto", "none", "limits", "filters", "namespaces"] = option(
        "auto", "Least isolation of the code; auto: the best that this machine allows, at least limits."
    )
    readable: tuple[str, ...] = option((), "Further folders that the code may read, with filters or namespaces.")
    seconds: float = option(10.0, "Longest time for one test.", gt(0.0))
    task_seconds: float = option(60.0, "Longest time for all tests of a response; at most 0.8 of the deadline.", gt(0))
    on_timeout: Literal["incorrect", "fail"] = option(
        "incorrect",
        "Result of a test that takes too long. incorrect: it is not passed; fail: no score, so that the response is "
        "left out of training, which a policy can learn to exploit.",
    )
    memory_bytes: int = option(2**30, "Memory of each process of the code.", ge(2**26))
    disk_bytes: int = option(2**26, "Size of a file; with namespaces, of all files together.", ge(2**16))
    processes: int = option(16, "Processes and threads of the code at a time.", [ge(1), le(4096)])
    output_bytes: int = option(2**20, "Output of a test; more ends it.", [ge(1024), le(2**24)])
    workers: int = option(2, "Responses that are tested at a time.", [gt(0), le(4096)])
    try_first: bool = option(
        True, "Test the first task's own answer before anything is generated, and refuse tests that cannot be run."
    )

    def __attrs_post_init__(self) -> None:
        if self.tolerance is not None and self.compare != "float":
            raise _without_effect("tolerance", f"compare {self.compare}", "compare: float")
        if self.fences is not None and self.extract == "whole":
            raise _without_effect("fences", "extract: whole", "extract: last or first")
        if self.readable and self.isolation in ("none", "limits"):
            raise _without_effect("readable", f"isolation {self.isolation}", "isolation: filters or namespaces")
        for name in ("memory_bytes", "disk_bytes", "processes") if self.isolation == "none" else ():
            if getattr(self, name) != getattr(attrs.fields(Config), name).default:
                raise _without_effect(name, "isolation none", "isolation: limits, or a stronger one")
        if self.command == ():
            raise ConfigError("command is empty", where="command", expected="a program and its arguments")

    @property
    def counted_fences(self) -> tuple[str, ...] | None:
        """Languages of fenced blocks that count; None: all."""
        return self.fences if self.fences is not None or self.command else _PYTHON_FENCES

    @property
    def program(self) -> str:
        """Name of the program's file."""
        return self.file or ("main" if self.command else "main.py")


def _without_effect(name: str, found: str, expected: str) -> ConfigError:
    return ConfigError(f"{name} has no effect with {found}", where=name, expected=expected, fix=f"remove {name}")
