"""New tasks with answers: counterfactuals, whose prompt differs in one place, and summaries of long trajectories."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import xxhash
from attrs.validators import ge, gt, in_, lt

from jackfield.abc.operator import NewRow, OperatorContext, Row
from jackfield.errors import ConfigError, OperatorError
from jackfield.sdk import option
from jackfield_operator_synthesis.synthesizer import (
    RESPONSE_COLUMNS,
    AskedConfig,
    Synthesizer,
    conversation,
    filled,
    new_response,
    number_of,
    text_of,
)
from jackfield_user_code import UserCodePool, WorkerLimits, digest_file

_SUMMARY = """Here is the middle of a longer conversation:

{middle}

Summarise it in a few sentences, with every fact that is needed later."""
_SHORTER = """{prompt}

Here is a long answer:
{response}

Write it again in fewer words, with every step that matters and the same result."""
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.]*\w)")


@attrs.frozen(kw_only=True)
class CounterfactualConfig(AskedConfig):
    """Settings of ``counterfactual``."""

    change: Literal["numbers", "words", "turn", "function"] = option(
        "numbers",
        "numbers: one number of the last message gets another value; words: a word of `words` is replaced there; turn: "
        "the model acts in another way at a turn of the assistant; function: what your function says",
        in_(("numbers", "words", "turn", "function")),
    )
    function: str | None = option(
        None,
        "folder/file.py:function, called with row. With change: function it returns the changed columns. With numbers "
        "and words, row has the changed prompt and messages, and it returns their ground truth; a verifier alone needs "
        "none. None: there is no such task",
    )
    words: Mapping[str, str] = option(factory=dict, help="with change: words, what a word is replaced by")
    spread: int = option(5, "most by which a number changes", ge(1))
    attempts: int = option(2, "answers that are asked for, until one passes the gate", ge(1))
    variants: int = option(1, "changes of each row", ge(1))
    seconds: float = option(60.0, "longest time of a call of the function", gt(0.0))


class Counterfactual(Synthesizer):
    """Changes one thing of a task, has the model answer it, and keeps answers that pass the gate by the new truth."""

    reads = ("*",)
    writes = ("*",)
    config: CounterfactualConfig

    def __init__(self, config: CounterfactualConfig, context: OperatorContext) -> None:
        _check(config)
        super().__init__(config, context)
        self._words = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, config.words))})(?!\w)")
        self._pool: UserCodePool | None = None
        if config.function is not None:
            place, separator, name = config.function.rpartition(":")
            if not separator or not name.isidentifier() or not Path(place).expanduser().is_file():
                details: Any = {"where": "function", "expected": "folder/file.py:function", "found": config.function}
                raise ConfigError("a path does not name a function of a file", **details)
            self._file = Path(place).expanduser()
            options: dict[str, Any] = {"workers": 1, "clock": context.clock, "limits": WorkerLimits()}
            self._pool = UserCodePool(config.function, keywords={}, **options)

    @property
    def version(self) -> str:
        """Return what a synthesizer's is, and a digest of the function's file."""
        return f"{super().version} {digest_file(self._file) if self._pool is not None else ''}".strip()

    async def start(self) -> None:
        """Start the function's process, too."""
        if self._pool is not None:
            await self._pool.start()
        await super().start()

    async def close(self) -> None:
        """Kill the function's process, too."""
        await super().close()
        if self._pool is not None:
            await self._pool.close()

    async def make(self, row: Row) -> Sequence[NewRow]:
        """Change, ask and gate."""
        made = list[NewRow]()
        assert self.gate is not None
        conversation(row.values)
        for variant in range(self.config.variants):
            if (changed := await self._changed(row, variant)) is None:
                continue
            values = {**row.values, **changed.columns}
            for attempt in range(self.config.attempts):
                answer = await self.answer(conversation(values), row.key, variant, attempt)
                if answer.strip() == changed.old:
                    continue
                if (score := await self.gate.passed(values, answer)) is not None:
                    own = {**changed.columns, **new_response(row.values, answer, score)}
                    made.append(NewRow(parents=(row.key,), values=own))
                    break
        return made

    async def _changed(self, row: Row, variant: int) -> _Changed | None:
        """Return a changed task; None: there is none."""
        values = dict(row.values)
        if self.config.change == "function":
            found = await self._call({**values, "variant": variant})
            if found is not None and not isinstance(found, dict):
                found = type(found).__name__
                raise OperatorError("a function gave no columns", where=self.config.function, found=found)
            return None if found is None else _Changed(found)
        messages = conversation(values)
        drawn = xxhash.xxh3_64_intdigest(f"{self.context.seed}/{row.key}/{variant}".encode())
        if self.config.change == "turn":
            return _turn(messages, drawn)
        text = text_of(messages[-1], "content")
        if (content := self._replaced(text, drawn)) is None:
            return None
        columns = {"messages": [*messages[:-1], {**messages[-1], "content": content}], "prompt": content}
        truth = None if self._pool is None else await self._call({**values, **columns})
        if truth is None and self._pool is not None:
            return None
        return _Changed({**columns, "ground_truth": None if truth is None else str(truth)})

    def _replaced(self, text: str, drawn: int) -> str | None:
        """Return a text with another number or word at a place; None: it has none."""
        places = list((_NUMBER if self.config.change == "numbers" else self._words).finditer(text))
        if not places:
            return None
        drawn, at = divmod(drawn, len(places))
        old = places[at][0]
        if self.config.change == "words":
            new = self.config.words[old]
        else:
            step = 1 + drawn % self.config.spread
            new = str(int(old) + (step if drawn & 1024 or int(old) < step else -step))
        return f"{text[: places[at].start()]}{new}{text[places[at].end() :]}"

    async def _call(self, values: Mapping[str, Any]) -> Any:
        assert self._pool is not None
        result = await self._pool.call({"row": values}, self.config.seconds, "the function of counterfactuals")
        if result.status != "ok":
            raise OperatorError("a function failed", where=self.config.function, found=result.error or result.status)
        return result.value


