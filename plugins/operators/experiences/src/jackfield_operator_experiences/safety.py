"""A part of the reward for responses without words and expressions of unsafe categories."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs
from attrs.validators import ge, in_

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, OperatorType, Row
from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield_operator_experiences.shaping import each_row, expression, number_of, text_of

_INVISIBLE = dict.fromkeys(map(ord, "\u00ad\u200b\u2060\ufeff"))  #: can be within a word, and are not seen


@attrs.frozen(kw_only=True)
class SafetyPenaltyConfig:
    """Settings of ``safety_penalty``."""

    words: Mapping[str, tuple[str, ...]] = option(factory=dict, help="whole words, or phrases, by category")
    patterns: Mapping[str, str] = option(
        factory=dict, help="expressions by category, for parts of words, and scripts that do not separate words"
    )
    per: Literal["category", "finding"] = option(
        "category", "what the penalty is for: a category that is found, or each place", in_(("category", "finding"))
    )
    penalty: float = option(0.5, "what each of these takes from the reward", ge(0.0))
    maximum: float = option(1.0, "most that all of them take", ge(0.0))
    match_case: bool = option(False, "tell upper and lower case apart")


class SafetyPenalty(Operator):
    """Takes from the reward of responses in which words or expressions of unsafe categories are found.

    Responses and words are compared in Unicode's form NFKC, without soft hyphens and other signs that are not seen.
    """

    type: ClassVar[OperatorType] = "scorer"
    reads = ("response", "reward")
    writes = ("reward", "unsafe_categories", "unsafe_findings")

    def __init__(self, config: SafetyPenaltyConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        flags = re.DOTALL if config.match_case else re.DOTALL | re.IGNORECASE
        self._searched = dict[str, list[re.Pattern[str]]]()
        for name, words in config.words.items():
            if not words or not all(map(str.strip, words)):
                details: Any = {"where": f"words.{name}", "expected": "one or more, with letters", "found": words}
                raise ConfigError("there are no words", fix="give words, or leave the category out", **details)
            parts = (r"\s+".join(map(re.escape, _normal(word).split())) for word in words)
            self._searched[name] = [re.compile(rf"(?<!\w)(?:{'|'.join(parts)})(?!\w)", flags)]
        for name, text in config.patterns.items():
            self._searched.setdefault(name, []).append(expression(text, f"patterns.{name}", flags))
        if not self._searched:
            details = {"where": "patterns", "expected": "words or patterns", "found": "none"}
            raise ConfigError("nothing is searched", fix="give words or patterns by category", **details)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Search all words and expressions."""
        return each_row(request, self._shaped)

    def _shaped(self, row: Row) -> Mapping[str, Any]:
        reward, text = number_of(row, "reward"), _normal(text_of(row, "response"))
        found = [sum(1 for each in several for _ in each.finditer(text)) for several in self._searched.values()]
        categories, findings = sum(map(bool, found)), sum(found)
        lost = self.config.penalty * (categories if self.config.per == "category" else findings)
        told = {"unsafe_categories": float(categories), "unsafe_findings": float(findings)}
        return {"reward": reward - min(lost, self.config.maximum), **told}


def _normal(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFKC", text.translate(_INVISIBLE))
