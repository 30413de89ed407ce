"""One rollout as it is shown: its sequences with their tokens, what the agent loop noted, and its scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Token:
    """One token of a response."""

    id: int
    text: str  #: empty within a letter of several tokens, whose last one has it
    is_model: bool  #: whether the model generated it
    log_prob: float | None = None
    version: int | None = None  #: of the weights that generated it
    reward: float | None = None

    @property
    def probability(self) -> float | None:
        """The probability with which the model generated the token; None if it did not, or if it is not known."""
        return math.exp(self.log_prob) if self.is_model and self.log_prob is not None else None


@attrs.frozen(kw_only=True)
class Piece:
    """An uninterrupted run of tokens of the model (a turn), or of others."""

    tokens: tuple[Token, ...]
    turn: int | None  #: number of the model's turn in its sequence, from 1; None: inserted

    @property
    def text(self) -> str:
        """The text of its tokens."""
        return "".join(token.text for token in self.tokens)

    @property
    def mean_probability(self) -> float | None:
        """The geometric mean of the tokens' probabilities."""
        known = [token.log_prob for token in self.tokens if token.is_model and token.log_prob is not None]
        return math.exp(sum(known) / len(known)) if known else None

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions of its tokens, in ascending order."""
        return tuple(sorted({token.version for token in self.tokens if token.version is not None}))

    @property
    def reward(self) -> float | None:
        """The sum of its tokens' rewards; None if they have none of their own."""
        rewards = [token.reward for token in self.tokens if token.reward is not None]
        return sum(rewards) if rewards else None


@attrs.frozen(kw_only=True)
class Score:
    """What the folder ``scores`` of a run has of one sample."""

    score: float | None
    status: str
    name: str = ""  #: of the reward plugin
    explanation: str = ""
    error: str = ""
    dimensions: Mapping[str, float] = attrs.field(factory=dict)
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    seconds: float | None = None
    time: float | None = None  #: when it was computed, in seconds since 1970
    task: Mapping[str, Any] = attrs.field(factory=dict)  #: data_source, ground_truth


@attrs.frozen(kw_only=True)
class TokenSequence:
    """One sequence of a rollout: a sample."""

    key: str
    number: int  #: in the rollout, from 0
    prompt: str
    tokens: tuple[Token, ...]
    reward: float | None = None
    parent: int | None = None  #: number of the sequence of this rollout from which it began
    relation: str = ""
    name: str = ""  #: of the agent that wrote it
    finish_reason: str = ""
    tags: Mapping[str, Any] = attrs.field(factory=dict)
    scores: tuple[Score, ...] = ()

    @property
    def pieces(self) -> list[Piece]:
        """Its turns, and what was inserted between them."""
        found, turn = list[Piece](), 0
        for is_model, tokens in groupby(self.tokens, key=lambda token: token.is_model):
            turn += is_model
            found.append(Piece(tokens=tuple(tokens), turn=turn if is_model else None))
        return found

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions that are known of it."""
        if found := {token.version for token in self.tokens if token.version is not None}:
            return tuple(sorted(found))
        ends = [self.tags.get(f"weight_version_{end}") for end in ("min", "max")]
        return tuple(sorted({end for end in ends if isinstance(end, int)}))


@attrs.frozen(kw_only=True)
class Rollout:
    """One rollout of a task."""

    key: str  #: of its samples, without their number
    step: int | None
    source: str  #: the file that has it
    sequences: tuple[TokenSequence, ...]
    told: Mapping[str, Any] = attrs.field(factory=dict)  #: what the agent loop said of it
    time: float | None = None  #: a time in seconds since 1970 by which it had ended; None: not known
    model: str = ""
    notes: tuple[str, ...] = ()  #: what is missing

    @property
    def task(self) -> str:
        """The task's id; empty if it is not known."""
        return str(self.sequences[0].tags.get("task", ""))

    @property
    def events(self) -> list[Mapping[str, Any]]:
        """The events in the order of time; each has ``name`` and ``at``, in seconds since the rollout began."""
        found = [each for each in self.told.get("events", ()) if isinstance(each, Mapping) and "name" in each]
        return sorted(found, key=lambda each: number(each.get("at")) or 0.0)

    @property
    def turns(self) -> int:
        """The number of turns that the agent counted, or else that of the model's pieces."""
        own = sum(piece.turn is not None for one in self.sequences for piece in one.pieces)
        return int(self.told.get("turns") or self.sequences[0].tags.get("turns") or own)

    @property
    def end_reason(self) -> str:
        """Why it ended: what the agent said, or else the last sequence's finish reason."""
        last = self.sequences[-1]
        return str(self.told.get("end_reason") or last.tags.get("end_reason") or last.finish_reason)

    @property
    def seconds(self) -> float:
        """The time of its last event."""
        return max((number(each.get("at")) or 0.0 for each in self.events), default=0.0)

    @property
    def rewards(self) -> list[float]:
        """The rewards of its sequences, of those that have one."""
        return [one.reward for one in self.sequences if one.reward is not None]


@attrs.frozen(kw_only=True)
class Event:
    """An event of a rollout in the form in which it is shown."""

    name: str
    start: float  #: in seconds since the rollout began
    end: float
    label: str
    fields: Mapping[str, Any]
    failed: bool = False


def shown_event(event: Mapping[str, Any]) -> Event:
    """Return an event with its beginning and end: ``at`` is when it ended, ``seconds`` how long it took."""
    end = number(event.get("at")) or 0.0
    fields = {key: value for key, value in event.items() if key not in ("name", "at", "seconds")}
    label, failed = str(event["name"]), bool(fields.get("is_error") or fields.get("error"))
    if label == "tool":
        label = tool_name(fields) or label
    return Event(
        name=str(event["name"]),
        start=max(0.0, end - (number(event.get("seconds")) or 0.0)),
        end=end,
        label=label,
        fields=fields,
        failed=failed,
    )


def tool_name(fields: Mapping[str, Any]) -> str:
    """Return the tool's name of the event ``tool``."""
    return str(fields.get("tool") or fields.get("tool_name") or "")


def number(value: Any) -> float | None:
    """Return a finite number, or None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def generations(rollout: Rollout) -> list[Mapping[str, Any]] | None:
    """Return the event ``generate`` of each turn of the only sequence, if there is one per turn; else None."""
    found = [each for each in rollout.events if each["name"] == "generate"]
    turns: Sequence[Piece] = [piece for piece in rollout.sequences[0].pieces if piece.turn is not None]
    return found if len(rollout.sequences) == 1 and len(found) == len(turns) else None
