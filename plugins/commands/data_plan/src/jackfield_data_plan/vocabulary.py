"""The words that the keyword planner knows."""

from __future__ import annotations

import re

_FILL = """
    a an the these those this that for of with in on by to from and or then also please it its them
    their my our all any each every data rows row tasks task problems problem questions question
    examples example maths math set sets dataset datasets ones one compute calculate score scores
    keep kept drop remove removed filter filters leave out only first last order sort sorted put
    make use get want i we which are is be have has there not no than into texts text prompts prompt
    answers answer solutions solution responses response finally pipeline through your me without
    with where whose should must every most take length lengths anything everything go curriculum
"""
FILL = frozenset(_FILL.split())  #: words that mean nothing here


def _words(text: str) -> re.Pattern[str]:
    """Compile a pattern in which blanks stand for any white space or hyphens, and whole words are found."""
    return re.compile(r"(?<![\w-])(?:" + text.replace(" ", r"[\s-]+") + r")(?!\w)")


STOP = r"[;]|[,.](?!\d)"  #: ends a clause
_DIGITS = r"\d+(?:[,_]\d{3})*"
_NUMBER = rf"(?P<number>{_DIGITS})"
_UNIT = r"(?P<unit>words?|characters?|chars?|letters?|tokens?)"
_ROWS = r"(?:rows?|problems?|tasks?|questions?|examples?|samples?|prompts?)"
_EASY = r"(?:easy|easier|easiest|simple|simpler|simplest)"
_HARD = r"(?:hard|harder|hardest|difficult)"
_RISING, _FALLING = r"(?:increasing|ascending|rising|growing)", r"(?:decreasing|descending|falling)"

#: Verbs of rows that are left out, before what they are.
REMOVING = re.compile(r"\b(?:drop|remove|exclude|discard|delete|leave\s+out|filter\s+out|throw\s+away)\b")
#: Words for columns, with their usual names.
COLUMNS = {"answer": "answer", "solution": "answer", "response": "response"}

_MOST, _LEAST = r"(?:at most|no more than|not more than|up to|maximum|max)", r"(?:at least|no fewer than|minimum|min)"
REQUIRED = re.compile(rf"{_MOST}|{_LEAST}|between".replace(" ", r"[\s-]+"))
_FEWER, _MORE = r"(?:under|below|fewer than|less than|shorter than)", r"(?:more than|over|above|longer than)"
_QUOTES = r"(?P<words>[\"“][^\"“”]+[\"”](?:(?:\s*(?:,|and|or))+\s*[\"“][^\"“”]+[\"”])*)"
_WITHOUT = r"(?:without|no|not containing|not having|containing|that contain|that have|that mention|with|mentioning)"
#: Words in quotes that texts are not to have.
_QUOTED = _words(rf"{_WITHOUT} (?:the |any |of )*(?:words? |phrases? )?{_QUOTES}").pattern.removesuffix(r"(?!\w)")
QUOTED = re.compile(_QUOTED)
#: Bounds of lengths: which bound and what is added to the number, for rows that are kept and that are removed.
LENGTHS = {
    _words(rf"between {_NUMBER} and (?P<second>{_DIGITS}) {_UNIT}"): (("minimum", 0), ("minimum", 0)),
    _words(rf"{_MOST} {_NUMBER} {_UNIT}"): (("maximum", 0), ("minimum", 1)),
    _words(rf"{_LEAST} {_NUMBER} {_UNIT}"): (("minimum", 0), ("maximum", -1)),
    _words(rf"{_FEWER} {_NUMBER} {_UNIT}"): (("maximum", -1), ("minimum", 0)),
    _words(rf"{_MORE} {_NUMBER} {_UNIT}"): (("minimum", 1), ("maximum", 0)),
}

_TWINS = r"(?:duplicates?|duplicated|deduplicate|deduplication|dedup|dedupe|repeated|repetitions|copies)"
ALIKE = {
    _words(rf"(?:semantic|semantically) (?:{_TWINS}|similar|alike)|same meaning|paraphrases?"): "semantic_duplicates",
    _words(
        rf"(?:near|nearly|almost|fuzzy) (?:the same|identical|{_TWINS})|(?:too )?(?:similar|alike)"
    ): "near_duplicates",
    _words(rf"(?:exact )?{_TWINS}|(?:exactly )?(?:the same|identical)"): "exact_duplicates",
}

