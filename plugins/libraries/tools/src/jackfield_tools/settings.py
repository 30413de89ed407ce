"""The settings of tools: the section ``tools`` of a run, a mapping from names to tools."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs.validators import ge, gt, le

from jackfield.errors import ConfigError
from jackfield.sdk import option, structure

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")  #: what models and their APIs accept as a function's name


@attrs.frozen(kw_only=True)
class Limits:
    """Limits that every kind of tool has."""

    seconds: float = option(30.0, "Longest time of a call.", gt(0.0))
    max_characters: int = option(10_000, "Most characters of a result; the rest is cut, which the result says.", ge(1))
    concurrency: int | None = option(
        None, "Calls that run at a time in one agent worker; null: 64, or 2 processes.", [ge(1), le(4096)]
    )
    wait_seconds: float = option(300.0, "Longest wait of a call until fewer than `concurrency` calls run.", gt(0.0))
    description: str | None = option(None, "What the model reads about the tool; null: what the tool says itself.")


@attrs.frozen(kw_only=True)
class FunctionSettings(Limits):
    """Settings of a Python function."""

    process: bool = option(False, "Call it in processes of its own, which are killed at the deadline.")
    memory_bytes: int | None = option(4 * 2**30, "process: memory of each process; null: unlimited.", ge(2**26))
    start_seconds: float = option(60.0, "process: longest time to import the code.", gt(0.0))
    repeat: bool = option(False, "process: make a call again whose process died, which may have been half done.")


@attrs.frozen(kw_only=True)
class ClassSettings(Limits):
    """Settings of a class, of which each rollout has an object."""

    settings: Mapping[str, Any] = option(None, "Keyword arguments of the class.", factory=dict)
    include: tuple[str, ...] | None = option(None, "The methods that are tools; null: all public ones.")
    exclude: tuple[str, ...] = option((), "Public methods that are no tools.")
    prefix: str = option("", "Text before the names of its tools.")
    parallel: bool = option(False, "Methods of one object may run at the same time.")


@attrs.frozen(kw_only=True)
class McpServer:
    """Where an MCP server is: a command, or an address."""

    command: tuple[str, ...] | None = option(None, "Program and arguments of a server that talks over stdio.")
    env: Mapping[str, str] = option(
        None, "command: environment variables beside PATH, HOME and the like.", factory=dict
    )
    cwd: str | None = option(None, "command: the folder in which it runs; null: this one.")
    url: str | None = option(None, "Address of a server (streamable HTTP), such as http://127.0.0.1:8000/mcp.")
    headers: Mapping[str, str] = option(None, "url: headers of each request.", factory=dict)
    api_key_env: str | None = option(None, "url: environment variable with the key of the server.")


@attrs.frozen(kw_only=True)
class McpSettings(Limits):
    """Settings of an MCP server, of which each agent worker has a session."""

    include: tuple[str, ...] | None = option(None, "The tools of the server to use; null: all.")
    exclude: tuple[str, ...] = option((), "Tools of the server that are not used.")
    prefix: str = option("", "Text before the names of its tools.")
    start_seconds: float = option(60.0, "Longest time until the server has listed its tools.", gt(0.0))
    repeat: bool = option(
        False, "Make a call again whose connection was lost, though the server does not say that it may be repeated."
    )


@attrs.frozen(kw_only=True)
class SandboxCode:
    """What runs the model's code, and how it is kept apart."""

    language: Literal["python", "shell"] = option("python", "The language of the code.")
    isolation: Literal["auto", "none", "limits", "filters", "namespaces"] = option(
        "auto", "Least isolation of the code; auto: the best that this machine allows, at least limits."
    )
    preamble: str = option("", "Code before that of the model, such as `import math`.")
    python: str | None = option(None, "Python interpreter; its packages can be imported; null: this one.")
    readable: tuple[str, ...] = option((), "Further folders that the code may read, with filters or namespaces.")
    memory_bytes: int = option(2**30, "Memory of each process of the code.", ge(2**26))
    disk_bytes: int = option(2**26, "Size of a file; with namespaces, of all files together.", ge(2**16))
    processes: int = option(16, "Processes and threads of the code at a time.", [ge(1), le(4096)])
    output_bytes: int = option(2**20, "Output of a call; more ends it.", [ge(1024), le(2**24)])


