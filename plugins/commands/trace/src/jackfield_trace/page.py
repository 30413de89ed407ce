"""A rollout as one HTML page, without scripts and without anything from elsewhere.

All texts of models and tools are escaped, and a content policy forbids the browser to run or to fetch anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files

from jackfield_trace import shown
from jackfield_trace.rollouts import Event, Piece, Rollout, Token, TokenSequence, shown_event
from jackfield_trace.texts import plain

_COLOURS = ("probability", "mask", "version", "reward")
_VERSIONS = 6  #: colours of weight versions
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(rollout: Rollout) -> str:
    """Return the page of a rollout."""
    style = files("jackfield_trace").joinpath("page.css").read_text(encoding="utf-8")
    versions = sorted({version for one in rollout.sequences for version in one.versions})
    sequences = (_sequence(rollout, one, versions) for one in rollout.sequences)
    radios = (
        f'<input type="radio" name="by" id="by-{name}"{" checked" * (not place)}><label for="by-{name}">{name}</label>'
        for place, name in enumerate(_COLOURS)
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(rollout.key)}</title><style>{style}</style></head><body>",
            f"<h1>{_text(rollout.key)}</h1>",
            _pairs(shown.fields_of(rollout).items()),
            *(f'<p class="note">{_text(note)}</p>' for note in rollout.notes),
            _events(rollout),
            f'<span class="by">Colour by</span>{"".join(radios)}',
            _legends(versions),
            "<main>",
            *sequences,
            "</main></body></html>\n",
        ]
    )


def _sequence(rollout: Rollout, one: TokenSequence, versions: list[int]) -> str:
    parts = [f'<section id="sequence-{one.number}"><h2>{_text(shown.title_of(one))}</h2>']
    shown_ones = {other.number for other in rollout.sequences}
    if one.parent in shown_ones:
        parts.append(f'<p><a href="#sequence-{one.parent}">to sequence {one.parent}, where it began</a></p>')
    if children := [other.number for other in rollout.sequences if other.parent == one.number]:
        links = ", ".join(f'<a href="#sequence-{at}">{at}</a>' for at in children)
        parts.append(f"<p>parent of: {links}</p>")
    is_open = " open" * (len(one.prompt) < 2000)
    parts.append(f"<details{is_open}><summary>prompt</summary><pre>{_text(one.prompt)}</pre></details>")
    for piece, event in shown.with_events(rollout, one):
        kind = "turn" if piece.turn is not None else "inserted"
        parts.append(f'<h3 class="{kind}">{_text(shown.about_piece(piece, event))}</h3>{_tokens(piece, versions)}')
    parts += [_scores(one), "</section>"]
    return "\n".join(parts)


def _tokens(piece: Piece, versions: list[int]) -> str:
    return f"<pre>{''.join(_token(token, versions) for token in piece.tokens)}</pre>"


def _token(token: Token, versions: list[int]) -> str:
    classes, about = ["m" if token.is_model else "i"], [f"token {token.id}"]
    if (probability := token.probability) is not None:
        classes.append(f"p{shown.probability_class(probability)}")
        about.append(f"probability {probability:.3g} (log {token.log_prob:.3f})")
    if not token.is_model:
        about.append("inserted")
    if token.version is not None:
        classes.append(f"v{versions.index(token.version) % _VERSIONS}")
        about.append(f"weights {token.version}")
    if token.reward:
        classes.append("up" if token.reward > 0 else "down")
        about.append(f"reward {shown.brief(token.reward)}")
    return f'<span class="{" ".join(classes)}" title="{", ".join(about)}">{_text(token.text)}</span>'


def _scores(one: TokenSequence) -> str:
    return "".join(f'<div class="score">{_pairs(shown.score_rows(score))}</div>' for score in one.scores)


def _events(rollout: Rollout) -> str:
    events = [shown_event(each) for each in rollout.events]
    calls = "".join(f"<li>tool call {_text(text)}</li>" for text in shown.call_rows(rollout))
    listed = f"<ul>{calls}</ul>" if calls else ""
    if not events:
        return listed
    whole = max(rollout.seconds, 1e-9)
    rows = "".join(_event(each, whole) for each in events)
    head = "<tr><th>at</th><th>took</th><th>what</th><th></th><th></th></tr>"
    return f'{listed}<table class="events">{head}{rows}</table>'


def _event(event: Event, whole: float) -> str:
    left, width = event.start / whole * 100, max(0.3, (event.end - event.start) / whole * 100)
    kind = event.name if event.name in ("generate", "tool") else "other"
    bar = f'<div class="bar {kind}" style="margin-left:{min(left, 99.7):.2f}%;width:{min(width, 100):.2f}%"></div>'
    took = shown.seconds(event.end - event.start) if event.end > event.start else ""
    cells = (shown.seconds(event.start), took, event.label)
    plain_cells = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
    failed = ' class="failed"' * event.failed
    return f'<tr{failed}>{plain_cells}<td class="lane">{bar}</td><td>{_text(shown.about_event(event))}</td></tr>'


def _legends(versions: list[int]) -> str:
    def legend(name: str, entries: Iterable[tuple[str, str]]) -> str:
        signs = "".join(f'<span class="{kind}">{_text(text)}</span> ' for kind, text in entries)
        return f'<p class="legend {name}">{signs}<span class="i">inserted</span></p>'

    probabilities = [(f"m p{place}", text) for place, text in enumerate(shown.LEGEND)]
    known = [(f"m v{place % _VERSIONS}", f"weights {version}") for place, version in enumerate(versions)]
    rewards = [("m up", "reward above 0"), ("m down", "reward below 0")]
    entries = {"probability": probabilities, "mask": [("m", "of the model")], "version": known, "reward": rewards}
    return "".join(legend(name, entries[name]) for name in _COLOURS)


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in pairs) + "</dl>"


def _text(text: str) -> str:
    return escape(plain(text))
