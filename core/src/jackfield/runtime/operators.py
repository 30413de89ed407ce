"""The service of a process that holds operators of a plugin, whose interpreter may lack what the run needs.

A pipeline has the other end (``jackfield_pipelines.processes``): it sends rows, and answers what operators ask of their
context. Everything travels as plain values.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar, cast

import attrs
import msgspec

from jackfield.abc.operator import (
    NewRow,
    Operator,
    OperatorContext,
    OperatorRequest,
    OperatorResult,
    OperatorType,
    Row,
    Selection,
    Target,
    Use,
)
from jackfield.abc.reward import GeneratedText, HttpAnswer
from jackfield.errors import OperatorError
from jackfield.plugins.registry import installed
from jackfield.sdk.rpc import Connection, Contract, Service, caller, stub

T = TypeVar("T")

PART_BYTES = 8 * 2**20  #: of rows in one message, which may have one longer row
LONGEST_BYTES = 48 * 2**20  #: of a row; a message has at most 64 MiB
_ASK_SECONDS = 3600.0  #: for an answer of the context; the request has a shorter deadline


@attrs.frozen(kw_only=True)
class Place:
    """What of an operator's context is plain."""

    seed: int
    target: Target
    columns: Mapping[str, str]
    folder: Path | None


@attrs.frozen(kw_only=True)
class Declared:
    """What an operator says about itself."""

    type: OperatorType
    decides_by: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    compares: bool
    uses: tuple[Use, ...]
    version: str
    selection: Selection | None

    @classmethod
    def by(cls, operator: Operator) -> Declared:
        """Ask an operator."""
        return cls(**{name: getattr(operator, name) for name in attrs.fields_dict(cls)})


@attrs.frozen(kw_only=True)
class Part:
    """A part of the answer to a request. The last one has the state after it, and what was counted."""

    result: OperatorResult
    last: bool = False
    state: Any = None
    counted: Sequence[tuple[str, float]] = ()
    declared: Declared | None = None


class OperatorServices:
    """What operators in the process may ask of their contexts; ``operator`` is the number of the one who asks."""

    async def request(
        self, operator: int, method: str, url: str, body: Any, headers: dict[str, str] | None, limit: int
    ) -> HttpAnswer:
        """Send an HTTP request."""
        raise NotImplementedError

    async def generate(
        self, operator: int, model: str, messages: list[dict[str, Any]], sampling: dict[str, Any]
    ) -> GeneratedText:
        """Answer a conversation."""
        raise NotImplementedError

    async def score(self, operator: int, values: dict[str, Any], response: str) -> float:
        """Score a response."""
        raise NotImplementedError


