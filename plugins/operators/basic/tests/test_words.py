"""Filters by words: which words are found, and what is decided."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.errors import ConfigError
from jackfield_operator_basic.words import Finder, shipped_words


def found(text: str, *words: str, whole: bool = True, case: bool = False) -> list[str]:
    return Finder(words, whole, case).find(text)


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("A bomb, the BOMB; bombs and bombastic", ("bomb",), ["bomb", "bomb"]),
        ("_bomb_ and *bomb* and 2bomb", ("bomb",), ["bomb", "bomb"]),
        ("kill \n  your\tself", ("kill your",), ["kill your"]),
        ("hate crime and hate", ("hate", "hate crime"), ["hate crime", "hate"]),
        ("C++ is not C", ("C++",), ["c++"]),
        ("GROSSE Straße", ("große", "strasse"), ["grosse", "strasse"]),
        ("cafe\u0301 and café", ("café",), ["café", "café"]),
        ("ｂｏｍｂ and ﬁre", ("bomb", "fire"), ["bomb", "fire"]),  # noqa: RUF001
        ("bo\u00admb, bo\u200bmb", ("bomb",), ["bomb", "bomb"]),
        ("我想买炸弹吗", ("炸弹",), ["炸弹"]),
        ("ขายระเบิดที่นี่", ("ระเบิด",), ["ระเบิด"]),
        ("бомба и БОМБА, бомбами", ("бомба",), ["бомба", "бомба"]),
        ("İstanbul", ("i̇stanbul",), ["i̇stanbul"]),
        ("nothing", ("bomb",), []),
        ("", ("bomb",), []),
    ],
)
def test_which_words_are_found(text: str, words: tuple[str, ...], expected: list[str]) -> None:
    assert expected == found(text, *words)


def test_parts_of_words_and_case_are_found_if_asked_for() -> None:
    assert ["bomb", "bomb"] == found("Bombastic seabombs", "bomb", whole=False)
    assert ["Bomb"] == found("Bomb bomb BOMB Bombs", "Bomb", case=True)
    assert ["Bomb", "Bomb"] == found("Bomb bomb BOMB Bombs", "Bomb", case=True, whole=False)


WORDS = st.text("abc", min_size=1, max_size=3)


@given(st.lists(WORDS, min_size=1, max_size=4), st.lists(st.tuples(WORDS, st.sampled_from(" .,-\n;")), max_size=12))
def test_whole_words_are_those_of_a_division_at_signs(listed: list[str], parts: list[tuple[str, str]]) -> None:
    """Another way to find whole words: cut the text at all signs, and look each part up."""
    text = "".join(word + sign for word, sign in parts)
    expected = [word for word in re.split(r"[ .,\-\n;]+", text) if word in listed]
    assert expected == found(text, *listed)
    assert expected == found(text.upper(), *listed)


def test_words_removes_texts_with_more_than_the_maximum(apply: Any) -> None:
    rows = [{"question": text} for text in ("one egg", "egg and Egg", "no eggs", "egg egg egg")]
    context = {"columns": {"prompt": "question"}}
    got = apply("words", rows, 2, context, words=["egg"], maximum=1)
    assert [["egg"], ["egg", "egg"], [], ["egg"] * 3] == [row["prompt_words_found"] for row in got.updates.values()]
    assert {1, 3} == got.removed.keys()


def test_safety_has_statistics_by_category(apply: Any) -> None:
    rows = [{"prompt": "How do I build a pipe bomb, a Bomb"}, {"prompt": "2 + 2"}, {"prompt": "a MURDER with a bomb"}]
    got = apply("safety", rows)
    assert {"prompt_unsafe_words": {"weapons": ["pipe bomb", "bomb"]}, "prompt_unsafe_count": 2} == got.updates[0]
    assert {"prompt_unsafe_words": {}, "prompt_unsafe_count": 0} == got.updates[1]
    assert {"violence": ["murder"], "weapons": ["bomb"]} == got.updates[2]["prompt_unsafe_words"]
    assert {
        0: "has words of weapons: pipe bomb, bomb",
        2: "has words of violence: murder; weapons: bomb",
    } == got.removed


def test_safety_decides_by_some_categories_and_a_maximum(apply: Any) -> None:
    rows = [{"prompt": "a bomb"}, {"prompt": "a murder"}, {"prompt": "two bombs and a bomb"}]
    assert {1} == apply("safety", rows, categories=["violence"]).removed.keys()
    assert {2} == apply("safety", rows, categories=["weapons"], maximum=1).removed.keys()
    assert set() == apply("safety", rows, categories=["drugs"]).removed.keys()


def test_own_words_are_added_or_stand_alone(apply: Any) -> None:
    rows = [{"prompt": "our SECRET bomb"}]
    more = apply("safety", rows, words={"secrets": ["secret"], "weapons": ["our secret"]})
    assert {"weapons": ["our secret", "bomb"], "secrets": ["secret"]} == more.updates[0]["prompt_unsafe_words"]
    alone = apply("safety", rows, words={"secrets": ["secret"]}, shipped=False)
    assert {"secrets": ["secret"]} == alone.updates[0]["prompt_unsafe_words"]
    assert more.operator.version != alone.operator.version


def test_every_shipped_word_is_found_in_its_category(apply: Any) -> None:
    """The lists have no word twice, and none that another form of it hides."""
    listed = [(name, word) for name, words in shipped_words().items() for word in words]
    assert len(listed) == len({word for _, word in listed})
    got = apply("safety", [{"prompt": f"It says {word.upper()}!"} for _, word in listed])
    assert [(name, [word]) for name, word in listed] == [
        (name, row["prompt_unsafe_words"].get(name))
        for (name, _), row in zip(listed, got.updates.values(), strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("words", {"words": []}, "there are no words"),
        ("words", {"words": ["a", " "]}, "there are no words"),
        ("safety", {"shipped": False}, "there are no words"),
        ("safety", {"words": {"own": []}}, "words.own"),
        ("safety", {"categories": ["weather"]}, "weather"),
    ],
)
def test_settings_without_sense_are_refused(apply: Any, name: str, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply(name, [], **settings)
    assert told in str(caught.value)
