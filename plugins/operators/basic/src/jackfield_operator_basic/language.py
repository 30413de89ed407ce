"""A filter by the language of texts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, ClassVar

import attrs
from attrs.validators import ge, le

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, OperatorType, Row
from jackfield.errors import ConfigError, did_you_mean
from jackfield.sdk import option
from jackfield_operator_basic.rows import each_row
from jackfield_operator_basic.texts import text_of

UNDETERMINED = "und"  #: ISO 639's code of a text that nothing is known of
_CODE = re.compile(r"[a-z]{2,3}")


@attrs.frozen(kw_only=True)
class LanguageConfig:
    """Settings of ``language``."""

    column: str = option("prompt", "column with the text")
    candidates: tuple[str, ...] | None = option(
        None, "languages that the data can have; null: all that are known. Fewer make short texts surer"
    )
    languages: tuple[str, ...] = option(
        (), "codes of the languages that are kept, such as en and de; none: any. und: that of a text without words"
    )
    minimum: float = option(0.0, "least probability of a text's language for a row that is kept", [ge(0.0), le(1.0)])


class Language(Operator):
    """Keeps rows whose text is in wanted languages, which py3langid finds without a network.

    The probability is that of a naive Bayes classifier of byte sequences (Lui and Baldwin, ACL 2012) among the
    candidates. One short sentence often has less than 0.5 among 140 languages.
    """

    type: ClassVar[OperatorType] = "filter"
    decides_by: ClassVar[tuple[str, ...]] = ("languages", "minimum")

    def __init__(self, config: LanguageConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        self._column = context.column(config.column)
        self._language, self._probability = f"{config.column}_language", f"{config.column}_language_probability"
        for name in ("candidates", "languages"):
            if wrong := [code for code in getattr(config, name) or () if not _CODE.fullmatch(code)]:
                expected = "codes of ISO 639 in lower case, such as en"
                raise ConfigError("a language has no such code", where=name, expected=expected, found=wrong)
        if config.candidates is not None and len(config.candidates) < 2:
            raise ConfigError("one candidate leaves no choice", where="candidates", expected="two languages or more")

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the column with the text."""
        return (self._column,)

    @property
    def writes(self) -> tuple[str, ...]:
        """Its language and the probability of that."""
        return (self._language, self._probability)

    @property
    def version(self) -> str:
        """The version of the classifier."""
        return f"py3langid-{version('py3langid')}"

    async def start(self) -> None:
        """Load the classifier, which takes a second, and refuse languages that it does not know."""
        known = {*(await asyncio.to_thread(_identifier)).labels, UNDETERMINED}
        for name in ("candidates", "languages"):
            for code in getattr(self.config, name) or ():
                if code not in known:
                    expected = ", ".join(sorted(known))
                    what = f"the language {code!r} is not known{did_you_mean(code, known)}"
                    raise ConfigError(what, where=name, expected=expected, found=code)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Find the language of each text."""
        return each_row(request, self._found)

    def _found(self, row: Row) -> dict[str, Any]:
        text = text_of(row.values, self._column)
        ranked = _identifier().rank(text)
        if ranked[0][1] < 2.5 / len(ranked):  # all the same, one counted twice: nothing in it is known
            return {self._language: UNDETERMINED, self._probability: 0.0}
        if self.config.candidates is not None:
            ranked = [(code, probability) for code, probability in ranked if code in self.config.candidates]
        total = sum(probability for _, probability in ranked)
        code, probability = ranked[0]
        if total <= 0.0:  # the candidates are out of the question, by more than a number can say
            return {self._language: UNDETERMINED, self._probability: 0.0}
        return {self._language: code, self._probability: round(probability / total, 6)}

    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        """Refuse other languages, and those that are not sure."""
        wanted, least, refused = self.config.languages, self.config.minimum, dict[str, str]()
        for row in rows:
            code, probability = row.values[self._language], row.values[self._probability]
            if wanted and code not in wanted:
                refused[row.key] = f"is in {code}, with probability {probability:.2f}"
            elif probability < least and code != UNDETERMINED:
                refused[row.key] = f"is in {code} with probability {probability:.2f} only"
            elif code == UNDETERMINED and code not in wanted and least > 0.0:
                refused[row.key] = "its language is not known"
        return refused


@cache
def _identifier() -> Any:
    """Return the classifier, which several operators of a process share: nothing in it changes."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
