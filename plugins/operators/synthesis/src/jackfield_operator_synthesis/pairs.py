"""Preference pairs from groups of experiences, which DPO trains on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import inf
from typing import Any, ClassVar, Literal

import attrs
from attrs.validators import gt, in_

from jackfield.abc.operator import NewRow, Operator, OperatorRequest, OperatorResult, OperatorType
from jackfield.sdk import option
from jackfield_operator_synthesis.synthesizer import (
    BadRow,
    checked_messages,
    conversation,
    described,
    number_of,
    text_of,
    value_of,
)


@attrs.frozen(kw_only=True)
class PreferencePairsConfig:
    """Settings of ``preference_pairs``."""

    of: Literal["responses", "turns"] = option(
        "responses",
        "responses: whole responses of a group; turns: turns of the assistant in which conversations of a group differ "
        "after they have begun alike",
        in_(("responses", "turns")),
    )
    pairs: Literal["best_worst", "all"] = option(
        "best_worst", "pairs of each prompt: the best answer with the worst, or all", in_(("best_worst", "all"))
    )
    minimum_margin: float = option(1e-6, "least difference of the values of a pair", gt(0.0))
    minimum: float | None = option(None, "least value of a chosen answer; null: any")
    column: str = option("conversation", "with of: turns, column with the whole conversations")


@attrs.define
class _Answer:
    """One way in which conversations of a group go on after a prompt."""

    prompt: list[dict[str, Any]]
    said: Any  #: a text, or the messages of a turn
    rows: list[tuple[float, str]] = attrs.field(factory=list)  #: reward and key of each row that has it

    @property
    def value(self) -> float:
        """The mean reward."""
        return sum(reward for reward, _ in self.rows) / len(self.rows)

    @property
    def best(self) -> str:
        """The key of the row with the highest reward, the first of them."""
        return max(self.rows, key=lambda each: each[0])[1]


class PreferencePairs(Operator):
    """Makes rows with ``prompt``, ``chosen``, ``rejected`` and ``margin`` from groups whose rewards differ.

    What is compared follows the same prompt. Its value is the mean reward of all rows of the group that have it, so
    that no pair contradicts another one. The rewards are the gate. A pair has no ``response``: it is no sample.
    """

    type: ClassVar[OperatorType] = "synthesizer"
    compares = True
    writes = ("prompt", "chosen", "rejected", "margin", "response")
    config: PreferencePairsConfig

    @property
    def reads(self) -> tuple[str, ...]:
        """Return prompts, rewards, and what is compared."""
        own = ("response", "prompt", "messages") if self.config.of == "responses" else (self.config.column,)
        return ("reward", "group", *own)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Compare the answers of each group."""
        #: by group and prompt, the answers
        places, aside = dict[tuple[str, str], dict[str, _Answer]](), dict[str, str]()
        for row in request.rows:
            try:
                found, reward = list(self._answers(row.values)), number_of(row.values, "reward")
            except BadRow as error:
                aside[row.key] = described(error)
                continue
            for prompt, said in found:
                place = str(row.values.get("group", row.key)), _text(prompt)
                answer = places.setdefault(place, {}).setdefault(_text(said), _Answer(prompt, said))
                answer.rows.append((reward, row.key))
        made = [pair for answers in places.values() for pair in self._pairs(list(answers.values()))]
        return OperatorResult(made=tuple(made), set_aside=aside)

    def _answers(self, values: Mapping[str, Any]) -> Iterator[tuple[list[dict[str, Any]], Any]]:
        """Yield what a row says, each with the conversation before: its response, or each turn of the assistant."""
        if self.config.of == "responses":
            yield conversation(values), text_of(values, "response")
            return
        messages = checked_messages(value_of(values, self.config.column), self.config.column)
        for at, message in enumerate(messages):
            if at and message["role"] == "assistant":
                yield messages[:at], [message]

    @property
    def _least(self) -> float:
        return -inf if self.config.minimum is None else self.config.minimum

    def _pairs(self, answers: Sequence[_Answer]) -> Iterator[NewRow]:
        """Yield pairs of answers to a prompt, of which the first has the higher value."""
        ordered = sorted(answers, key=lambda each: -each.value)  # stable: equal ones stay in order
        pairs = combinations(ordered, 2) if self.config.pairs == "all" else [(ordered[0], ordered[-1])]
        for better, worse in pairs:
            margin = better.value - worse.value
            if margin < self.config.minimum_margin or better.value < self._least:
                continue
            pair = {"prompt": better.prompt, "chosen": better.said, "rejected": worse.said}
            yield NewRow(parents=(better.best, worse.best), values={**pair, "margin": margin, "response": None})


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
