"""What operators that make rows share: each row alone or each group, a model that is asked, and the gate."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs
from attrs.validators import ge, in_, le

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
from jackfield_model_requests import AskingConfig, Model, until_deadline
from jackfield_operator_synthesis.gates import Gate, GateConfig

Messages = Sequence[Mapping[str, Any]]


@attrs.frozen(kw_only=True)
class GatedConfig:
    """Settings of all operators whose new responses pass a gate."""

    gate: GateConfig = option(factory=GateConfig, help="what a new response has to pass")
    on_failure: Literal["keep", "set_aside"] = option(
        "keep",
        "a row with which a model, a reward or a verifier fails stays, without new rows, or is set aside; the counter "
        "is `failed`",
        in_(("keep", "set_aside")),
    )


@attrs.frozen(kw_only=True)
class AskedConfig(GatedConfig):
    """Settings of operators that ask a model."""

    asked: AskingConfig = option(factory=AskingConfig, help="the model that is asked; by default the run's policy")
    temperature: float = option(1.0, "temperature of its answers", [ge(0.0), le(100.0)])
    max_tokens: int = option(512, "most tokens of an answer", ge(1))


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
        return await self.collected({row.key: self.make(row) for row in request.rows}, request)

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

    async def collected(
        self, work: Mapping[str, Coroutine[Any, Any, Sequence[NewRow]]], request: OperatorRequest
    ) -> OperatorResult:
        """Return what work on rows has given at the deadline, by key.

        Bad rows are set aside; those with which something else fails are counted, and treated as settings say.
        """
        who, made, aside, failed = f"new rows of {type(self).__name__}", list[NewRow](), dict[str, str](), []
        found = await until_deadline(work, self.context.clock, request.deadline_seconds, who)
        for key, each in found.items():
            if not isinstance(each, Exception):
                made += each
                continue
            is_bad = isinstance(each, BadRow)
            if not is_bad:
                failed.append(described(each))
            if is_bad or self.config.on_failure == "set_aside":
                aside[key] = described(each)
        if failed:
            self.context.count("failed", len(failed))
            what = "%s: of %d rows nothing is made: %s"
            logging.getLogger("jackfield").warning(what, type(self).__name__, len(failed), failed[0])
        return OperatorResult(made=tuple(made), set_aside=aside)


class BadRow(ValueError):
    """A row does not have what it needs."""


def described(error: Exception) -> str:
    """Return why nothing is made of a row."""
    return str(error) if isinstance(error, BadRow) else f"{type(error).__name__}: {error}"


def value_of(values: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column; raise ``BadRow`` if there is none."""
    if column not in values:
        raise BadRow(f"there is no column {column!r}")
    return values[column]


def text_of(values: Mapping[str, Any], column: str) -> str:
    """Return a text of a row; raise ``BadRow`` if it has none."""
    value = value_of(values, column)
    if not isinstance(value, str):
        raise BadRow(f"column {column!r} has {type(value).__name__}, not a text")
    return value


def number_of(values: Mapping[str, Any], column: str) -> float:
    """Return a number of a row; raise ``BadRow`` if it has none."""
    value = value_of(values, column)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow(f"column {column!r} has {value!r:.100}, not a number")
    return float(value)


#: columns of a response as it was generated, which a new one does not have
_GENERATED = ("response_tokens", "log_prob_mean", "log_prob_min")
RESPONSE_COLUMNS = ("response", "reward", "turns", *_GENERATED)  #: what rows with a new response write


def new_response(values: Mapping[str, Any], response: str, reward: float) -> dict[str, Any]:
    """Return the columns of a new response to the task of a row: what was measured of the old one is null."""
    unknown = {name: None for name in _GENERATED if name in values}
    return {"response": response, "reward": reward, **({"turns": 1} if "turns" in values else {}), **unknown}


def conversation(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the prompt as messages: those of the row, or its text as a user's."""
    messages = values.get("messages")
    if isinstance(messages, list | tuple) and messages:
        return checked_messages(messages, "messages")
    return [{"role": "user", "content": text_of(values, "prompt")}]


def checked_messages(messages: Any, column: str) -> list[dict[str, Any]]:
    """Return a conversation; raise ``BadRow`` if a column has none."""
    if isinstance(messages, list | tuple) and all(isinstance(each, Mapping) and "role" in each for each in messages):
        return [dict(each) for each in messages]
    raise BadRow(f"column {column!r} has no conversation")


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Put values into a template at ``{name}``; other braces stay."""
    for name, value in values.items():
        template = template.replace("{" + name + "}", str(value))
    return template