class OperatorHost:
    """Holds operators by number, and calls them."""

    def __init__(self) -> None:
        self._operators: dict[int, Operator] = {}
        self._rows: dict[int, list[Row]] = {}
        self._counted: dict[int, list[tuple[str, float]]] = {}

    async def build(self, number: int, name: str, settings: dict[str, Any], place: Place, state: Any) -> Declared:
        """Make an operator in the place of an earlier one of this number, which goes on from a state."""
        await self.close(number)
        record = await asyncio.to_thread(installed().load, "operator", name)  # heartbeats go on
        counted = self._counted[number] = []
        asking = _Asking(number, stub(caller(), "context", SERVICES, OperatorServices, _ASK_SECONDS))
        context = OperatorContext(
            seed=place.seed,
            target=place.target,
            columns=place.columns,
            folder=place.folder,
            http=asking,
            generate=asking.generate,
            score=asking.score,
            count=lambda counter, value: counted.append((counter, float(value))),
        )
        operator = cast(Operator, record.build(settings, context, name))
        if state is not None:
            operator.restore(state)
        self._operators[number], self._rows[number] = operator, []
        return Declared.by(operator)

    async def start(self, number: int) -> Declared:
        """Start an operator."""
        await self._operators[number].start()
        return Declared.by(self._operators[number])

    async def add(self, number: int, rows: list[Row], further: bool) -> None:
        """Keep rows for the next request, of which others may have come before."""
        self._rows[number] = [*(self._rows[number] if further else ()), *rows]

    async def process(self, number: int, batch: int, steps: int, deadline_seconds: float) -> AsyncIterator[Part]:
        """Process the rows that were added."""
        rows, self._rows[number] = self._rows[number], []
        operator = self._operators[number]
        request = OperatorRequest(rows=tuple(rows), batch=batch, steps=steps, deadline_seconds=deadline_seconds)
        result = await operator.process(request)
        for part in _parts(result):
            yield Part(result=part)
        counted, state = list(self._counted[number]), operator.state()
        self._counted[number].clear()
        told = Declared.by(operator)
        yield Part(result=OperatorResult(), last=True, state=state, counted=counted, declared=told)

    async def decide(self, number: int, rows: list[Row]) -> dict[str, str]:
        """Return the rows that a filter does not keep."""
        return dict(self._operators[number].decide(rows))

    async def close(self, number: int) -> None:
        """Close an operator, if there is one of this number."""
        if (operator := self._operators.pop(number, None)) is not None:
            await operator.close()

    async def ping(self) -> None:
        """Answer that the process runs."""

    async def close_all(self) -> None:
        """Close all operators."""
        for number in list(self._operators):
            await self.close(number)


class _Asking:
    """The context's services, of which the pipeline has the originals."""

    def __init__(self, number: int, host: OperatorServices) -> None:
        self._number, self._host = number, host

    async def request(
        self,
        method: str,
        url: str,
        *,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        limit: int = 16 * 2**20,
    ) -> HttpAnswer:
        given = None if headers is None else dict(headers)
        return await self._host.request(self._number, method, url, body, given, limit)

    async def generate(self, model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
        return await self._host.generate(self._number, model, [dict(each) for each in messages], sampling)

    async def score(self, values: Mapping[str, Any], response: str) -> float:
        return await self._host.score(self._number, dict(values), response)


HOST, SERVICES = Contract(OperatorHost, without=("close_all",)), Contract(OperatorServices)


def in_parts(items: Iterable[T], plain: Callable[[T], Any]) -> Iterator[list[T]]:
    """Yield items in lists whose encoded values have at most ``PART_BYTES``, or in a list of one longer item."""
    encode, part, size = msgspec.msgpack.Encoder(enc_hook=str).encode, list[T](), 0
    for item in items:
        if (own := len(encode(plain(item)))) > LONGEST_BYTES:
            found, expected = f"{own} bytes", f"at most {LONGEST_BYTES} bytes"
            raise OperatorError("a row is too long for another process", expected=expected, found=found)
        if part and size + own > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(item)
        size += own
    if part:
        yield part


def _parts(result: OperatorResult) -> Iterator[OperatorResult]:
    """Yield a result in parts, each of which fits into a message."""
    for updates in in_parts(result.updates.items(), lambda item: item):
        yield OperatorResult(updates=dict(updates))
    for removed in in_parts(result.removed.items(), lambda item: item):
        yield OperatorResult(removed=dict(removed))
    for aside in in_parts(result.set_aside.items(), lambda item: item):
        yield OperatorResult(set_aside=dict(aside))
    for made in in_parts(result.made, _plain_row):
        yield OperatorResult(made=tuple(made))


def _plain_row(row: NewRow) -> Any:
    return [row.parents, row.values]


async def make_operators(description: dict[str, Any], stack: AsyncExitStack) -> Mapping[str, Service]:
    """Make the service of this process; ``stack`` closes its operators."""
    host = OperatorHost()
    stack.push_async_callback(host.close_all)
    return {"operators": Service(target=host, contract=HOST)}


def operators_of(connection: Connection, seconds: float) -> OperatorHost:
    """Return the operators of the process at the other end; each call has ``seconds``."""
    return stub(connection, "operators", HOST, OperatorHost, seconds)
