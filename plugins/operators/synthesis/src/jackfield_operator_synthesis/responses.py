"""New responses to the task of an experience: repairs, variants and splices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import xxhash
from attrs.validators import ge, gt, in_, optional

from jackfield.abc.operator import NewRow, OperatorContext, OperatorRequest, OperatorResult, Row
from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield_operator_synthesis.synthesizer import (
    RESPONSE_COLUMNS,
    AskedConfig,
    BadRow,
    GatedConfig,
    Synthesizer,
    conversation,
    described,
    filled,
    new_response,
    number_of,
    text_of,
    value_of,
)

_REPAIR = """{prompt}

An earlier answer was not right:
{response}
{feedback}
Answer again, and correct what is wrong."""
_VARIANT = """{prompt}

This answer is right:
{response}

Write the same answer in another way, complete and no longer than necessary."""
_STEP = re.compile(r"(?<=[.!?\n])\s*")


@attrs.frozen(kw_only=True)
class RepairConfig(AskedConfig):
    """Settings of ``repair``."""

    below: float = option(1.0, "a response with a lower reward has failed")
    attempts: int = option(2, "answers that are asked for, until one passes the gate", ge(1))
    keep: int = option(1, "repairs that are kept of each response", ge(1))
    hint: str | None = option(None, "column with feedback for the model, such as ground_truth; null: none")
    template: str = option(
        _REPAIR,
        "what the model is asked, with {prompt}, {response} and {feedback}; {prompt} alone asks the task once more",
    )


class Repair(Synthesizer):
    """Makes right responses of failed ones: a model answers again, and what passes the gate is a new row."""

    writes = RESPONSE_COLUMNS
    config: RepairConfig

    @property
    def reads(self) -> tuple[str, ...]:
        """Return all columns: the reward may read any."""
        return ("*",)

    async def make(self, row: Row) -> Sequence[NewRow]:
        """Ask until enough answers pass."""
        values, config = row.values, self.config
        reward, response = number_of(values, "reward"), text_of(values, "response")
        hint = f"Feedback: {value_of(values, config.hint)}\n" if config.hint is not None else ""
        if reward >= config.below:
            return []
        messages, made = _asked(values, config.template, {"response": response, "feedback": hint}), list[NewRow]()
        assert self.gate is not None
        for attempt in range(config.attempts):
            answer = await self.answer(messages, row.key, attempt)
            if answer in (new.values["response"] for new in made):
                continue
            if (score := await self.gate.passed(values, answer, reward)) is not None:
                made.append(NewRow(parents=(row.key,), values=new_response(values, answer, score)))
                if len(made) == config.keep:
                    break
        return made


@attrs.frozen(kw_only=True)
class AmplifyConfig(AskedConfig):
    """Settings of ``amplify``."""

    minimum: float = option(1.0, "a response with at least this reward has succeeded")
    variants: int = option(1, "answers that are asked for", ge(1))
    longest: float | None = option(
        None, "most characters of a variant, as a share of the response's, such as 0.8; null: any", optional(gt(0.0))
    )
    template: str = option(_VARIANT, "what the model is asked, with {prompt} and {response}")


class Amplify(Synthesizer):
    """Makes more of successful responses: a model writes them in other ways, and what passes the gate is a new row."""

    reads = ("*",)
    writes = RESPONSE_COLUMNS
    config: AmplifyConfig

    async def make(self, row: Row) -> Sequence[NewRow]:
        """Ask for variants, and keep those that differ and pass."""
        values, made = row.values, dict[str, NewRow]()
        reward, response = number_of(values, "reward"), text_of(values, "response")
        if reward < self.config.minimum:
            return []
        messages = _asked(values, self.config.template, {"response": response})
        assert self.gate is not None
        for variant in range(self.config.variants):
            answer = await self.answer(messages, row.key, variant)
            if answer.strip() == response.strip() or answer in made:
                continue
            if self.config.longest is not None and len(answer) > self.config.longest * len(response):
                self.context.count("rejected", 1)
                continue
            if (score := await self.gate.passed(values, answer, reward)) is not None:
                made[answer] = NewRow(parents=(row.key,), values=new_response(values, answer, score))
        return list(made.values())


def _asked(values: Mapping[str, Any], template: str, more: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """Return the prompt's messages, of which the last has the template's text with its own in it."""
    *before, last = conversation(values)
    return [*before, {**last, "content": filled(template, {"prompt": last.get("content", ""), **more})}]


@attrs.frozen(kw_only=True)
class SpliceConfig(GatedConfig):
    """Settings of ``splice``."""

    cut: Literal["steps", "words"] = option(
        "steps", "where responses may be cut: after steps, or words", in_(("steps", "words"))
    )
    attempts: int = option(4, "splices that are tried of each group", ge(1))
    keep: int = option(1, "splices that are kept of each group", ge(1))


class Splice(Synthesizer):
    """Joins the beginning of one response with the end of another one of its group; needs no model.

    A step ends with a sentence or a line. Which responses are joined, and where, follows from the seed.
    """

    reads = ("*",)
    writes = RESPONSE_COLUMNS
    compares = True
    config: SpliceConfig

    def __init__(self, config: SpliceConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        if config.keep > config.attempts:
            details: Any = {"where": "keep", "expected": f"at most attempts ({config.attempts})", "found": config.keep}
            raise ConfigError("more splices are kept than tried", **details)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Try splices of each group."""
        groups, aside = dict[str, list[Row]](), dict[str, str]()
        for row in request.rows:
            try:
                text_of(row.values, "response")
                number_of(row.values, "reward")
                groups.setdefault(str(row.values.get("group", row.key)), []).append(row)
            except BadRow as error:
                aside[row.key] = described(error)
        work = {rows[0].key: self._spliced(rows) for rows in groups.values() if len(rows) > 1}
        found = await self.collected(work, request)
        return attrs.evolve(found, set_aside={**found.set_aside, **aside})

    async def _spliced(self, rows: Sequence[Row]) -> Sequence[NewRow]:
        known, made = {text_of(row.values, "response") for row in rows}, list[NewRow]()
        rewards = {row.key: number_of(row.values, "reward") for row in rows}
        assert self.gate is not None
        for first, second, text in self._candidates(rows):
            if text in known:
                continue
            known.add(text)
            parent = max(rewards[first.key], rewards[second.key])
            if (score := await self.gate.passed(first.values, text, parent)) is not None:
                values = new_response(first.values, text, score)
                made.append(NewRow(parents=(first.key, second.key), values=values))
                if len(made) == self.config.keep:
                    break
        return made

    def _candidates(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Row, str]]:
        """Yield ``attempts`` splices; each draw is a hash of the seed, the group's first key and its number."""
        for attempt in range(self.config.attempts):
            number = xxhash.xxh3_64_intdigest(f"{self.context.seed}/{rows[0].key}/{attempt}".encode())
            number, at = divmod(number, len(rows))
            number, step = divmod(number, len(rows) - 1)
            first, second = rows[at], rows[(at + 1 + step) % len(rows)]
            parts = [self._parts(text_of(each.values, "response")) for each in (first, second)]
            number, head = divmod(number, max(len(parts[0]) - 1, 1))
            tail = number % max(len(parts[1]) - 1, 1)
            yield first, second, "".join([*parts[0][: head + 1], *parts[1][tail + 1 :]])

    def _parts(self, text: str) -> list[str]:
        if self.config.cut == "words":
            return re.findall(r"\s*\S+", text)
        ends = [match.end() for match in _STEP.finditer(text) if match.end() < len(text)]
        return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True) if start < end]
