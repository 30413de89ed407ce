"""What is read from judges' answers, and what is not."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.errors import RewardError
from jackfield_reward_judge.parsing import Form, parse
from jackfield_testing import refused

SCORE = Form(low=0, high=10)
CRITERIA = Form(low=0, high=10, criteria=("accuracy", "Clear style"))
WINNER = Form(winner=True)


@pytest.mark.parametrize(
    "text",
    [
        '{"explanation": "so", "score": 7}',
        '{"SCORE": 7.0}',
        '{"score": "7"}',
        '{"score": "7/10"}',
        '{"score": "7 out of 10"}',
        '```json\n{"score": 7}\n```',
        '```\n{"score": 7}',
        'I think so.\n```json\n{"score": 7,}\n```\nThat is all.',
        'Here it is: {"score": 7} I hope it helps.',
        "{'explanation': 'it\\'s right', 'score': 7}",
        "{'explanation': null, 'score': 7}",
        '{"explanation": "the last line\nis right", "score": 7}',
        '{"explanation": "he said "four"", "score": 7}',
        '{"explanation": "so", "score": 7',
        '{"explanation": "so", "score": 7,',
        '```json\n{"explanation": "so", "score": 7\n```\nDone.',
        '{"score": 7, "explanation": "cut in the mid',
        'The set { is odd. {"score": 7}',
        'With \\frac{1}{2} it is {"score": 7}.',
        '{"note": "first"} then {"score": 7}',
        "Score: 7",
        "Score: 7/10",
        "**Score**: **7**",
        "### Rating: 7 / 10",
        "score = 7.0",
        "Final score is 7.",
        "Score: 7, as I said: the rating is 7/10",
        "On a score 0 to 10: score 7",
        "7",
        "7/10",
        " **7** ",
        '<think>perhaps {"score": 1}</think>{"score": 7}',
        'The other object is {"points": 10}. I say {"score": 7} {}',
        '{"score": {"score": 7, "why": "so"}}',
        '{"score": 7}\nThe score: 7/10',
    ],
)
def test_a_score_is_found(text: str) -> None:
    assert 0.7 == pytest.approx(parse(text, SCORE, "judge").scores["score"])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I cannot say.",
        '{"points": 7}',
        '{"score": null}',
        '{"score": true}',
        '{"score": "high"}',
        '{"score": NaN}',
        '{"score": Infinity}',
        '{"score": 1e999}',
        '{"score": 11}',
        '{"score": -1}',
        '{"score": [7]}',
        "Score: 12",
        "Score: 7/5",
        "Score: 70%",
        "Score: 7-8",
        "Score (0-10): high",
        "Score: 1,000",
        "Between 0 and 10.",
        # two verdicts, one of which may be a quotation
        'It is {"score": 10}, says the response.\nScore: 2',
        'Score: 2, though it says {"score": 10}',
        'It says {"score": 10}. I say {"score": 7}',
        'I say {"score": 7}. It says {"score": 10}',
        '{"score": 3, "explanation": "it says {"score": 10} itself"}',
        '{"explanation": "it says {"score": 10} itself", "score": 3}',
        '{"score": 3, "explanation": "it says "score": 10 itself"}',
        "Score: 2. The response wants me to write Score: 10",
        '<think>so far {"score": 7}',
        'A quotation {"score": 10}, and mine: {"score": 20}',
        "[" * 20_000,
        "{" * 20_000,
        "'" * 20_000,
        '{"a":' * 4_000,
    ],
)
def test_no_score_is_invented(text: str) -> None:
    with refused("reward.output", "judge") as caught:
        parse(text, SCORE, "judge")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "text",
    [
        '{"explanation": "so", "scores": {"accuracy": 5, "Clear style": 10}}',
        '{"accuracy": 5, "clear style": "10/10"}',
        '{"scores": {"accuracy": {"score": 5, "why": "so"}, "Clear style": {"score": 10}}}',
        '{"scores": {"accuracy": 5, "Clear style": 10}',
        "Accuracy: 5/10\nClear style: 10/10",
        "- **accuracy**: 5\n- **Clear style**: 10",
    ],
)
def test_criteria_are_found(text: str) -> None:
    assert {"accuracy": 0.5, "Clear style": 1.0} == parse(text, CRITERIA, "judge").scores


@pytest.mark.parametrize("text", ['{"scores": {"accuracy": 5}}', "accuracy: 5", '{"scores": 5}', '{"score": 5}'])
def test_a_missing_criterion_is_no_zero(text: str) -> None:
    with refused("reward.output"):
        parse(text, CRITERIA, "judge")


@pytest.mark.parametrize(
    ("text", "winner"),
    [
        ('{"explanation": "so", "winner": "A"}', "A"),
        ('{"winner": "Response B"}', "B"),
        ("{'winner': 'tie'}", "tie"),
        ('{"winner": "neither"}', "tie"),
        ("[[B]]", "B"),
        ("Verdict: A", "A"),
        ("**Winner:** response b", "B"),
        ("The better response is A.", "A"),
        ("tie", "tie"),
    ],
)
def test_a_winner_is_found(text: str, winner: str) -> None:
    assert winner == parse(text, WINNER, "judge").winner


@pytest.mark.parametrize(
    "text", ['{"winner": "C++"}', '{"winner": null}', "A and B are fine.", '{"score": 1}', "Winner: A. Winner: B"]
)
def test_no_winner_is_invented(text: str) -> None:
    with refused("reward.output"):
        parse(text, WINNER, "judge")


def test_an_answer_that_is_cut_off_is_not_read_to_the_middle_of_a_number() -> None:
    for text in ('{"explanation": "so", "score": 1', "Score: 1", "Score: 10/1", '{"score": 7.'):
        with refused("reward.output"):
            parse(text, SCORE, "judge", is_cut=True)
    assert 0.7 == parse('{"score": 7, "explanation": "cut in the mid', SCORE, "judge", is_cut=True).scores["score"]
    assert 0.1 == parse('{"explanation": "so", "score": 1', SCORE, "judge").scores["score"]


def test_a_criterion_that_is_quoted_otherwise_is_refused() -> None:
    with refused("reward.output"):
        parse('accuracy: 9\n{"scores": {"accuracy": 5, "Clear style": 10}}', CRITERIA, "judge")


def test_the_explanation_is_kept() -> None:
    assert "so" == parse('{"explanation": "so", "score": 7}', SCORE, "judge").explanation
    assert "It is fine.\nScore: 7" == parse("It is fine.\nScore: 7", SCORE, "judge").explanation


@pytest.mark.parametrize("form", [SCORE, CRITERIA, WINNER, Form(low=-1, high=1)])
def test_the_form_that_is_asked_for_can_be_read(form: Form) -> None:
    """With values in the place of words; and the schema has the same keys, all required, as strict outputs need."""
    number, low = (form.high + form.low) / 2, f"{form.low:g}"
    text = form.example.replace(f"<number from {low} to {form.high:g}>", str(number)).replace("<A, B or tie>", "tie")
    judgement = parse(text, form, "judge")
    assert ({0.5} if not form.winner else set()) == set(judgement.scores.values())
    schema, example = form.schema, json.loads(text)
    assert list(example) == schema["required"] == list(schema["properties"])
    assert schema["additionalProperties"] is False
    if form.criteria:
        assert list(form.criteria) == schema["properties"]["scores"]["required"]


PIECES = [
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    ":",
    ",",
    "score",
    "scores",
    "winner",
    "7",
    "-1e9",
    "/10",
    "NaN",
    "\\",
    "\n",
    "```",
    "é",
    " ",
]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    for form in (SCORE, CRITERIA, WINNER):
        judgement = None
        with suppress(RewardError):
            judgement = parse(text, form, "judge")
        if judgement is not None:
            assert all(0 <= score <= 1 for score in judgement.scores.values())
            assert form.winner == (judgement.winner is not None)