def _check(config: CounterfactualConfig) -> None:
    """Refuse settings that lack what the change needs, or that have no effect."""
    needs = config.change == "function" or (config.change != "turn" and config.gate.by != "verifier")
    if needs and config.function is None:
        raise ConfigError("a changed task has no truth", where="function", expected="folder/file.py:function")
    if config.change == "turn" and config.function is not None:
        raise ConfigError("the function has no effect", where="function", expected="another change than turn")
    if (config.change == "words") != bool(config.words):
        details: Any = {"where": "words", "expected": "words with change: words", "found": dict(config.words)}
        raise ConfigError("the words do not fit `change`", **details)


@attrs.frozen
class _Changed:
    """A task that differs in one place."""

    columns: Mapping[str, Any]
    old: str = ""  #: what was said in this place before, and is no new answer


def _turn(messages: Sequence[Mapping[str, Any]], drawn: int) -> _Changed | None:
    """Return a conversation until before a turn of the assistant; None: it has none."""
    turns = [at for at, message in enumerate(messages) if at and message["role"] == "assistant"]
    if not turns:
        return None
    at = turns[drawn % len(turns)]
    before, old = list(messages[:at]), str(messages[at].get("content") or "").strip()
    return _Changed({"messages": before, "prompt": str(before[-1].get("content") or "")}, old)


@attrs.frozen(kw_only=True)
class SummarizeConfig(AskedConfig):
    """Settings of ``summarize``."""

    of: Literal["response", "messages"] = option(
        "response",
        "response: a long response is written again in fewer words; messages: the middle of a long conversation "
        "becomes a summary",
        in_(("response", "messages")),
    )
    longer_than: int = option(2000, "characters from which something is long", ge(1))
    ratio: float = option(0.7, "most characters of what is new, as a share of the old ones", [gt(0.0), lt(1.0)])
    keep_last: int = option(2, "last messages that stay as they are", ge(1))
    answer: Literal["new", "old"] = option(
        "new",
        "with of: messages, new: the model answers from the summary; old: the response stays, and is scored once more",
        in_(("new", "old")),
    )
    template: str | None = option(
        None, "what the model is asked: with {prompt} and {response}, or with {middle}; null: one that is built in"
    )
    attempts: int = option(2, "times that it is asked, until the result is short enough and passes the gate", ge(1))


class Summarize(Synthesizer):
    """Makes short trajectories of long ones, which pass the gate as the long ones did."""

    reads = ("*",)
    writes = ("messages", "prompt", *RESPONSE_COLUMNS)
    config: SummarizeConfig

    async def make(self, row: Row) -> Sequence[NewRow]:
        """Summarise what is long."""
        number_of(row.values, "reward")
        short = self._response if self.config.of == "response" else self._messages
        for attempt in range(self.config.attempts):
            if (made := await short(row, attempt)) is not None:
                return [NewRow(parents=(row.key,), values=made)] if made else []
        return []

    async def _response(self, row: Row, attempt: int) -> Mapping[str, Any] | None:
        """Return the columns with a shorter response; none of them: it is not long; None: it has failed."""
        response = text_of(row.values, "response")
        if len(response) <= self.config.longer_than:
            return {}
        *before, last = conversation(row.values)
        given = {"prompt": last.get("content", ""), "response": response}
        asked = {**last, "content": filled(self.config.template or _SHORTER, given)}
        answer = await self.answer([*before, asked], row.key, attempt)
        return await self._gated(row, len(response), len(answer), {"response": answer}, row.values)

    async def _messages(self, row: Row, attempt: int) -> Mapping[str, Any] | None:
        messages = conversation(row.values)
        first = next((at for at, each in enumerate(messages) if each.get("role") == "user"), 0) + 1
        middle = messages[first : len(messages) - self.config.keep_last]
        length = sum(len(str(each.get("content", ""))) for each in middle)
        if length <= self.config.longer_than:
            return {}
        told = "\n".join(f"{each.get('role')}: {each.get('content')}" for each in middle)
        asked = filled(self.config.template or _SUMMARY, {"middle": told})
        summary = await self.answer([{"role": "user", "content": asked}], row.key, attempt)
        said = f"(Summary of what came in between: {summary})"
        start = {**messages[first - 1], "content": f"{messages[first - 1].get('content', '')}\n\n{said}"}
        short = [*messages[: first - 1], start, *messages[len(messages) - self.config.keep_last :]]
        if self.config.answer == "new":
            answer = await self.answer(short, row.key, attempt, "answer")
        else:
            answer = text_of(row.values, "response")
        changed = {"messages": short, "prompt": str(short[-1].get("content", "")), "response": answer}
        return await self._gated(row, length, len(said), changed, {**row.values, "messages": short})

    async def _gated(
        self, row: Row, old: int, new: int, changed: Mapping[str, Any], values: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        assert self.gate is not None
        if new > self.config.ratio * old:
            self.context.count("rejected", 1)
            return None
        score = await self.gate.passed(values, text_of(changed, "response"), number_of(row.values, "reward"))
        return None if score is None else {**changed, **new_response(row.values, changed["response"], score)}
