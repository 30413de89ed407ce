"""Filters by words that texts have: the user's own, or those of topics that are not safe."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import attrs
import xxhash
from attrs.validators import ge

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, OperatorType, Row
from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield_operator_basic.rows import each_row
from jackfield_operator_basic.texts import text_of

_SHIPPED = Path(__file__).with_name("safety_words.json")
_INVISIBLE = dict.fromkeys(map(ord, "\u00ad\u200b\u2060\ufeff"))  #: can be within a word, and are not seen
#: Letters of scripts that do not separate words: Thai, Lao, Burmese, Khmer, Japanese, Chinese
_UNSEPARATED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
_BEFORE, _AFTER = r"(?<![^\W_])", r"(?![^\W_])"  #: no letter and no digit
_SHOWN = 5  #: words in a reason

_COLUMN = "column with the text"
_WHOLE = "find whole words only; a script that does not separate words, such as Chinese, has none"
_CASE = "tell upper and lower case apart"


@attrs.frozen(kw_only=True)
class WordsConfig:
    """Settings of ``words``."""

    column: str = option("prompt", _COLUMN)
    words: tuple[str, ...] = option(help="words, or phrases")
    whole_words: bool = option(True, _WHOLE)
    match_case: bool = option(False, _CASE)
    maximum: int = option(0, "how many of them a text may have", ge(0))


@attrs.frozen(kw_only=True)
class SafetyConfig:
    """Settings of ``safety``."""

    column: str = option("prompt", _COLUMN)
    words: Mapping[str, tuple[str, ...]] = option(
        factory=dict, help="own words, or phrases, by category; a category that is shipped gets more words"
    )
    shipped: bool = option(True, "use the words that are shipped, in English, of the categories in the package's page")
    whole_words: bool = option(True, _WHOLE)
    match_case: bool = option(False, _CASE)
    categories: tuple[str, ...] | None = option(None, "categories that are decided by; null: all")
    maximum: int = option(0, "how many of their words a text may have", ge(0))


class Finder:
    """Finds listed words in a text.

    Texts and words are compared in Unicode's form NFKC, without soft hyphens and other signs that are not seen, and, if
    case does not matter, with full case folding. A space of a phrase is any white space.
    """

    def __init__(self, words: Iterable[str], whole_words: bool, match_case: bool) -> None:
        self._match_case = match_case
        listed = sorted({self._normal(word).strip() for word in words}, key=lambda word: (-len(word), word))
        parts = [_expression(word, whole_words) for word in listed]
        self._pattern = re.compile("|".join(parts) if parts else r"(?!)")

    def _normal(self, text: str) -> str:
        if text.isascii():
            return text if self._match_case else text.lower()
        text = unicodedata.normalize("NFKC", text.translate(_INVISIBLE))
        # Folding can leave a form that is not NFKC.
        return text if self._match_case else unicodedata.normalize("NFKC", text.casefold())

    def find(self, text: str) -> list[str]:
        """Return the words in the order in which they come, the longest of those that begin at a place."""
        return [" ".join(found.split()) for found in self._pattern.findall(self._normal(text))]


def _expression(word: str, whole: bool) -> str:
    body = r"\s+".join(map(re.escape, word.split()))
    before = _BEFORE if whole and not _UNSEPARATED.match(word[0]) else ""
    after = _AFTER if whole and not _UNSEPARATED.match(word[-1]) else ""
    return before + body + after


@cache
def shipped_words() -> Mapping[str, Sequence[str]]:
    """Return the shipped words by category."""
    found: Mapping[str, Sequence[str]] = json.loads(_SHIPPED.read_text(encoding="utf-8"))
    return found


def _refuse_empty(words: Sequence[str], where: str) -> None:
    if not words or not all(map(str.strip, words)):
        raise ConfigError("there are no words", where=where, expected="one word or more", found=words)


class Words(Operator):
    """Leaves out rows whose text has listed words."""

    type: ClassVar[OperatorType] = "filter"
    decides_by: ClassVar[tuple[str, ...]] = ("maximum",)

    def __init__(self, config: WordsConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        _refuse_empty(config.words, "words")
        self._column, self._statistic = context.column(config.column), f"{config.column}_words_found"
        self._finder = Finder(config.words, config.whole_words, config.match_case)

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the column with the text."""
        return (self._column,)

    @property
    def writes(self) -> tuple[str, ...]:
        """The words that it has."""
        return (self._statistic,)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Find the words."""
        return each_row(request, lambda row: {self._statistic: self._finder.find(text_of(row.values, self._column))})

    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        """Refuse texts with too many of them."""
        found = ((row.key, row.values[self._statistic]) for row in rows)
        return {key: f"has {', '.join(words[:_SHOWN])}" for key, words in found if len(words) > self.config.maximum}


class Safety(Operator):
    """Leaves out rows whose text has words of topics that are not safe.

    The statistics are the words that were found, by category, and their number. A list of words does not know what a
    text means: "kill a process" is found, and an unsafe text in other words is not.
    """

    type: ClassVar[OperatorType] = "filter"
    decides_by: ClassVar[tuple[str, ...]] = ("categories", "maximum")

    def __init__(self, config: SafetyConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        listed = {name: list(words) for name, words in (shipped_words().items() if config.shipped else ())}
        for name, words in config.words.items():
            _refuse_empty(words, f"words.{name}")
            listed.setdefault(name, []).extend(words)
        if not listed:
            raise ConfigError("there are no words", where="words", expected="own words, or shipped: true", found="none")
        if unknown := sorted({*(config.categories or ())} - listed.keys()):
            details: Any = {"where": "categories", "expected": ", ".join(listed), "found": ", ".join(unknown)}
            raise ConfigError("a category has no words", **details)
        self._column, self._words = context.column(config.column), f"{config.column}_unsafe_words"
        self._count = f"{config.column}_unsafe_count"
        self._finders = {name: Finder(words, config.whole_words, config.match_case) for name, words in listed.items()}

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the column with the text."""
        return (self._column,)

    @property
    def writes(self) -> tuple[str, ...]:
        """The words that it has, by category, and how many they are."""
        return (self._words, self._count)

    @property
    def version(self) -> str:
        """A digest of the shipped words."""
        return xxhash.xxh3_64_hexdigest(_SHIPPED.read_bytes()) if self.config.shipped else ""

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Find the words of all categories."""
        return each_row(request, self._found)

    def _found(self, row: Row) -> dict[str, Any]:
        text = text_of(row.values, self._column)
        found = {name: words for name, finder in self._finders.items() if (words := finder.find(text))}
        return {self._words: found, self._count: sum(map(len, found.values()))}

    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        """Refuse texts with too many words of some categories."""
        refused, wanted = dict[str, str](), self.config.categories
        for row in rows:
            found = {name: words for name, words in row.values[self._words].items() if wanted is None or name in wanted}
            if sum(map(len, found.values())) > self.config.maximum:
                told = (f"{name}: {', '.join(words[:_SHOWN])}" for name, words in found.items())
                refused[row.key] = f"has words of {'; '.join(told)}"
        return refused
