"""Python functions and classes as tools: schemas, calls, state, deadlines and cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.agent import ToolCall
from jackfield_testing import refused
from jackfield_tools import check_tools
from jackfield_virtual_clock import VirtualClock

from .conftest import Worker, call, opened, with_tools

Code = Callable[[str], str]

FUNCTIONS = '''
import dataclasses
from typing import Annotated, Literal, Optional

@dataclasses.dataclass
class Point:
    x: int
    y: int = 0

def paint(where: Point, colour: Literal["red", "blue"], size: Annotated[float, "in metres"] = 1.5, note: Optional[str] = None) -> dict:
    """Paint a point.

    It stays.

    Args:
        where: the point
        colour (str): one of two,
            no more
    Returns:
        What was painted.
    """
    return {"x": where.x, "y": where.y, "colour": colour, "size": size, "note": note}

async def add(a: int, b: int) -> int:
    return a + b

def boom(text: str = "") -> str:
    raise ValueError("the pump is dry")

def leave() -> None:
    raise SystemExit(3)

def long() -> str:
    return "x" * 100

def everything(*values: int) -> int:
    return 0

number = 7
'''  # noqa: E501


def test_the_schema_comes_from_signature_and_docstring(tmp_path: Path, code: Code) -> None:
    """Types, defaults, and descriptions of parameters; no references."""

    async def work(worker: Worker) -> Any:
        return worker.rollout().schemas

    [schema] = with_tools(tmp_path, {"paint": {"function": code(FUNCTIONS) + ":paint"}}, work)
    function = schema["function"]
    assert ("function", "paint") == (schema["type"], function["name"])
    assert "Paint a point.\n\nIt stays." == function["description"]
    properties = function["parameters"]["properties"]
    assert ["where", "colour"] == function["parameters"]["required"]
    assert {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}} == properties["where"]["properties"]
    assert "the point" == properties["where"]["description"]
    assert ["blue", "red"] == sorted(properties["colour"]["enum"])
    assert "one of two, no more" == properties["colour"]["description"]
    assert ("in metres", 1.5) == (properties["size"]["description"], properties["size"]["default"])
    assert "$ref" not in str(schema)


def test_results_are_texts_or_json_and_arguments_have_their_types(tmp_path: Path, code: Code) -> None:
    path = code(FUNCTIONS)
    settings = {"paint": {"function": f"{path}:paint"}, "add": {"function": f"{path}:add"}}

    async def work(worker: Worker) -> Any:
        tools = worker.rollout()
        painted = await call(tools, "paint", where={"x": 3}, colour="red")
        added = await call(tools, "add", a=2, b="3")  # models often quote numbers
        return painted.text, added.text, worker.told

    painted, added, told = with_tools(tmp_path, settings, work)
    assert ('{"x":3,"y":0,"colour":"red","size":1.5,"note":null}', "5") == (painted, added)
    assert {"tools/paint/calls": 1.0, "tools/paint/errors": 0.0} == {
        name: value for name, value in told.metrics.items() if "paint" in name
    }
    assert ["tool", "tool"] == [event["event"] for event in told.events]
    assert {"a": 2, "b": "3"} == told.events[1]["arguments"]
    assert told.events[1]["seconds"] >= 0
    assert told.events[1]["is_error"] is False


@pytest.mark.parametrize("process", [False, True])
def test_what_goes_wrong_is_a_text_for_the_model(tmp_path: Path, code: Code, process: bool) -> None:
    path = code(FUNCTIONS)
    names = ("paint", "boom", "leave", "long", "add")
    settings: dict[str, Any] = {name: {"function": f"{path}:{name}", "process": process} for name in names}
    settings["long"]["max_characters"] = 10

    async def work(worker: Worker) -> Any:
        tools = worker.rollout()
        calls = {
            "missing": await call(tools, "add", a=1),
            "unknown": await call(tools, "add", a=1, b=2, c=3),
            "type": await call(tools, "paint", where={"x": "much"}, colour="red"),
            "choice": await call(tools, "paint", where={"x": 1}, colour="green"),
            "raised": await call(tools, "boom"),
            "left": await call(tools, "leave"),
            "no tool": await call(tools, "pant"),
            "no object": await tools.call(ToolCall(name="add", arguments=[1])),  # type: ignore[arg-type]
        }
        return calls, await call(tools, "long"), worker.told.metrics

    found, long, metrics = with_tools(tmp_path, settings, work)
    assert {True} == {result.is_error for result in found.values()}, found
    says = {
        "missing": "`b`", "unknown": "`c`", "type": "`where.x`", "choice": "`colour`", "raised": "the pump is dry",
        "no tool": "'paint'", "no object": "JSON object",
    }  # fmt: skip
    for name, text in says.items():
        assert text in found[name].text, name
    assert not long.is_error
    assert "xxxxxxxxxx\n… (90 more characters were cut)" == long.text
    assert 1.0 == metrics["tools/unknown/errors"]
    assert (3.0, 3.0) == (metrics["tools/add/calls"], metrics["tools/add/errors"])


def test_a_function_that_blocks_is_given_up_at_its_deadline(tmp_path: Path, code: Code) -> None:
    """The loop goes on meanwhile; threads that do not end are counted, and too many of them refuse calls."""
    path = code(
        "import threading\nlet_go = threading.Event()\ndef wait() -> str:\n    let_go.wait()\n    return 'ok'\n"
    )
    settings = {"wait": {"function": f"{path}:wait", "seconds": 0.05, "concurrency": 2}}

    async def work(worker: Worker) -> Any:
        tools = worker.rollout()
        results = await asyncio.gather(*(call(tools, "wait") for _ in range(2)))
        refusal = await call(tools, "wait")
        [source] = worker.toolbox._sources
        module = source._function.__globals__  # type: ignore[attr-defined]
        module["let_go"].set()
        for thread in [each for each in threading.enumerate() if each.name == "tool wait"]:
            await asyncio.to_thread(thread.join)
        await asyncio.sleep(0)
        return [result.text for result in results], refusal.text, (await call(tools, "wait")).text

    late, refusal, after = with_tools(tmp_path, settings, work)
    assert ["wait did not answer within 0.05 s"] * 2 == late
    assert "2 earlier calls do not end" in refusal
    assert "ok" == after


def test_a_coroutine_function_is_cancelled_at_its_deadline(tmp_path: Path, code: Code) -> None:
    path = code("import asyncio\nasync def wait() -> None:\n    await asyncio.Event().wait()\n")
    clock = VirtualClock()

    async def main() -> Any:
        async with opened(tmp_path, {"wait": {"function": f"{path}:wait", "seconds": 7.0}}, clock=clock) as worker:
            return await call(worker.rollout(), "wait"), clock.time()

    began = clock.time()
    result, ended = clock.run(main())
    assert result.is_error
    assert "wait did not answer within 7 s" == result.text
    assert 7.0 == pytest.approx(ended - began)


def test_a_process_that_blocks_is_killed(tmp_path: Path, code: Code) -> None:
    """A loop that never lets go, and a process that ends, cost one call each."""
    path = code(
        "import os\ndef spin(end: bool) -> str:\n    if end:\n        os._exit(9)\n    while True:\n        pass\n"
    )
    settings = {"spin": {"function": f"{path}:spin", "process": True, "seconds": 0.3, "concurrency": 1}}

    async def work(worker: Worker) -> Any:
        tools = worker.rollout()
        late, died, again = [await call(tools, "spin", end=end) for end in (False, True, False)]
        return late, died, again

    late, died, again = with_tools(tmp_path, settings, work)
    assert (True, "spin did not answer within 0.3 s") == (late.is_error, late.text)
    assert died.is_error
    assert again.text == late.text


def test_a_cancelled_call_frees_its_place(tmp_path: Path, code: Code) -> None:
    path = code(
        "import asyncio\nasync def wait(first: bool) -> str:\n"
        "    if first:\n        await asyncio.Event().wait()\n    return 'ok'\n"
    )
    settings = {"wait": {"function": f"{path}:wait", "concurrency": 1}}

    async def work(worker: Worker) -> Any:
        first = asyncio.create_task(call(worker.rollout(), "wait", first=True))
        second = asyncio.create_task(call(worker.rollout(), "wait", first=False))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not second.done()
        first.cancel()
        assert "ok" == (await second).text
        await asyncio.wait({first})
        assert first.cancelled()
        return worker.told.events

    events = with_tools(tmp_path, settings, work)
    assert [True, False] == [event["is_error"] for event in events]


def test_a_call_that_gets_no_place_says_so(tmp_path: Path, code: Code) -> None:
    path = code("import asyncio\nasync def wait() -> None:\n    await asyncio.Event().wait()\n")
    settings = {"wait": {"function": f"{path}:wait", "concurrency": 1, "wait_seconds": 3.0, "seconds": 100.0}}
    clock = VirtualClock()

    async def main() -> Any:
        async with opened(tmp_path, settings, clock=clock) as worker:
            tools = worker.rollout()
            results = await asyncio.gather(*(call(tools, "wait") for _ in range(2)))
            return [result.text for result in results]

    texts = clock.run(main())
    assert "wait did not answer within 100 s" == texts[0]
    assert "a free place of the tool wait" in texts[1]


SHOP = """
from jackfield.abc.agent import ToolResult

