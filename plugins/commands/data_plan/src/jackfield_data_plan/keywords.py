"""A draft of a pipeline by keywords, without a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from jackfield.errors import DataError
from jackfield.plugins.registry import Registry
from jackfield_data_plan.catalogue import Catalogue
from jackfield_data_plan.checking import problems_of
from jackfield_data_plan.sources import Source
from jackfield_data_plan.vocabulary import (
    ALIKE,
    CATEGORY,
    COLUMNS,
    DIFFICULTY,
    EASY_FIRST,
    EXTREME,
    FILL,
    FIRST,
    HARD_FIRST,
    LANGUAGE,
    LANGUAGES,
    LENGTHS,
    ONLY_ROWS,
    PACKAGES,
    QUOTED,
    RANDOM,
    RANKS,
    REMOVING,
    REQUIRED,
    SAFETY,
    STOP,
    VAGUE,
)

Task = dict[str, Any]


@attrs.frozen(kw_only=True)
class Draft:
    """A pipeline by keywords."""

    tasks: Sequence[Mapping[str, Any]]
    used: Mapping[str, str]  #: words that were understood, with what came of them
    not_understood: Sequence[str]  #: words that no rule knows
    notes: Sequence[str]  #: what words ask for and was not done


@attrs.define(kw_only=True)
class _Drafter:
    known: Catalogue
    source: Source
    registry: Registry
    left: str  #: the words, with blanks in the place of those that a rule took
    tasks: dict[str, Task] = attrs.field(factory=dict)
    used: dict[str, str] = attrs.field(factory=dict)
    notes: list[str] = attrs.field(factory=list)

    def found(self, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
        """Yield what a pattern finds, and blank it."""
        while match := pattern.search(self.left):
            yield match
            start, end = match.span()
            self.left = f"{self.left[:start]}{' ' * (end - start)}{self.left[end:]}"

    @property
    def names(self) -> set[str]:
        """The operators so far."""
        return {str(task["name"]) for task in self.tasks.values()}

    def removes(self, match: re.Match[str]) -> bool:
        """Return whether the clause before a match says that such rows are removed.

        What is required, such as at most, belongs to the verb before it only without an "and" between them.
        """
        ends = rf"{STOP}|\bthen\b|\bbut\b|\bkeep\b|\bonly\b" + (r"|\band\b" if REQUIRED.match(match[0]) else "")
        return bool(REMOVING.search(re.split(ends, self.left[: match.start()])[-1]))

    def column(self, match: re.Match[str]) -> str | None:
        """Return the usual name of the column of which the clause before a match speaks; None: it is not there."""
        after = re.match(r"\s+(?:(?:the|their|of|in|by)\s+)*\w+", self.left[match.end() :])
        clause = re.split(rf"{STOP}|\bthen\b|\band\b", self.left[: match.end()])[-1] + (after[0] if after else "")
        named = next((usual for word, usual in COLUMNS.items() if re.search(rf"\b{word}s?\b", clause)), "prompt")
        if self.source.column(named) is None:
            self.notes.append(f"'{match[0].strip()}' is about the column {named}, which the data do not have")
            return None
        return named

    def add(self, words: str, name: str, /, key: str = "", **settings: Any) -> bool:
        """Add an operator, or settings to the one with the same key, or say why not."""
        key = key or name
        words = " ".join(words.split())
        if name not in self.known.operators:
            package = PACKAGES.get(name, f"jackfield-operator-{name.replace('_', '-')}")
            self.notes.append(f"'{words}' needs the operator {name}, which is not installed: pip install {package}")
            return False
        before = self.tasks.get(key, {})
        for setting in settings.keys() & before.keys():
            if before[setting] != settings[setting]:
                changes = f"would change {setting} of the operator {name}, which is {before[setting]}"
                self.notes.append(f"'{words}' {changes}; only one of both is done")
                return False
        task = {"name": name, **before, **settings}
        if found := problems_of([task], self.registry, trusted=True):
            self.notes.append(f"'{words}' gives settings that the operator {name} does not take: {found[0]}")
            return False
        self.tasks[key] = task
        self.used[words] = name
        return True


def drafted(words: str, known: Catalogue, source: Source, registry: Registry) -> Draft:
    """Return a pipeline by keywords; raise ``data.plan`` if no word was understood."""
    drafter = _Drafter(known=known, source=source, registry=registry, left=words.lower())
    for rule in _RULES:
        rule(drafter)
    rest = [word for word in re.findall(r"[^\W\d_][\w'-]*", drafter.left) if word not in FILL]
    not_understood = [word for word in dict.fromkeys(rest) if not _by_name(drafter, word)]
    if not drafter.tasks:
        details: Any = {
            "expected": f"words about {', '.join(known.operators) or 'operators, of which none is installed'}"
        }
        found = "; ".join(drafter.notes) or repr(words)
        fix = "say it in other words, or ask a model with --model-url"
        raise DataError("no keyword was understood", code="data.plan", found=found, fix=fix, **details)
    tasks = sorted(drafter.tasks.values(), key=lambda task: RANKS.get(str(task["name"]), 50))
    return Draft(tasks=tasks, used=drafter.used, not_understood=not_understood, notes=drafter.notes)


def _quoted(drafter: _Drafter) -> None:
    """Leave out texts with quoted words."""
    for match in drafter.found(QUOTED):
        listed = re.findall(r"[\"“]([^\"“”]+)[\"”]", match["words"])
        if (column := drafter.column(match)) is not None:
            drafter.add(match[0], "words", column=column, words=listed)


def _lengths(drafter: _Drafter) -> None:
    """Bound lengths in words or characters."""
    for pattern, (kept, removed) in LENGTHS.items():
        for match in drafter.found(pattern):
            if match["unit"].startswith("token"):
                drafter.notes.append(
                    f"'{match[0].strip()}': the operator length counts words or characters, not tokens"
                )
                continue
            name, shift = removed if drafter.removes(match) else kept
            unit = "words" if match["unit"].startswith("word") else "characters"
            number = int(re.sub(r"[,_]", "", match["number"]))
            bounds = {name: max(number + shift, 0)}
            if match.groupdict().get("second"):
                bounds = {"minimum": number, "maximum": int(re.sub(r"[,_]", "", match["second"]))}
            if (column := drafter.column(match)) is not None:
                key = f"length of {column} in {unit}"
                drafter.add(match[0], "length", key=key, column=column, unit=unit, **bounds)


def _alike(drafter: _Drafter) -> None:
    """Leave out duplicates, exact ones unless another kind is said."""
    for pattern, name in ALIKE.items():
        for match in drafter.found(pattern):
            if (column := drafter.column(match)) is not None:
                drafter.add(match[0], name, column=column)


def _languages(drafter: _Drafter) -> None:
    """Keep languages."""
    wanted, words = list[str](), list[str]()
    for match in drafter.found(LANGUAGE):
        if drafter.removes(match) or re.search(r"\b(no|not|non|without)[\s-]+$", drafter.left[: match.start()]):
            drafter.notes.append(f"'{match[0]}': the operator language keeps languages; say which ones to keep")
            continue
        words.append(match[0])
        wanted.append(LANGUAGES[match["language"]])
    if wanted:
        drafter.add(" ".join(words), "language", languages=sorted({*wanted}))


def _safety(drafter: _Drafter) -> None:
    """Leave out what is not safe."""
    for match in drafter.found(SAFETY):
        drafter.add(match[0], "safety")


def _difficulty(drafter: _Drafter) -> None:
    """Score the difficulty, and order by it."""
    ways = list(drafter.found(DIFFICULTY))
    weight, limit, order = 0.0, None, list[str]()
    for pattern, sign in ((EASY_FIRST, -1.0), (HARD_FIRST, 1.0)):
        for match in drafter.found(pattern):
            if weight == -sign:
                drafter.notes.append(f"'{order[-1]}' puts easy ones first, '{match[0]}' hard ones: the first is done")
                continue
            order.append(match[0])
            weight = sign
    for match in drafter.found(EXTREME):
        order.append(match[0])
        weight = -1.0 if re.search("eas|simpl", match[0]) else 1.0
        limit = int(re.sub(r"[,_]", "", match["number"] or match["after"]))
    if not ways and not order:
        return
    said = " ".join(match[0] for match in ways) or order[0]
    name = "difficulty_rules"
    if re.search(r"pass|success|solve", said):
        name = "difficulty_pass_rate"
    elif re.search(r"llm|model|judge", said):
        name = "difficulty_llm"
    written = drafter.known.operators[name].writes if name in drafter.known.operators else None
    column = written[0] if written else "difficulty"
    own: Task = {}
    if name == "difficulty_rules" and drafter.source.column("answer") is None:
        own = {"answer": None}
    if any(isinstance(record.get(column), int | float) for record in drafter.source.records):
        drafter.notes.append(f"the data have the column {column}, which is used as it is")
    elif not drafter.add(said, name, **own):
        return
    if not order:
        drafter.notes.append("the difficulty is computed, and orders nothing: say easy first, or hard first")
        return
    most: Task = {} if limit is None else {"limit": limit}
    drafter.add(" ".join(order), "priority", weights={column: weight}, **most)


def _categories(drafter: _Drafter) -> None:
    """Keep some rows of each category."""
    for match in drafter.found(CATEGORY):
        word, columns = match["category"], drafter.source.columns
        named = next((column for column in columns if column.lower() in (word, f"{word}s", word.rstrip("s"))), None)
        if named is None:
            there = ", ".join(columns)
            drafter.notes.append(f"'{match[0].strip()}' needs a column {word}, and there are {there}")
            continue
        drafter.add(match[0], "per_category", category=named, limit=int(re.sub(r"[,_]", "", match["number"])))


def _samples(drafter: _Drafter) -> None:
    """Keep some rows: by chance, or the first ones, of an order if there is one."""
    for match in drafter.found(RANDOM):
        number = match["number"] or match["before"] or match["after"]
        drafter.add(match[0], "select", order="random", limit=int(re.sub(r"[,_]", "", number)))
    for pattern in (FIRST, ONLY_ROWS):
        for match in drafter.found(pattern):
            limit = int(re.sub(r"[,_]", "", match["number"]))
            if "priority" in drafter.tasks:
                drafter.add(match[0], "priority", limit=limit)
            else:
                drafter.add(match[0], "select", order="first", limit=limit)


def _vague(drafter: _Drafter) -> None:
    """Say what is missing of words that mean a number without one."""
    for match in drafter.found(VAGUE):
        if "length" not in drafter.names:
            drafter.notes.append(f"'{match[0]}' has no number: say, for example, at most 200 words")


_RULES: Sequence[Callable[[_Drafter], None]] = (
    _quoted, _lengths, _categories, _alike, _languages, _safety, _difficulty, _samples, _vague,
)  # fmt: skip


def _by_name(drafter: _Drafter, word: str) -> bool:
    """Add an operator whose name has a word, if its default settings do for this data."""
    stem = _stem(word)
    given = {*drafter.source.columns, *(each for name in drafter.names for each in _written(drafter, name))}
    for name, each in drafter.known.operators.items():
        if name in drafter.names or each.reads is None or stem not in {_stem(part) for part in name.split("_")}:
            continue
        if {*each.reads} <= given and drafter.add(word, name):
            drafter.notes.append(f"'{word}' is in the name of the operator {name}, which has its default settings")
            return True
    return False


def _written(drafter: _Drafter, name: str) -> Sequence[str]:
    return drafter.known.operators[name].writes or ()


def _stem(word: str) -> str:
    for ending in ("ities", "ity", "ies", "ing", "ers", "er", "es", "ed", "e", "s", "y"):
        if word.endswith(ending) and len(word) - len(ending) >= 4:
            return word.removesuffix(ending)
    return word
