"""Marked answers, pieces of texts, and thoughts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.errors import DataError
from jackfield_formatter.answers import final_answer, thoughts, without_thoughts
from jackfield_formatter.pieces import pieces

PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="<>\\{}#"), max_size=40)
ONE_LINE = st.text("abc 0123.,/+-", min_size=1, max_size=20).filter(str.strip)


@given(PLAIN, PLAIN, ONE_LINE)
def test_marks_are_found_after_thoughts(thought: str, before: str, answer: str) -> None:
    """What is within the thoughts is no answer, and the last mark counts."""
    wrong = f"<think>{thought}<answer>0</answer>\\boxed{{0}}</think>"
    assert answer.strip() == final_answer(f"{wrong}{before}<answer>1</answer><answer>{answer}</answer>")
    assert answer.strip() == final_answer(f"{wrong}{before}\\boxed{{1}} or \\boxed{{{answer}}}{before}")
    assert answer.strip() == final_answer(f"{wrong}{before}\n#### {answer.lstrip()}").strip()


@given(st.recursive(st.text("abc", min_size=1, max_size=3), lambda inner: st.builds("x{{{}}}y".format, inner)))
def test_braces_in_a_box_may_be_nested(inside: str) -> None:
    assert inside == final_answer(f"So \\boxed{{{inside}}}.", "boxed")


@pytest.mark.parametrize("how", ["####", "boxed", "answer", "result"])
def test_an_answer_without_its_mark_is_refused(how: str) -> None:
    with pytest.raises(DataError) as caught:
        final_answer("It is 2.", how)
    assert "It is 2." in str(caught.value.found)
    assert "It is 2." == final_answer("It is 2.", how, strict=False)


def test_a_box_that_does_not_end_is_none() -> None:
    assert "1" == final_answer(r"\boxed{1} and \boxed{2", "boxed")


def test_thoughts_and_what_follows() -> None:
    for text in ("<think>Hm.</think>\nYes.", "Hm.</think>Yes."):  # templates may begin the thoughts in the prompt
        assert ("Hm.", "Yes.") == (thoughts(text), without_thoughts(text))
    assert ("", "Yes.") == (thoughts("Yes."), without_thoughts("Yes."))


@given(st.text(st.sampled_from("ab .\n!"), max_size=200), st.integers(1, 30))
def test_pieces_are_the_text(text: str, most: int) -> None:
    """None is too long, nothing but white space is lost, and the order stays."""
    found = pieces(text, most)
    assert all(len(piece) <= most and piece.strip() for piece in found)
    place = 0
    for piece in found:
        at = text.index(piece, place)
        assert not text[place:at].strip()
        place = at + len(piece)
    assert not text[place:].strip()


def test_pieces_end_where_the_text_does() -> None:
    """With a paragraph, else a line, a sentence, a word."""
    assert ["First one.\n\n", "Second one. ", "Third one."] == pieces("First one.\n\nSecond one. Third one.", 14)
    assert ["aaaa", "aaaa", "aa"] == pieces("a" * 10, 4)


@given(st.text(st.sampled_from("ab c\n"), min_size=1, max_size=100), st.integers(2, 12))
def test_pieces_by_another_count(text: str, most: int) -> None:
    """A count such as that of tokens, of which a character may have two."""
    found = pieces(text, most, lambda part: sum(2 if each == "b" else 1 for each in part))
    assert all(len(piece) + piece.count("b") <= most for piece in found)
    assert "".join(text.split()) == "".join("".join(found).split())
