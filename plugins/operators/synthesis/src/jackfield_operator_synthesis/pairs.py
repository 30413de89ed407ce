"""Preference pairs from groups of experiences, which DPO trains on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, ClassVar, Literal

import attrs
from attrs.validators import gt, in_

from jackfield.abc.operator import NewRow, Operator, OperatorRequest, OperatorResult, OperatorType, Row
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
        "responses: whole responses of a group; turns: where two conversations of a group begin alike, the first turns "
        "of the assistant in which they differ",
        in_(("responses", "turns")),
    )
    pairs: Literal["best_worst", "all"] = option("best_worst", "pairs of each group", in_(("best_worst", "all")))
    minimum_margin: float = option(1e-6, "least difference of the rewards of a pair", gt(0.0))
    minimum: float | None = option(None, "least reward of a chosen response; null: any")
    column: str = option("conversation", "with of: turns, column with the whole conversations")


class PreferencePairs(Operator):
    """Makes rows with ``prompt``, ``chosen``, ``rejected`` and ``margin`` from groups whose rewards differ.

    The rewards are the gate. Equal responses make no pair. A pair has no ``response``, so that it is no sample.
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
        """Compare the rows of each group."""
        groups, aside, made = dict[str, list[tuple[float, Row]]](), dict[str, str](), list[NewRow]()
        for row in request.rows:
            try:
                self._checked(row.values)
                reward = number_of(row.values, "reward")
            except BadRow as error:
                aside[row.key] = described(error)
                continue
            groups.setdefault(str(row.values.get("group", row.key)), []).append((reward, row))
        for rows in groups.values():
            for better, worse in self._chosen(rows):
                if (values := self._pair(better[1].values, worse[1].values)) is not None:
                    values |= {"margin": better[0] - worse[0], "response": None}
                    made.append(NewRow(parents=(better[1].key, worse[1].key), values=values))
        return OperatorResult(made=tuple(made), set_aside=aside)

    def _checked(self, values: Mapping[str, Any]) -> None:
        if self.config.of == "responses":
            text_of(values, "response")
            conversation(values)
            return
        checked_messages(value_of(values, self.config.column), self.config.column)

    def _chosen(self, rows: Sequence[tuple[float, Row]]) -> Iterator[tuple[tuple[float, Row], tuple[float, Row]]]:
        """Yield pairs, the better row first."""
        ordered = sorted(rows, key=lambda each: -each[0])  # stable: equal ones stay in order
        pairs = combinations(ordered, 2) if self.config.pairs == "all" else [(ordered[0], ordered[-1])]
        for better, worse in pairs:
            passes = self.config.minimum is None or better[0] >= self.config.minimum
            if passes and better[0] - worse[0] >= self.config.minimum_margin:
                yield better, worse

    def _pair(self, better: Mapping[str, Any], worse: Mapping[str, Any]) -> dict[str, Any] | None:
        if self.config.of == "responses":
            chosen, rejected = text_of(better, "response"), text_of(worse, "response")
            return (
                None if chosen == rejected else {"prompt": conversation(better), "chosen": chosen, "rejected": rejected}
            )
        one, other = [*better[self.config.column]], [*worse[self.config.column]]
        shared = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if shared is None or not shared or {one[shared]["role"], other[shared]["role"]} != {"assistant"}:
            return None
        return {"prompt": one[:shared], "chosen": [one[shared]], "rejected": [other[shared]]}
