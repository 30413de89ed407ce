"""What a rollout has beside the model in the suite of agents: tools, other models, a folder, metrics and events."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.agent import ToolCall, ToolResult
from jackfield.abc.reward import GeneratedText
from jackfield_conformance.support.agent_model import Model

_BACKWARDS = 40  #: turns of the event loop that the first call takes where later calls end first
_CHAT = ("seven",)  #: what other models say by default


@attrs.frozen(kw_only=True)
class Called:
    """A tool call that has ended."""

    call: ToolCall
    result: ToolResult
    before: int  #: requests to the model when it began
    after: int  #: and when it ended


class Tools:
    """The tools of one rollout, whose results are scripted; unknown tools and ``fails`` are errors.

    The call ``hang_at``, counted from 0, never ends; ``ends_at`` ends the rollout. Each result has the ``reward``. With
    ``backwards`` later calls end before earlier ones.
    """

    def __init__(
        self,
        scripts: Sequence[Mapping[str, Any]],
        model: Model,
        *,
        hang_at: int | None = None,
        ends_at: int | None = None,
        fails: bool = False,
        reward: float | None = None,
        backwards: bool = False,
    ) -> None:
        self.calls: list[Called] = []  #: in the order in which they ended
        self.asked: list[ToolCall] = []  #: in the order in which they began
        self.running = 0
        self.hangs = asyncio.Event()  #: set when the call ``hang_at`` has started
        self._scripts = {script["name"]: script for script in scripts}
        self._model, self._fails, self._reward, self._backwards = model, fails, reward, backwards
        self._hang_at, self._ends_at = hang_at, ends_at

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The schemas in OpenAI's form; a tool takes any arguments unless its script has ``parameters``."""
        return tuple(
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": script.get("description", ""),
                    "parameters": script.get("parameters", {"type": "object"}),
                },
            }
            for name, script in self._scripts.items()
        )

    def begin(self, model: Model) -> None:
        """Forget the calls so far."""
        self.calls, self.asked, self._model = [], [], model

    async def call(self, call: ToolCall) -> ToolResult:
        """Return what the script says next."""
        number, before = len(self.asked), len(self._model.requests)
        self.asked.append(call)
        self.running += 1
        try:
            for _ in range(max(1, _BACKWARDS - 4 * number if self._backwards else 1)):
                await asyncio.sleep(0)
            if number == self._hang_at:
                self.hangs.set()
                await asyncio.Event().wait()
            result = self._result(number, call)
            self.calls.append(Called(call=call, result=result, before=before, after=len(self._model.requests)))
            return result
        finally:
            self.running -= 1

    def _result(self, number: int, call: ToolCall) -> ToolResult:
        script = self._scripts.get(getattr(call, "name", ""))
        if script is None:
            return ToolResult(text=f"no tool number {number}", is_error=True)
        if self._fails:
            return ToolResult(text=f"error number {number}", is_error=True)
        texts = script.get("results") or ()
        earlier = sum(each.name == call.name for each in self.asked[:number])
        text = texts[min(earlier, len(texts) - 1)] if texts else f"result number {number}"
        return ToolResult(text=text, reward=self._reward, ends=number == self._ends_at)


class Chat:
    """Other models, whose answers are scripted; the last is repeated. The call ``hang_at`` never ends."""

    def __init__(self, answers: Sequence[str], *, hang_at: int | None = None) -> None:
        self.asked: list[tuple[str, Sequence[Mapping[str, Any]], Mapping[str, Any]]] = []
        self.running = 0
        self.hangs = asyncio.Event()
        self._answers, self._hang_at = tuple(answers), hang_at

    async def __call__(self, model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
        """Return what the script says next."""
        number = len(self.asked)
        self.asked.append((model, messages, sampling))
        self.running += 1
        try:
            await asyncio.sleep(0)
            if number == self._hang_at:
                self.hangs.set()
                await asyncio.Event().wait()
            text = self._answers[min(number, len(self._answers) - 1)]
            return GeneratedText(text=text, tokens=len(text))
        finally:
            self.running -= 1


@attrs.define(eq=False, kw_only=True)
class Services:
    """The services of one rollout."""

    tools: Tools
    chat: Chat
    place: Path  #: where its scratch folder is made
    metrics: list[tuple[str, float]] = attrs.field(factory=list)
    events: list[tuple[str, Mapping[str, Any]]] = attrs.field(factory=list)

    @classmethod
    def of(
        cls,
        fixture: Mapping[str, Any],
        model: Model,
        place: Path,
        *,
        tools: Mapping[str, Any] | None = None,
        chat: Mapping[str, Any] | None = None,
    ) -> Services:
        """Make those of a fixture's ``tools`` and ``chat``; the arguments go to :class:`Tools` and :class:`Chat`."""
        return cls(
            tools=Tools(fixture.get("tools") or (), model, **(tools or {})),
            chat=Chat(fixture.get("chat") or _CHAT, **(chat or {})),
            place=place,
        )

    def folder(self) -> Path:
        """Return the scratch folder, which the first call makes."""
        self.place.mkdir(parents=True, exist_ok=True)
        return self.place

    def metric(self, name: str, number: float) -> None:
        """Record a metric."""
        self.metrics.append((name, number))

    def event(self, name: str, **fields: Any) -> None:
        """Record an event."""
        self.events.append((name, fields))

    def begin(self, model: Model) -> None:
        """Begin another rollout of the same object: the scripts start again."""
        self.tools.begin(model)
        self.chat.asked.clear()

    def end(self) -> None:
        """Remove the scratch folder."""
        shutil.rmtree(self.place, ignore_errors=True)
