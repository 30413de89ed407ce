"""The filter by language, with sentences whose languages are known."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.errors import ConfigError

SENTENCES = {
    "en": "There were seven cards on the table, and Dan bought one more of them yesterday.",
    "de": "Auf dem Tisch lagen sieben Karten, und Daniel hat gestern noch eine dazu gekauft.",
    "fr": "Il y avait sept cartes sur la table, et Daniel en a acheté une autre hier.",
    "es": "Había siete cartas sobre la mesa, y ayer Daniel compró una carta más.",
    "ru": "На столе лежало семь карт, и вчера Даниил купил ещё одну.",  # noqa: RUF001
    "zh": "桌子上有七张卡片，丹昨天又买了一张。",  # noqa: RUF001
    "ja": "テーブルの上にカードが七枚あり、ダンは昨日もう一枚買いました。",
    "ar": "كانت هناك سبع بطاقات على الطاولة، واشترى دان بطاقة أخرى أمس.",
}
ROWS = [{"prompt": text} for text in SENTENCES.values()]


def test_languages_are_found(apply: Any) -> None:
    got = apply("language", ROWS, 3)
    assert [*SENTENCES] == [row["prompt_language"] for row in got.updates.values()]
    assert all(0.5 < row["prompt_language_probability"] <= 1.0 for row in got.updates.values())
    assert {} == got.removed


def test_wanted_languages_are_kept(apply: Any) -> None:
    got = apply("language", ROWS, languages=["de", "ja"])
    assert {at for at, code in enumerate(SENTENCES) if code not in ("de", "ja")} == got.removed.keys()
    assert "is in en, with probability" in got.removed[0]


def test_unsure_texts_are_not_kept(apply: Any) -> None:
    """A threshold between the probabilities of two texts keeps the surer one."""
    rows = [ROWS[0], {"prompt": "Ida has 9 toys."}]
    sure, unsure = (row["prompt_language_probability"] for row in apply("language", rows).updates.values())
    assert unsure < sure
    assert {1} == apply("language", rows, minimum=(sure + unsure) / 2).removed.keys()


def test_fewer_candidates_make_short_texts_surer(apply: Any) -> None:
    rows = [{"prompt": "Ida has 9 toys and loses 2."}]
    among_all = apply("language", rows).updates[0]
    among_two = apply("language", rows, candidates=["en", "de"]).updates[0]
    assert ("en", "en") == (among_all["prompt_language"], among_two["prompt_language"])
    assert among_all["prompt_language_probability"] < 0.9 < among_two["prompt_language_probability"]


def test_a_language_that_is_no_candidate_becomes_the_nearest(apply: Any) -> None:
    got = apply("language", [{"prompt": SENTENCES["es"]}], candidates=["ru", "it"]).updates[0]
    assert "it" == got["prompt_language"]


@pytest.mark.parametrize("text", ["", "   ", "12 + 3 = 15", "$x^2$"])
def test_a_text_without_words_has_no_language(apply: Any, text: str) -> None:
    rows = [{"prompt": text}]
    got = apply("language", rows)
    assert {"prompt_language": "und", "prompt_language_probability": 0.0} == got.updates[0]
    assert {} == got.removed
    assert {0} == apply("language", rows, languages=["en"]).removed.keys()
    assert {0} == apply("language", rows, minimum=0.1).removed.keys()
    assert {} == apply("language", rows, languages=["en", "und"], minimum=0.1).removed


def test_conversations_and_other_columns(apply: Any) -> None:
    talk = [{"role": "user", "content": SENTENCES["fr"]}, {"role": "assistant", "content": "Il en reste huit."}]
    got = apply("language", [{"answer": talk}, {"answer": 7}, {}], column="answer")
    assert "fr" == got.updates[0]["answer_language"]
    assert {1, 2} == got.set_aside.keys()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"languages": ["English"]}, "ISO 639"),
        ({"languages": ["xq"]}, "xq"),
        ({"candidates": ["en"]}, "one candidate"),
        ({"candidates": ["en", "eng"]}, "did you mean"),
    ],
)
def test_unknown_languages_are_refused(apply: Any, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply("language", [], **settings)
    assert told in str(caught.value)
