"""Reads the answers of judges, which are asked for JSON and do not always give it.

It accepts JSON in a fence or with text around it, with trailing commas, single quotes or missing brackets, and lines
such as ``Score: 7/10``. An answer with two different verdicts is not read: one of them may be a quotation of the
response, which can contain a verdict on itself.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

import attrs

from jackfield.errors import RewardError
from jackfield_reward_requests import finite

PARSER_VERSION = 1  #: raise it with every change of what is read from an answer

_THOUGHT = re.compile(r"\A.*</(?:think|thinking|reasoning)>|\A\s*<(?:think|thinking|reasoning)>.*", re.DOTALL)
_NUMBER = (
    r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)(?:\s*(?:/|out of)\s*(\d+(?:\.\d+)?))?(?![\w/%–-]|[.,]\d|\s+to\s)"
)
_LAST_NUMBER = re.compile(r"[\d.eE+/-]+\Z")
_ALONE = re.compile(rf"\W*{_NUMBER}\W*")
_WORDS = {"score": "score|rating|grade", "winner": "winner|verdict|better(?: response)?"}
_TIES = {"tie", "draw", "equal", "both", "neither", "c"}
_LONGEST = 20_000  #: characters that are read, from the end
_MOST_OBJECTS = 32  #: candidates, from the end


@attrs.frozen(kw_only=True)
class Form:
    """What an answer must have: a score, a score per criterion, or the winner of a pair."""

    low: float = 0.0
    high: float = 10.0
    criteria: tuple[str, ...] = ()
    winner: bool = False

    @property
    def example(self) -> str:
        """The JSON that is asked for, with words in the place of values."""
        if self.winner:
            return '{"explanation": "<one or two sentences>", "winner": "<A, B or tie>"}'
        number = f"<number from {self.low:g} to {self.high:g}>"
        if not self.criteria:
            return f'{{"explanation": "<one or two sentences>", "score": {number}}}'
        scores = ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {number}" for name in self.criteria)
        return f'{{"explanation": "<one or two sentences>", "scores": {{{scores}}}}}'

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the answer, in the subset that strict structured outputs have."""
        number = {"type": "number", "description": f"from {self.low:g} to {self.high:g}"}
        value: dict[str, Any] = {"score": number}
        if self.winner:
            value = {"winner": {"type": "string", "enum": ["A", "B", "tie"]}}
        elif self.criteria:
            value = {"scores": _object(dict.fromkeys(self.criteria, number))}
        return _object({"explanation": {"type": "string"}, **value})

    @property
    def keys(self) -> frozenset[str]:
        """The keys of an object with a verdict, in lower case."""
        if self.winner:
            return frozenset({"winner"})
        return frozenset({"scores", *map(str.lower, self.criteria)} if self.criteria else {"score"})


@attrs.frozen(kw_only=True)
class Judgement:
    """What a judge says."""

    scores: Mapping[str, float]  #: from 0 to 1: of each criterion, or one named ``score``
    winner: Literal["A", "B", "tie"] | None = None
    explanation: str | None = None


def parse(text: str, form: Form, where: str, is_cut: bool = False) -> Judgement:
    """Read an answer; ``reward.output`` if it does not have the form, or a score is out of range.

    ``is_cut`` says that the answer ended at the limit of tokens, perhaps within a number.
    """
    text = _THOUGHT.sub("", text, count=1).strip()
    text = (_LAST_NUMBER.sub("", text) if is_cut else text)[-_LONGEST:]
    for written in _outermost(text):
        if not any(key in written.lower() for key in form.keys):
            continue
        found = _lenient(written)
        if isinstance(found, Mapping) and not form.keys.isdisjoint(_lower(found)):
            judgement = _judgement(found, form, where)
            before, _, after = text.rpartition(written)
            for other in (before, after):
                _refuse_others(other, judgement, form, where)
            return judgement
        break
    lines = _lines(text, form, where)
    if lines is None:
        raise _unreadable("a judge's answer has no verdict", form, where, repr(text[-300:]) if text else "no text")
    return _judgement({**lines, "explanation": text}, form, where)


def _refuse_others(text: str, judgement: Judgement, form: Form, where: str) -> None:
    """Refuse an answer that has another verdict in the text around its JSON."""
    lines = _lines(text, form, where) or {}
    if "winner" in lines and _winner(lines["winner"]) != judgement.winner:
        raise _two_verdicts(form, where, text)
    for name, value in lines.get("scores", lines).items():
        number = (value - form.low) / (form.high - form.low) if isinstance(value, float) else None
        if name != "winner" and number != judgement.scores.get(name):
            raise _two_verdicts(form, where, text)


def _judgement(found: Mapping[str, Any], form: Form, where: str) -> Judgement:
    """Return what an object says, whose keys may differ in case."""
    values = _lower(found)
    explanation = next(
        (values[key] for key in ("explanation", "reason", "reasoning", "rationale") if key in values), None
    )
    explanation = explanation if explanation is None or isinstance(explanation, str) else json.dumps(explanation)
    if form.winner:
        winner = _winner(values.get("winner"))
        if winner is None:
            raise _unreadable("a judge names no winner", form, where, repr(values.get("winner", sorted(values)))[:300])
        return Judgement(scores={}, winner=winner, explanation=explanation)
    if form.criteria:
        inner = values.get("scores", values.get("criteria", values))
        inner = _lower(inner) if isinstance(inner, Mapping) else {}
        scores = {name: _score(inner.get(name.lower()), name, form, where) for name in form.criteria}
    else:
        scores = {"score": _score(values.get("score"), "score", form, where)}
    return Judgement(scores=scores, explanation=explanation)


