"""What tools must not do: run twice, return what has no text, take what they do not know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield_testing import refused
from jackfield_tools import check_tools

from .conftest import Worker, call, with_tools

Code = Callable[[str], str]
PROCESS = pytest.mark.parametrize("process", [False, True])

DIES = """
import os
def note(file: str, end: bool = True) -> str:
    with open(file, "a") as out:
        out.write("x")
    if end:
        os._exit(7)
    return "ok"
"""


@pytest.mark.parametrize("repeat", [False, True])
def test_a_call_whose_process_dies_is_made_again_only_if_that_is_set(tmp_path: Path, code: Code, repeat: bool) -> None:
    """Also in a process that has served calls before, which the pool would take to be innocent."""
    file = tmp_path / "calls"
    entry = {"function": f"{code(DIES)}:note", "process": True, "concurrency": 1, "repeat": repeat}

    async def work(worker: Worker) -> Any:
        tools = worker.rollout()
        assert "ok" == (await call(tools, "note", file="/dev/null", end=False)).text
        died = await call(tools, "note", file=str(file))
        return died, await call(tools, "note", file="/dev/null", end=False)

    died, after = with_tools(tmp_path, {"note": entry}, work)
    assert died.is_error
    assert "exit status 7" in died.text
    assert (2 if repeat else 1) == len(file.read_text())
    assert "ok" == after.text


RESULTS = """
import dataclasses
from pathlib import Path

class Opaque: ...

@dataclasses.dataclass
class Point:
    x: int
    y: int = 0

def lazy() -> object:
    return (number for number in range(3))

def opaque() -> object:
    return Opaque()

def inside() -> object:
    return {"value": [Opaque()]}

def keys() -> object:
    return {(1, 2): 3}

def circle() -> object:
    made = []
    made.append(made)
    return made

def surrogate() -> object:
    return ["\\ud800"]

def path() -> object:
    return {"at": Path("a/b")}

def array() -> object:
    import numpy
    return {"mean": numpy.float32(1.5), "all": numpy.arange(3)}

async def later() -> str:
    return "ok"

def early() -> object:
    return later()

def stop() -> str:
    raise KeyboardInterrupt

def fail() -> str:
    raise ValueError("the pump is dry")

def place(where: Point | None, others: list[Point] = [], named: dict[str, Point] = {}, free: dict = {}) -> str:
    return "placed"

def numbers():
    yield 1

async def more_numbers():
    yield 1

class Has:
    def numbers(self):
        yield 1

class Takes:
    def __init__(self, shop: str, size: int = 1) -> None: ...
    def look(self) -> str:
        return "ok"
"""
WRONG = {
    "lazy": "generator", "opaque": "Opaque", "inside": "Opaque", "keys": "dict", "circle": "list", "surrogate": "list",
}  # fmt: skip
RIGHT = {"path": '{"at":"a/b"}', "array": '{"mean":1.5,"all":[0,1,2]}', "early": "ok"}


@PROCESS
def test_a_result_is_a_text_or_json_or_an_error_that_names_its_type(tmp_path: Path, code: Code, process: bool) -> None:
    path = code(RESULTS)
    limits = {"process": True, "concurrency": 1} if process else {}
    settings = {name: {"function": f"{path}:{name}", **limits} for name in (*WRONG, *RIGHT)}

    async def work(worker: Worker) -> Any:
        tools = worker.rollout()
        return {name: await call(tools, name) for name in settings}

    found = with_tools(tmp_path, settings, work)
    for name, kind in WRONG.items():
        assert found[name].is_error, name
        assert kind in found[name].text, name
        assert "0x" not in found[name].text, name
    assert RIGHT == {name: found[name].text for name in RIGHT}
    assert not any(found[name].is_error for name in RIGHT)


@PROCESS
def test_the_model_reads_the_exception_and_not_a_traceback(tmp_path: Path, code: Code, process: bool) -> None:
    path = code(RESULTS)
    settings = {name: {"function": f"{path}:{name}", "process": process} for name in ("stop", "fail")}

    async def work(worker: Worker) -> Any:
        tools = worker.rollout()
        return await call(tools, "stop"), await call(tools, "fail")

    stopped, failed = with_tools(tmp_path, settings, work)
    assert stopped.is_error
    assert stopped.text.endswith("it raised KeyboardInterrupt")
    assert (True, "fail raised ValueError: the pump is dry") == (failed.is_error, failed.text)


@PROCESS
def test_unknown_arguments_are_refused_at_every_depth(tmp_path: Path, code: Code, process: bool) -> None:
    settings = {"place": {"function": f"{code(RESULTS)}:place", "process": process}}
    given: dict[str, dict[str, Any]] = {
        "where.z": {"where": {"x": 1, "z": 2}},
        "others[1].w": {"where": None, "others": [{"x": 1}, {"x": 1, "w": 2}]},
        "named.a.v": {"where": None, "named": {"a": {"x": 1, "v": 2}}},
        "": {"where": {"x": 1, "y": 2}, "others": [{"x": 1}], "named": {"a": {"x": 1}}, "free": {"any": {"z": 1}}},
    }

    async def work(worker: Worker) -> Any:
        tools = worker.rollout()
        return {name: await call(tools, "place", **arguments) for name, arguments in given.items()}

    found = with_tools(tmp_path, settings, work)
    assert "placed" == found.pop("").text
    for name, result in found.items():
        assert result.is_error
        assert f"`{name}`" in result.text


@pytest.mark.parametrize(
    ("entry", "where"),
    [
        ({"function": "{path}:numbers"}, "tools.t.function"),
        ({"function": "{path}:more_numbers"}, "tools.t.function"),
        ({"class": "{path}:Has"}, "tools.t.class"),
        ({"class": "{path}:Takes", "settings": {"shop": "a", "nope": 1}}, "tools.t.settings"),
        ({"class": "{path}:Takes"}, "tools.t.settings"),
    ],
)
def test_generators_and_wrong_settings_of_a_class_are_refused(code: Code, entry: dict[str, Any], where: str) -> None:
    path = code(RESULTS)
    entry = {key: value.format(path=path) if isinstance(value, str) else value for key, value in entry.items()}
    with refused("config.invalid-value") as caught:
        check_tools({"t": entry})
    assert where == caught.value.where


def test_settings_that_a_class_takes_are_not_refused(code: Code) -> None:
    check_tools({"t": {"class": f"{code(RESULTS)}:Takes", "settings": {"shop": "a"}}})


def test_a_generator_in_a_process_is_refused_when_it_starts(tmp_path: Path, code: Code) -> None:
    async def work(worker: Worker) -> None:
        raise AssertionError

    with refused("tools.start", "yields"):
        with_tools(tmp_path, {"t": {"function": f"{code(RESULTS)}:numbers", "process": True}}, work)


@pytest.mark.parametrize("line", ["null", "[1]", '"text"', "3", "{", '{"txt": "x"}', '{"text": null}'])
def test_a_line_of_a_corpus_that_is_no_document_is_refused_before_the_run(tmp_path: Path, line: str) -> None:
    corpus = tmp_path / "documents.jsonl"
    corpus.write_text(json.dumps({"text": "a\u2028b"}, ensure_ascii=False) + "\n\n" + line + "\n", encoding="utf-8")
    with refused("config.invalid-value", "line 3", str(corpus)) as caught:
        check_tools({"t": {"search": {"corpus": str(corpus)}}})
    assert "tools.t.search.corpus" == caught.value.where
