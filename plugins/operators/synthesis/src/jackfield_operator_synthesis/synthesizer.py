"""What operators that make rows share: each row alone or each group, a model that is asked, and the gate."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from jackfield.abc.operator import (
    NewRow,
    Operator,
    OperatorContext,
    OperatorRequest,
    OperatorResult,
    OperatorType,
    Row,
    Use,
)
from jackfield.sdk import option
from jackfield_model_requests import AskingConfig, Model
from jackfield_operator_synthesis.gates import Gate, GateConfig

Messages = Sequence[Mapping[str, Any]]


@attrs.frozen(kw_only=True)
class GatedConfig:
    """Settings of all operators whose new responses pass a gate."""

    gate: GateConfig = option(factory=GateConfig, help="what a new response has to pass")


@attrs.frozen(kw_only=True)
class AskedConfig(GatedConfig):
    """Settings of operators that ask a model."""

    asked: AskingConfig = option(factory=AskingConfig, help="the model that is asked; by default the run's policy")
    temperature: float = option(1.0, "temperature of its answers")
    max_tokens: int = option(512, "most tokens of an answer")


class Synthesizer(Operator):
    """The base of operators that make rows. A row from which nothing can be made because it is bad is set aside."""

    type: ClassVar[OperatorType] = "synthesizer"

    def __init__(self, config: Any, context: OperatorContext) -> None:
        super().__init__(config, context)
        self.gate = Gate(config.gate, context) if isinstance(config, GatedConfig) else None
        self.model = Model(config.asked, context) if isinstance(config, AskedConfig) else None

    @property
    def uses(self) -> tuple[Use, ...]:
        """Return what the gate and the model use."""
        asked = () if self.model is None else self.model.uses
        return (*asked, *(() if self.gate is None else self.gate.uses))

    @property
    def version(self) -> str:
        """Return the name of the model and the digest of the verifier."""
        names = ["" if self.model is None else self.model.name, "" if self.gate is None else self.gate.version]
        return " ".join(filter(None, names))

    async def start(self) -> None:
        """Start the gate, and reach the model."""
        if self.gate is not None:
            await self.gate.start()
        if self.model is not None:
            await self.model.start()

    async def close(self) -> None:
        """End the gate and the model."""
        if self.model is not None:
            await self.model.close()
        if self.gate is not None:
            await self.gate.close()

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Make rows of each row."""
        return await collected({row.key: self.make(row) for row in request.rows})

    async def make(self, row: Row) -> Sequence[NewRow]:
        """Return the new rows of a row; what it raises sets the row aside."""
        raise NotImplementedError

    async def answer(self, messages: Messages, *about: object) -> str:
        """Return the model's answer, with a seed that follows from what it is about."""
        assert self.model is not None
        sampling: Any = {"temperature": self.config.temperature, "max_tokens": self.config.max_tokens}
        async with self.model.turn():
            answered = await self.model.ask(messages, seed=self.model.seed(*about), **sampling)
        return answered.text


async def collected(work: Mapping[str, Coroutine[Any, Any, Sequence[NewRow]]]) -> OperatorResult:
    """Return what work on rows gives, by key; rows with which it fails are set aside."""
    tasks = {key: asyncio.ensure_future(each) for key, each in work.items()}
    try:
        ended = await asyncio.gather(*tasks.values(), return_exceptions=True)
    finally:
        for task in tasks.values():
            task.cancel()
    made, aside = list[NewRow](), dict[str, str]()
    for key, found in zip(tasks, ended, strict=True):
        if isinstance(found, Exception):
            aside[key] = described(found)
        elif isinstance(found, BaseException):
            raise found
        else:
            made += found
    return OperatorResult(made=tuple(made), set_aside=aside)


def described(error: Exception) -> str:
    """Return why a row is set aside."""
    return f"there is no column {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"


def text_of(values: Mapping[str, Any], column: str) -> str:
    """Return a text of a row; raise ``KeyError`` or ``TypeError`` if it has none."""
    if not isinstance(values[column], str):
        raise TypeError(f"column {column!r} has {type(values[column]).__name__}, not a text")
    return str(values[column])


def number_of(values: Mapping[str, Any], column: str) -> float:
    """Return a number of a row; raise ``KeyError`` or ``TypeError`` if it has none."""
    value = values[column]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"column {column!r} has {value!r:.100}, not a number")
    return float(value)


def conversation(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the prompt as messages: those of the row, or its text as a user's."""
    messages = values.get("messages")
    if isinstance(messages, list | tuple) and messages:
        return [dict(message) for message in messages]
    return [{"role": "user", "content": text_of(values, "prompt")}]


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Put values into a template at ``{name}``; other braces stay."""
    for name, value in values.items():
        template = template.replace("{" + name + "}", str(value))
    return template
