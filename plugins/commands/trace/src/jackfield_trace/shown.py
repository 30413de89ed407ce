"""What the terminal and the page have in common: words, classes of probability, tables of plain texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jackfield_trace.rollouts import Event, Piece, Rollout, Score, TokenSequence, generations, number

#: The lower ends of the classes of probability, from the most probable to the least.
PROBABILITIES = (0.9, 0.5, 0.2, 0.05, 0.01, 0.0)
LEGEND = ("≥ 90 %", "50–90 %", "20–50 %", "5–20 %", "1–5 %", "< 1 %")


def probability_class(probability: float) -> int:
    """Return the class of a probability, from 0 for the most probable ones."""
    return next((place for place, low in enumerate(PROBABILITIES) if probability >= low), len(PROBABILITIES) - 1)


def brief(value: float | None, digits: int = 3) -> str:
    """Return a number with a few digits; ``-`` for None."""
    return "-" if value is None else f"{value:.{digits}g}"


def seconds(value: float) -> str:
    """Return a duration in words."""
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def fields_of(rollout: Rollout) -> dict[str, str]:
    """Return what is said above a rollout, by its name."""
    counted = [(len(one.tokens), sum(token.is_model for token in one.tokens)) for one in rollout.sequences]
    tokens, own = (sum(each) for each in zip(*counted, strict=True))
    versions = sorted({version for one in rollout.sequences for version in one.versions})
    found = {
        "task": rollout.task,
        "step": "" if rollout.step is None else str(rollout.step),
        "reward": ", ".join(map(brief, rollout.rewards)),
        "turns": str(rollout.turns),
        "tokens": f"{tokens} ({own} of the model)",
        "sequences": str(len(rollout.sequences)),
        "weight versions": ", ".join(map(str, versions)),
        "end reason": rollout.end_reason,
        "seconds": seconds(rollout.seconds) if rollout.events else "",
        "metrics": numbers(rollout.told.get("metrics") or {}),
        "from": rollout.source,
    }
    return {name: text for name, text in found.items() if text}


def title_of(one: TokenSequence) -> str:
    """Return the title of a sequence: its number, name and parent."""
    words = [f"sequence {one.number}", *([one.name] if one.name else [])]
    if one.parent is not None:
        words.append(f"{one.relation.replace('_', ' ') or 'continuation'} of sequence {one.parent}")
    if one.reward is not None:
        words.append(f"reward {brief(one.reward)}")
    if one.finish_reason:
        words.append(f"ended with {one.finish_reason}")
    return " · ".join(words)


def about_piece(piece: Piece, event: Mapping[str, Any] | None) -> str:
    """Return what is said above a turn, or above inserted tokens."""
    words = [f"turn {piece.turn}" if piece.turn is not None else "inserted", f"{len(piece.tokens)} tokens"]
    if (mean := piece.mean_probability) is not None:
        words.append(f"mean probability {mean:.2f}")
    if piece.versions:
        words.append(f"weights {', '.join(map(str, piece.versions))}")
    if piece.reward:
        words.append(f"reward {brief(piece.reward)}")
    if event is not None:
        words += [seconds(took)] if (took := number(event.get("seconds"))) is not None else []
        words += [str(event["finish_reason"])] if event.get("finish_reason") else []
    return " · ".join(words)


def with_events(rollout: Rollout, one: TokenSequence) -> Iterator[tuple[Piece, Mapping[str, Any] | None]]:
    """Yield the pieces of a sequence, turns with the event of their generation, if it is known."""
    events = iter(generations(rollout) or ())
    for piece in one.pieces:
        yield piece, next(events, None) if piece.turn is not None else None


def about_event(event: Event) -> str:
    """Return the fields of an event as text."""
    shown = {name: value for name, value in event.fields.items() if value is not None and value != event.label}
    return ", ".join(f"{name}: {_value(value)}" for name, value in shown.items())


def score_rows(score: Score) -> list[tuple[str, str]]:
    """Return what the reward said of a sample, by its name."""
    rows = [
        ("score", brief(score.score, 6) if score.status == "ok" else f"none ({score.status})"),
        ("reward", score.name),
        ("ground truth", str(score.task.get("ground_truth") or "")),
        ("dimensions", numbers(score.dimensions)),
        ("metrics", numbers(score.metrics)),
        ("explanation", score.explanation),
        ("error", score.error),
        ("seconds", "" if score.seconds is None else seconds(score.seconds)),
    ]
    return [(name, text) for name, text in rows if text]


def call_rows(rollout: Rollout) -> list[str]:
    """Return the calls that the agent reports, one text each, if no event has them."""
    if any(each["name"] == "tool" for each in rollout.events):
        return []
    return [_value(each) for each in rollout.told.get("tool_calls") or ()]


def numbers(values: Mapping[str, Any]) -> str:
    """Return numbers by name as text."""
    return ", ".join(f"{name}: {brief(number(value))}" for name, value in values.items())


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