def _score(value: Any, name: str, form: Form, where: str) -> float:
    """Return a score on the scale from 0 to 1."""
    if isinstance(value, Mapping):  # {"accuracy": {"score": 7, "explanation": …}}
        value = value.get("score")
    if isinstance(value, str) and (written := _ALONE.fullmatch(value)):
        value = _written(written[1], written[2], form)
    if value is None or isinstance(value, str | bool):
        raise _unreadable(f"a judge gives no {name}", form, where, "nothing" if value is None else repr(value)[:300])
    number = finite(value, f"a judge's {name}", where)
    if not form.low <= number <= form.high:
        raise _unreadable(f"a judge's {name} is out of range", form, where, f"{number:g}")
    return (number - form.low) / (form.high - form.low)


def _written(number: str, of: str | None, form: Form) -> float | str:
    """Return a number such as ``7/10``, if what it is out of is the end of the scale."""
    return float(number) if of is None or float(of) == form.high else f"{number}/{of}"


def _winner(value: Any) -> Literal["A", "B", "tie"] | None:
    word = re.sub(r"^(?:response|answer|assistant)\s+", "", str(value).strip(" \t\n.*\"'[]()`").lower())
    if word in ("a", "b"):
        return "A" if word == "a" else "B"
    return "tie" if word in _TIES else None


def _lines(text: str, form: Form, where: str) -> dict[str, Any] | None:
    """Return verdicts that are written as ``Name: value``, or an answer that is nothing but a value."""
    if form.winner:
        named = re.findall(rf"(?:{_WORDS['winner']})\W{{0,8}}(?:is\W{{0,4}})?(?:response\s+)?(a|b|tie)\b", text, re.I)
        winner = _only({each.lower() for each in named}, form, where, text) or (text if _winner(text) else None)
        return {"winner": winner} if winner else None
    values = {}
    for name in form.criteria or ("score",):
        words = re.escape(name) if form.criteria else _WORDS["score"]
        line = rf"(?:\b|_)(?:{words})\b[^\w\n+.-]{{0,8}}(?:is\s+|of\s+)?[^\w\n+.-]{{0,4}}{_NUMBER}"
        written = {_written(number, of or None, form) for number, of in re.findall(line, text, re.I)}
        if written:
            values[name] = _only(written, form, where, text)
    if not form.criteria and not values and (alone := _ALONE.fullmatch(text)):
        values["score"] = _written(alone[1], alone[2], form)
    if not values:
        return None
    return {"scores": values} if form.criteria else values


def _only(values: set[Any], form: Form, where: str, text: str) -> Any:
    """Return the only value, or None; several are refused."""
    if len(values) > 1:
        raise _two_verdicts(form, where, text)
    return next(iter(values), None)


def _outermost(text: str) -> list[str]:
    """Return the outermost parts in braces, the last first; one that is not closed reaches to the end of its fence."""
    found, start, depth, quote, escaped, before = list[str](), 0, 0, "", False, ""
    for place, sign in enumerate(text):
        if quote:
            if escaped or sign == "\\":
                escaped = not escaped
            elif sign == quote and (quote == '"' or not text[place + 1 : place + 2].isalnum()):
                quote = ""
        elif depth and (sign == '"' or (sign == "'" and before in "{[:,")):
            quote = sign
        elif sign == "{":
            start, depth = (place, 1) if depth == 0 else (start, depth + 1)
        elif sign == "}" and depth:
            depth -= 1
            if depth == 0:
                found.append(text[start : place + 1])
        before = before if sign.isspace() else sign
    if depth:
        found.append(text[start:].partition("```")[0])
    return found[::-1][:_MOST_OBJECTS]


def _lenient(text: str) -> Any:
    """Read JSON; then JSON with its usual mistakes mended; None if neither can be read."""
    mended = re.sub(r",(\s*[}\]])", r"\1", text)
    mends: tuple[Callable[[str], str], ...] = (lambda _: text, str, _closed)
    for mend in mends:
        attempt = mend(mended)
        with suppress(ValueError, RecursionError):
            return json.loads(attempt, strict=False)
        literal = re.sub(r"\b(?:true|false|null)\b", lambda word: _PYTHON[word[0]], attempt)
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not have
            return ast.literal_eval(literal)
    return None


_PYTHON = {"true": "True", "false": "False", "null": "None"}


def _lower(found: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key).strip().lower(): value for key, value in found.items()}


def _closed(text: str) -> str:
    """Close the brackets and the string that are open at the end of a text."""
    stack, quote, escaped = list[str](), "", False
    for sign in text:
        if quote:
            if escaped or sign == "\\":
                escaped = not escaped
            elif sign == quote:
                quote = ""
        elif sign == '"':
            quote = sign
        elif sign in "{[":
            stack.append("}" if sign == "{" else "]")
        elif sign in "}]" and stack and stack[-1] == sign:
            stack.pop()
    text = text + quote if quote else text.rstrip().rstrip(",")
    return text + "".join(reversed(stack))


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _two_verdicts(form: Form, where: str, text: str) -> RewardError:
    return _unreadable("a judge gives two verdicts", form, where, repr(text[-300:]))


def _unreadable(message: str, form: Form, where: str, found: str) -> RewardError:
    return RewardError(message, code="reward.output", where=where, expected=form.example, found=found)