log = []

class Shop:
    def __init__(self, items: int = 2) -> None:
        self.items, self.bought = items, 0

    async def start(self, fields: dict) -> None:
        self.customer = fields.get("customer", "?")

    def buy(self, count: int = 1) -> ToolResult:
        "Buy things."
        if count > self.items:
            raise LookupError("sold out")
        self.items -= count
        self.bought += count
        return ToolResult(text=f"{self.customer} has {self.bought}", reward=0.5 * count, metrics={"bought": count},
                          ends=not self.items)

    @staticmethod
    def price() -> float:
        return 1.5

    def close(self) -> None:
        log.append((self.customer, self.bought))

    def _hidden(self) -> None: ...
"""


def test_a_class_has_an_object_per_rollout(tmp_path: Path, code: Code) -> None:
    """State, rewards, metrics and the end of a rollout; `start` gets the task's fields, `close` is called once."""
    path = code(SHOP)
    settings = {"shop": {"class": f"{path}:Shop", "settings": {"items": 3}, "prefix": "shop_"}}

    async def work(worker: Worker) -> Any:
        ann, ben, none = worker.rollout(customer="ann"), worker.rollout(customer="ben"), worker.rollout()
        names = [schema["function"]["name"] for schema in ann.schemas]
        found = [await call(ann, "shop_buy", count=2), await call(ben, "shop_buy"), await call(ann, "shop_buy")]
        found.append(await call(ann, "shop_buy"))
        found.append(await call(ann, "shop_price"))
        for tools in (ann, ben, none):
            await tools.close()
            await tools.close()
        [source] = worker.toolbox._sources
        log = source._class.buy.__globals__["log"]  # type: ignore[attr-defined]
        return names, found, log, worker.told.metrics

    names, found, log, metrics = with_tools(tmp_path, settings, work)
    assert ["shop_buy", "shop_price"] == names
    assert ["ann has 2", "ben has 1", "ann has 3"] == [each.text for each in found[:3]]
    assert [1.0, 0.5, 0.5] == [each.reward for each in found[:3]]
    assert [False, False, True] == [each.ends for each in found[:3]]
    assert "LookupError: sold out" in found[3].text
    assert "1.5" == found[4].text
    assert [("ann", 3), ("ben", 1)] == log, "a rollout that calls no tool makes no object"
    assert 4.0 == metrics["tools/shop_buy/bought"]