LANGUAGES = {
    "english": "en", "german": "de", "french": "fr", "spanish": "es", "italian": "it", "portuguese": "pt",
    "dutch": "nl", "russian": "ru", "polish": "pl", "turkish": "tr", "arabic": "ar", "chinese": "zh",
    "japanese": "ja", "korean": "ko", "hindi": "hi", "swedish": "sv", "danish": "da", "czech": "cs",
}  # fmt: skip
LANGUAGE = _words(rf"(?:only )?(?:in )?(?P<language>{'|'.join(LANGUAGES)})(?: only)?")
SAFETY = _words(r"(?:un)?safe|safety|unsafe|toxic|toxicity|harmful|offensive|profanity|profane|hateful")

DIFFICULTY = _words(
    r"(?:difficulty|difficulties|hardness)(?: (?:by|with|from|using) (?:an? |the )?(?:model's |own )*"
    r"(?:llm|model|judge|pass rates?|success rates?|rules))?|pass rates?|success rates?"
)
_PLACE = rf"(?:{_ROWS} |ones )?"
_BY = r"(?:by |in |of |order of )*"
_BEGIN = r"(?:starts?|begins?|starting|beginning) with (?:the )?"
_HARDER = rf"(?:and )?(?:get|gets|getting) harder|increasingly {_HARD}"
_EASIER = [
    rf"{_EASY} {_PLACE}first",
    rf"{_EASY} to {_HARD}",
    rf"{_BY}{_RISING}(?: difficulty)?",
    rf"{_HARD} {_PLACE}last",
]
EASY_FIRST = _words("|".join([*_EASIER, rf"{_BEGIN}{_EASY}", _HARDER]))
_HARDEST = [
    rf"{_HARD} {_PLACE}first",
    rf"{_HARD} to {_EASY}",
    rf"{_BY}{_FALLING}(?: difficulty)?",
    rf"{_EASY} {_PLACE}last",
]
HARD_FIRST = _words("|".join([*_HARDEST, rf"{_BEGIN}{_HARD}"]))
EXTREME = _words(rf"{_NUMBER} (?:easiest|hardest|simplest)|(?:easiest|hardest|simplest) (?P<after>{_DIGITS})")

_EACH = r"(?:per|of each|for each|from each|of every)"
CATEGORY = _words(rf"(?:at most |up to |no more than )?{_NUMBER} (?:{_ROWS} )?{_EACH} (?P<category>\w+)")
_CHANCE = [rf"(?:a )?(?:random )?(?:sample|sampling) (?:of )?(?:at )?{_NUMBER}(?: {_ROWS})?(?: at random)?"]
_CHANCE += [rf"(?P<before>{_DIGITS}) random", rf"random (?P<after>{_DIGITS})"]
RANDOM = _words("|".join(_CHANCE))
FIRST = _words(rf"(?:the )?first {_NUMBER}")
ONLY_ROWS = _words(rf"(?:keep|only|at most|up to|limit to|no more than|limit of) (?:the )?{_NUMBER} {_ROWS}")
VAGUE = _words(r"(?:too |very )?(?:short|long|shorter|longer)")

#: Places of operators in a draft: what removes rows cheaply comes first, what orders comes last.
RANKS = {
    "length": 10, "words": 11, "safety": 12, "language": 13, "exact_duplicates": 20, "near_duplicates": 21,
    "semantic_duplicates": 22, "difficulty_rules": 60, "difficulty_llm": 61, "difficulty_pass_rate": 62,
    "per_category": 70, "select": 80, "priority": 90,
}  # fmt: skip
#: Distributions with operators that may not be installed.
_BASIC = "length words safety language exact_duplicates near_duplicates difficulty_rules priority select per_category"
_MODELS = "semantic_duplicates difficulty_llm difficulty_pass_rate"
PACKAGES = {
    **dict.fromkeys(_BASIC.split(), "jackfield-operator-basic"),
    **dict.fromkeys(_MODELS.split(), "jackfield-operator-models"),
}
