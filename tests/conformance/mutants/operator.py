"""Correct operators of several types, and operators with one fault each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

from jackfield.abc.operator import NewRow, Operator, OperatorRequest, OperatorResult, Row, Selection
from mutants import harness
from mutants.harness import Mutant, Reference

LEAKED: list[asyncio.Task[None]] = []  #: what mutants leave behind on purpose
_SHARED: list[str] = []  #: what mutants remember across instances


@attrs.frozen(kw_only=True)
class Config:
    """The shortest prompt that is kept, and a unit."""

    shortest: int = 0
    unit: int = 1


class LengthFilter(Operator):
    """Measures prompts, and keeps those that are long enough."""

    type = "filter"
    decides_by: ClassVar[tuple[str, ...]] = ("shortest",)
    reads: Any = ("prompt",)
    writes: Any = ("length",)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        await asyncio.sleep(0)
        updates, aside = dict[str, dict[str, Any]](), dict[str, str]()
        for row in request.rows:
            prompt = row.values.get("prompt")
            if isinstance(prompt, str):
                updates[row.key] = {"length": self.measure(prompt)}
            else:
                aside[row.key] = "it has no prompt"
        return OperatorResult(updates=updates, set_aside=aside)

    def measure(self, prompt: str) -> Any:
        return len(prompt) // self.config.unit

    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        return {row.key: "too short" for row in rows if row.values["length"] < self.config.shortest}


class Once(Operator):
    """Removes prompts that came before."""

    type = "deduplicator"
    reads = ("prompt",)
    writes: Any = ()

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        self.seen: list[str] = []

    async def process(self, request: OperatorRequest) -> OperatorResult:
        removed = dict[str, str]()
        for row in request.rows:
            if row.values["prompt"] in self.seen:
                removed[row.key] = "again"
            else:
                self.seen.append(row.values["prompt"])
        return self.result(removed, request)

    def result(self, removed: dict[str, str], request: OperatorRequest) -> OperatorResult:
        return OperatorResult(removed=removed)

    def state(self) -> Any:
        return list(self.seen)

    def restore(self, state: Any) -> None:
        self.seen = list(state)


class ShortFirst(Operator):
    """Puts short prompts first."""

    type = "selector"
    reads = ("prompt",)
    writes: Any = ("length",)
    selection: Any = Selection(by="length", largest_first=False)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        return OperatorResult(updates={row.key: {"length": len(row.values["prompt"])} for row in request.rows})


class Numbered(Operator):
    """Makes a second row of each, with a number that counts on."""

    type = "synthesizer"
    reads = ("prompt",)
    writes: Any = ("prompt", "number")
    count = 0

    async def process(self, request: OperatorRequest) -> OperatorResult:
        return OperatorResult(made=tuple(map(self.made, request.rows)))

    def made(self, row: Row) -> NewRow:
        self.count += 1
        return NewRow(parents=(row.key,), values={"prompt": row.values["prompt"].upper(), "number": self.count})

    def state(self) -> Any:
        return self.count

    def restore(self, state: Any) -> None:
        self.count = state


class Share(Operator):
    """Compares the rewards of a request."""

    type = "scorer"
    reads = ("reward",)
    writes = ("share",)
    compares = True

    async def process(self, request: OperatorRequest) -> OperatorResult:
        total = sum(row.values["reward"] for row in request.rows)
        return OperatorResult(updates={row.key: {"share": row.values["reward"] / total} for row in request.rows})


_FIXTURE = {"bad": [{"prompt": 3}], "kept": {"shortest": 10}}
REFERENCES: dict[str, Reference] = {
    "filter": Reference(cls=LengthFilter, config_class=Config, fixture=_FIXTURE),
    "deduplicator": Reference(cls=Once, config_class=Config),
    "selector": Reference(cls=ShortFirst, config_class=Config),
    "synthesizer": Reference(cls=Numbered, config_class=Config),
    "comparing": Reference(cls=Share, config_class=Config),
}


class UnknownType(LengthFilter):
    type = "cleaner"  # type: ignore[assignment]


class ListedColumns(LengthFilter):
    reads: Any = ["prompt"]  # noqa: RUF012 - the fault


class DecidesByNothing(LengthFilter):
    decides_by = ("longest",)


class ReadsMore(LengthFilter):
    async def process(self, request: OperatorRequest) -> OperatorResult:
        for row in request.rows:
            row.values.get("answer")
        return await super().process(request)


class WritesMore(LengthFilter):
    writes = ("size",)

    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        return {}


class NamesOthers(Once):
    def result(self, removed: dict[str, str], request: OperatorRequest) -> OperatorResult:
        return OperatorResult(removed={**removed, **({"row:99": "again"} if len(request.rows) > 2 else {})})


class GivesNoReason(Once):
    def result(self, removed: dict[str, str], request: OperatorRequest) -> OperatorResult:
        return OperatorResult(removed=dict.fromkeys(removed, ""))


class NoParents(Numbered):
    def made(self, row: Row) -> NewRow:
        return attrs.evolve(super().made(row), parents=())


class NotANumber(LengthFilter):
    def measure(self, prompt: str) -> Any:
        return float("inf")

    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        return {}


class InPlace(LengthFilter):
    async def process(self, request: OperatorRequest) -> OperatorResult:
        for row in request.rows:
            if isinstance(row.values, dict):
                row.values["length"] = 0
        return await super().process(request)


class RemembersInstances(Numbered):
    def made(self, row: Row) -> NewRow:
        _SHARED.append(row.key)
        return attrs.evolve(super().made(row), values={"prompt": "x", "number": len(_SHARED)})


class DependsOnCuts(LengthFilter):
    async def process(self, request: OperatorRequest) -> OperatorResult:
        found = await super().process(request)
        return attrs.evolve(found, updates={key: {"length": len(request.rows)} for key in found.updates})

    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        return {row.key: "first" for row in rows if row.key == "row:0"}


class KeepsBadRows(LengthFilter):
    async def process(self, request: OperatorRequest) -> OperatorResult:
        rows = tuple(Row(key=row.key, values={"prompt": str(row.values.get("prompt"))}) for row in request.rows)
        return await super().process(attrs.evolve(request, rows=rows))


class NeverRecovers(LengthFilter):
    failed = False

    async def process(self, request: OperatorRequest) -> OperatorResult:
        found = await super().process(request)
        self.failed = self.failed or bool(found.set_aside)
        return (
            OperatorResult(set_aside={row.key: "an earlier row was bad" for row in request.rows})
            if self.failed
            else found
        )


class ForgetsState(Once):
    def restore(self, state: Any) -> None:
        return


class SavesWhatIsNotJson(Once):
    def state(self) -> Any:
        return {*self.seen}


class FilterRemoves(LengthFilter):
    async def process(self, request: OperatorRequest) -> OperatorResult:
        found = await super().process(request)
        return attrs.evolve(found, removed={"row:4": "short"} if len(request.rows) > 4 else {})


class DecidesByOthers(LengthFilter):
    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        return {row.key: "odd" for row in rows if row.values.get("of_somebody_else") == 2} or super().decide(rows)


class DecidesByPlace(LengthFilter):
    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        return {row.key: "the first" for row in rows[:1]}


class SelectorDecides(ShortFirst):
    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        return {row.key: "no" for row in rows}


class ThresholdInStatistics(LengthFilter):
    def measure(self, prompt: str) -> Any:
        return len(prompt) + self.config.shortest


class ThresholdWithoutEffect(LengthFilter):
    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        return {}


class MakesRows(LengthFilter):
    writes = ("length", "prompt")

    async def process(self, request: OperatorRequest) -> OperatorResult:
        found = await super().process(request)
        made = [NewRow(parents=(row.key,), values={"prompt": "x"}) for row in request.rows]
        return attrs.evolve(found, made=tuple(made))


class ScoresInWords(Share):
    async def process(self, request: OperatorRequest) -> OperatorResult:
        return OperatorResult(updates={row.key: {"share": "a part"} for row in request.rows})


class NoOrder(ShortFirst):
    selection = None


class OrderByNothing(ShortFirst):
    selection = Selection(by="size")


class RemovesTheFirst(Once):
    def result(self, removed: dict[str, str], request: OperatorRequest) -> OperatorResult:
        if len(request.rows) == 2:
            return OperatorResult(removed={request.rows[0].key: "again"})
        return super().result(removed, request)


class ForgetsRequests(Once):
    async def process(self, request: OperatorRequest) -> OperatorResult:
        found = await super().process(request)
        self.seen = []
        return found


class FailsWithoutRows(Share):
    async def process(self, request: OperatorRequest) -> OperatorResult:
        request.rows[0]
        return await super().process(request)


class LeavesTask(LengthFilter):
    async def process(self, request: OperatorRequest) -> OperatorResult:
        LEAKED.append(asyncio.ensure_future(asyncio.sleep(30)))
        return await super().process(request)

    async def close(self) -> None:
        for task in LEAKED:
            task.cancel()


class ClosesOnce(LengthFilter):
    closed = False

    async def close(self) -> None:
        if self.closed:
            raise RuntimeError("it is closed")
        self.closed = True


def _mutant(cls: type, what: str, numbers: str, reference: str = "filter") -> tuple[str, Mutant]:
    return reference, harness.mutant("operator", cls, what, numbers, fixture=REFERENCES[reference].fixture)


#: Each with the reference of which it is a copy with one fault.
MUTANTS: dict[str, tuple[str, Mutant]] = {
    found[1].cls.__name__: found
    for found in (
        _mutant(UnknownType, "its type is unknown", "010"),
        _mutant(ListedColumns, "its columns are a list", "010"),
        _mutant(DecidesByNothing, "decides_by is no setting", "010 020"),
        _mutant(ReadsMore, "it reads a column that it does not declare", "011"),
        _mutant(WritesMore, "it writes a column that it does not declare", "012 020"),
        _mutant(NamesOthers, "it names a row that is not in its request", "012 016", "deduplicator"),
        _mutant(GivesNoReason, "it gives no reason", "012", "deduplicator"),
        _mutant(NoParents, "new rows have no parents", "012", "synthesizer"),
        _mutant(NotANumber, "a statistic is infinite", "013 015 016 018 020"),
        _mutant(InPlace, "it changes rows in place", "014"),
        _mutant(RemembersInstances, "results depend on earlier operators of the process", "015 016 018", "synthesizer"),
        _mutant(DependsOnCuts, "a statistic depends on the number of rows", "016"),
        _mutant(KeepsBadRows, "a bad row is processed", "017"),
        _mutant(NeverRecovers, "after a bad row it sets everything aside", "017"),
        _mutant(ForgetsState, "it forgets its state", "018", "deduplicator"),
        _mutant(SavesWhatIsNotJson, "its state is no JSON", "018", "deduplicator"),
        _mutant(FilterRemoves, "a filter removes rows while it computes", "016 019 021"),
        _mutant(DecidesByOthers, "it decides by a column that is no statistic", "019"),
        _mutant(DecidesByPlace, "its decision depends on the order of rows", "019"),
        _mutant(SelectorDecides, "a selector decides", "019", "selector"),
        _mutant(ThresholdInStatistics, "a statistic depends on the threshold", "020"),
        _mutant(ThresholdWithoutEffect, "the threshold has no effect", "020"),
        _mutant(MakesRows, "a filter makes rows", "021"),
        _mutant(ScoresInWords, "a scorer writes a text", "021", "comparing"),
        _mutant(NoOrder, "a selector has no order", "021", "selector"),
        _mutant(OrderByNothing, "the order is by an unknown column", "021", "selector"),
        _mutant(RemovesTheFirst, "it removes the first of two equal rows", "022", "deduplicator"),
        _mutant(ForgetsRequests, "it forgets rows of earlier requests", "016 022", "deduplicator"),
        _mutant(FailsWithoutRows, "no rows are an error", "023", "comparing"),
        _mutant(LeavesTask, "a request leaves a task", "024"),
        _mutant(ClosesOnce, "closing twice is an error", "025"),
    )
}