def test_an_object_is_not_used_after_a_call_that_did_not_end(tmp_path: Path, code: Code) -> None:
    path = code(
        "import asyncio\nclass Slow:\n    async def wait(self) -> None:\n        await asyncio.Event().wait()\n"
        "    async def look(self) -> str:\n        return 'ok'\n"
    )
    settings = {"slow": {"class": f"{path}:Slow", "seconds": 5.0}}
    clock = VirtualClock()

    async def main() -> Any:
        async with opened(tmp_path, settings, clock=clock) as worker:
            tools, other = worker.rollout(), worker.rollout()
            return [(await call(each, name)).text for each, name in ((tools, "wait"), (tools, "look"), (other, "look"))]

    late, broken, fine = clock.run(main())
    assert "wait did not answer within 5 s" == late
    assert "an earlier call of wait did not end" in broken
    assert "ok" == fine


@pytest.mark.parametrize(
    ("target", "entry", "where"),
    [
        ("function", {"function": "{path}:nothing"}, "tools.t.function"),
        ("function", {"function": "{path}:number"}, "tools.t.function"),
        ("function", {"function": "{path}:everything"}, "tools.t.function"),
        ("function", {"function": "missing.py:f"}, "tools.t.function"),
        ("function", {"function": "missing.py:f", "process": True}, "tools.t.function"),
        ("function", {"function": "no_such_module_here:f"}, "tools.t.function"),
        ("class", {"class": "{path}:add"}, "tools.t.class"),
        ("class", {"class": "{path}:Point", "include": ["nothing"]}, "tools.t"),
        ("keys", {"function": "{path}:add", "class": "{path}:Point"}, "tools.t"),
        ("keys", {"seconds": 3}, "tools.t"),
        ("mapping", "x", "tools.t"),
        ("value", {"function": "{path}:add", "seconds": 0}, "tools.t.seconds"),
        ("value", {"function": 3}, "tools.t.function"),
        ("value", {"function": "{path}:add", "prefix": "x"}, "tools.t.prefix"),
        ("value", {"search": {}}, "tools.t.search.corpus"),
        ("value", {"search": {"corpus": "missing.jsonl"}}, "tools.t.search.corpus"),
        ("value", {"mcp": {}}, "tools.t.mcp"),
        ("value", {"mcp": {"command": ["no-such-program-here"]}}, "tools.t.mcp.command"),
        ("value", {"mcp": {"url": "ftp://x"}}, "tools.t.mcp.url"),
        ("value", {"mcp": {"url": "http://x/mcp", "env": {"A": "b"}}}, "tools.t.mcp.env"),
        ("value", {"sandbox": {"language": "perl"}}, "tools.t.sandbox.language"),
    ],
)
def test_wrong_settings_are_refused_with_their_place(code: Code, target: str, entry: Any, where: str) -> None:
    path = code(FUNCTIONS)
    if isinstance(entry, dict):
        entry = {key: value.format(path=path) if isinstance(value, str) else value for key, value in entry.items()}
    codes = ("config.invalid-value", "config.wrong-type", "config.unknown-key", "config.missing-key")
    with refused(codes) as caught:
        check_tools({"t": entry})
    assert where == caught.value.where


def test_names_are_unique_and_plain(code: Code) -> None:
    path = code(SHOP)
    check_tools({"shop": {"class": f"{path}:Shop"}, "python": {"sandbox": {}}})
    with refused("config.invalid-value", "tools.a", "tools.b"):
        check_tools({"a": {"class": f"{path}:Shop"}, "b": {"class": f"{path}:Shop"}})
    with refused("config.invalid-value"):
        check_tools({"a b": {"class": f"{path}:Shop"}})
