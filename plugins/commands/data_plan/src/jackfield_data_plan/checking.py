"""From a model's text to a pipeline that is checked: nothing of it is run before."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import yaml

from jackfield.errors import JackfieldError
from jackfield.plugins.registry import Registry
from jackfield.settings import structure
from jackfield_data_plan.parts import TASKS, plain
from jackfield_data_plan.untrusted import refusals

_MOST = 20  #: operators of a plan
_LONGEST = 200_000  #: characters of an answer
_LONGEST_YAML = 20_000  #: characters that are read as YAML, whose parser is slow
_DEEPEST = 30  #: brackets of YAML in each other: the parser's time grows with their square
_PLACES = (("tasks",), ("data", "pipeline", "tasks"), ("pipeline", "tasks"))


class NoPlan(ValueError):
    """A text has no pipeline in it."""


def read_answer(text: str) -> tuple[list[Any], str]:
    """Return the operators that a model's text names, as plain values, and its explanation.

    The first JSON or YAML with a list of operators is read. YAML is read without types and aliases. Raise
    :class:`NoPlan` if there is none.
    """
    if len(text) > _LONGEST:
        raise NoPlan(f"the answer has more than {_LONGEST} characters")
    for value in _values(text.rpartition("</think>")[2]):
        if (tasks := _tasks(value)) is not None:
            told = value.get("explanation") if isinstance(value, Mapping) else None
            return tasks, told if isinstance(told, str) else ""
    raise NoPlan('the answer has no JSON object with a list "tasks"')


def _values(text: str) -> Iterator[Any]:
    """Yield what can be read in a text: all of it, then blocks in fences, then the first objects within."""
    blocks = list(_fenced(text))
    for part in (text, *blocks):
        try:
            yield json.loads(part)
        except (ValueError, RecursionError):
            continue
    for part in blocks or [text]:
        try:
            yield _safe_yaml(part)
        except (yaml.YAMLError, ValueError, RecursionError):
            continue
    decoder = json.JSONDecoder()
    for start in [found.start() for found in re.finditer(r"[{\[]", text)][:50]:
        try:
            yield decoder.raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            continue


def _fenced(text: str) -> Iterator[str]:
    """Yield the blocks between lines that begin with three backticks."""
    block: list[str] | None = None
    for line in text.splitlines(keepends=True):
        if not line.lstrip().startswith("```"):
            if block is not None:
                block.append(line)
        elif block is None:
            block = []
        else:
            yield "".join(block)
            block = None


def _safe_yaml(text: str) -> Any:
    """Read YAML without types and aliases, if that cannot take long."""
    depth = deepest = 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        deepest = max(deepest, depth)
    if len(text) > _LONGEST_YAML or deepest > _DEEPEST:
        raise ValueError("too much YAML")
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
        raise ValueError("YAML with aliases is not read: they may grow without end")
    return yaml.safe_load(text)


def _tasks(value: Any) -> list[Any] | None:
    if isinstance(value, list):
        return value if value and all(isinstance(each, Mapping) and "name" in each for each in value) else None
    for place in _PLACES:
        found = value
        for key in place:
            found = found.get(key) if isinstance(found, Mapping) else None
        if isinstance(found, list):
            return found
    return None


def problems_of(
    tasks: Sequence[Any], registry: Registry, *, allowed: Collection[str] = (), trusted: bool = False
) -> list[str]:
    """Return what is wrong with operators and their settings; none: they may be built.

    Names are looked up and settings are structured, which builds no operator. ``trusted``: a person or the keyword
    planner wrote them, so that they may name files; see :mod:`jackfield_data_plan.untrusted` otherwise.
    """
    if not tasks:
        return ["there are no operators"]
    if len(tasks) > _MOST:
        return [f"there are {len(tasks)} operators, and at most {_MOST} are allowed"]
    found = list[str]()
    for number, task in enumerate(tasks):
        found += _of_one(task, f"{TASKS}[{number}]", registry, allowed, trusted)
    return found


def _of_one(task: Any, place: str, registry: Registry, allowed: Collection[str], trusted: bool) -> list[str]:
    if not isinstance(task, Mapping) or not all(isinstance(key, str) for key in task):
        return [f"{place} is not an object with the name of an operator and its settings: {plain(task)}"]
    own = dict(task)
    if not isinstance(name := own.pop("name", None), str):
        return [f"{place}.name: the name of an operator is missing"]
    try:
        record = registry.load("operator", name)
        structure(record.settings_class, own, place)
    except JackfieldError as error:
        return [plain(error, 600)]
    except RecursionError:
        return [f"{place} is nested too deeply"]
    return [] if trusted else list(refusals(name, record.settings_class, own, allowed))
