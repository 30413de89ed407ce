"""A rollout, and the list of rollouts, on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from jackfield_trace import shown
from jackfield_trace.rollouts import Piece, Rollout, Token, TokenSequence, number, shown_event
from jackfield_trace.sources import Listed
from jackfield_trace.texts import plain

_STYLES = ("", "green", "yellow", "dark_orange", "red", "bold white on red")  #: by class of probability
_INSERTED = "black on grey70"
_MOST = 2000  #: characters of a prompt that are shown


def print_rollout(rollout: Rollout, console: Console, *, whole: bool = False) -> None:
    """Print a rollout. Nothing in it is markup, or a command to the terminal."""
    console.print(_text(rollout.key, "bold"))
    about = Table.grid(padding=(0, 2))
    for name, value in shown.fields_of(rollout).items():
        about.add_row(_text(name, "dim"), _text(value))
    console.print(about)
    for note in rollout.notes:
        console.print(_text(note, "yellow"))
    for one in rollout.sequences:
        _print_sequence(rollout, one, console, whole)
    _print_events(rollout, console)
    _print_legend(rollout, console)


def print_list(found: Sequence[Listed], console: Console) -> None:
    """Print the list of rollouts."""
    table = Table("rollout", "step", "sequences", "reward", "turns", "tokens", box=SIMPLE_HEAD)
    for each in found:
        values = summary(each)
        table.add_row(*(_text("-" if values[name] is None else str(values[name])) for name in values))
    console.print(table)


def summary(listed: Listed) -> dict[str, object]:
    """Return what a list has of a rollout."""
    tags = [row.get("tags") or {} for row in listed.rows]
    rewards = [shown.brief(number(row["reward"])) for row in listed.rows if row.get("reward") is not None]
    sizes = [len(row.get("response_ids", ())) for row in listed.rows]
    return {
        "rollout": listed.key,
        "step": listed.step,
        "sequences": len(listed.rows),
        "reward": ", ".join(rewards) or None,
        "turns": tags[0].get("turns"),
        "tokens": sum(size or own.get("response_tokens", 0) for size, own in zip(sizes, tags, strict=True)),
    }


def _print_sequence(rollout: Rollout, one: TokenSequence, console: Console, whole: bool) -> None:
    console.print(Rule(_text(shown.title_of(one), "bold"), align="left"))
    prompt = one.prompt if whole or len(one.prompt) <= _MOST else f"… (--whole shows all)\n{one.prompt[-_MOST:]}"
    console.print(_text("prompt", "dim"))
    console.print(_text(prompt.rstrip("\n"), "dim"))
    for piece, event in shown.with_events(rollout, one):
        console.print(_text(shown.about_piece(piece, event), "bold cyan" if piece.turn is not None else "dim"))
        console.print(_tokens(piece))
    for score in one.scores:
        table = Table.grid(padding=(0, 2))
        for name, value in shown.score_rows(score):
            table.add_row(_text(name, "dim"), _text(value))
        console.print(table)


def _print_events(rollout: Rollout, console: Console) -> None:
    events = [shown_event(each) for each in rollout.events]
    if events:
        table = Table("at", "took", "what", "", box=SIMPLE_HEAD)
        for each in events:
            style = "red" if each.failed else ""
            took = shown.seconds(each.end - each.start) if each.end > each.start else ""
            cells = (shown.seconds(each.start), took, each.label, shown.about_event(each))
            table.add_row(*(_text(cell, style) for cell in cells))
        console.print(Rule(_text("events", "bold"), align="left"))
        console.print(table)
    for text in shown.call_rows(rollout):
        console.print(_text(f"tool call {text}"))


def _print_legend(rollout: Rollout, console: Console) -> None:
    if any(token.probability is not None for one in rollout.sequences for token in one.tokens):
        legend = _text("probability of the model's tokens: ", "dim")
        for name, style in zip(shown.LEGEND, _STYLES, strict=True):
            legend.append(name, style).append("  ")
        console.print(legend.append("inserted", _INSERTED))


def _tokens(piece: Piece) -> Text:
    text = Text()
    for token in piece.tokens:
        text.append(plain(token.text), _style(token))
    return text


def _style(token: Token) -> str:
    if not token.is_model:
        return _INSERTED
    style = "" if token.probability is None else _STYLES[shown.probability_class(token.probability)]
    return f"{style} underline".strip() if token.reward else style


def _text(text: str, style: str = "") -> Text:
    """Return text without markup and without signs that a terminal obeys."""
    return Text(plain(text), style)