@attrs.frozen(kw_only=True)
class SearchCorpus:
    """The documents that are searched, and how many are found."""

    corpus: str = option(help="A JSONL file with a document per line.")
    text: str = option("text", "The key of a document's text.")
    title: str | None = option(None, "The key of its title, which is searched and shown, too.")
    top: int = option(3, "Documents of a result.", [ge(1), le(100)])
    k1: float = option(1.2, "BM25: how soon further occurrences of a word count no more.", ge(0.0))
    b: float = option(0.75, "BM25: how much long documents are discounted.", [ge(0.0), le(1.0)])


@attrs.frozen(kw_only=True)
class Tool:
    """One entry of the section."""

    name: str
    kind: str
    target: Any  #: a text, or the settings of the kind
    limits: Any  #: the kind's class of limits

    @property
    def where(self) -> str:
        """Return the place of the entry in a configuration."""
        return f"tools.{self.name}"

    @property
    def runs_processes(self) -> bool:
        """Return whether each call takes a process."""
        return self.kind == "sandbox" or (self.kind == "function" and self.limits.process)

    @property
    def concurrency(self) -> int:
        """Return the number of calls that run at a time."""
        return int(self.limits.concurrency or (2 if self.runs_processes else 64))


#: By kind: the class of its target, and that of its other settings.
KINDS: Mapping[str, tuple[Any, Any]] = {
    "function": (str, FunctionSettings),
    "class": (str, ClassSettings),
    "mcp": (McpServer, McpSettings),
    "sandbox": (SandboxCode, Limits),
    "search": (SearchCorpus, Limits),
}


def read_tools(settings: Mapping[str, Any]) -> tuple[Tool, ...]:
    """Return the tools of the section, as typed settings; ``config.*`` errors name the place under ``tools``."""
    return tuple(_read(name, entry) for name, entry in settings.items())


def refused(where: str, message: str, **details: Any) -> ConfigError:
    """Return the error of a setting."""
    return ConfigError(message, where=where, **details)


def _read(name: str, entry: Any) -> Tool:
    where = f"tools.{name}"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = "letters, digits, _ and -, at most 64, and no digit first"
        raise refused(where, f"{name!r} is no name for a tool", expected=expected, found=repr(name))
    if not isinstance(entry, Mapping):
        found, code = repr(entry)[:200], "config.wrong-type"
        raise refused(where, f"wrong value at {where}: {found} is no mapping", code=code, expected=_one(), found=found)
    kinds = [kind for kind in KINDS if kind in entry]
    if len(kinds) != 1:
        message = f"{where} has {' and '.join(kinds)}" if kinds else f"{where} does not say what the tool is"
        raise refused(where, message, expected=_one(), found=", ".join(map(str, entry)) or "no keys")
    of_target, of_limits = KINDS[kinds[0]]
    given = entry[kinds[0]]
    if of_target is str and not isinstance(given, str):
        found = repr(given)[:200]
        details = {"expected": "file.py:name or package.module:name", "found": found, "code": "config.wrong-type"}
        raise refused(f"{where}.{kinds[0]}", f"wrong value at {where}.{kinds[0]}: {found} is no text", **details)
    target = given if of_target is str else structure(of_target, given or {}, f"{where}.{kinds[0]}")
    limits = structure(of_limits, {key: value for key, value in entry.items() if key != kinds[0]}, where)
    return Tool(name=name, kind=kinds[0], target=target, limits=limits)


def _one() -> str:
    return "exactly one of the keys " + ", ".join(KINDS)
