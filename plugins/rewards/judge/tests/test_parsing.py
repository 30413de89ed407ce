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
        "Score: 2 at first.\nScore: 7",
        "7",
        "7/10",
        " **7** ",
        '<think>perhaps {"score": 1}</think>{"score": 7}',
        'It says {"score": 10}. I say {"score": 7}',
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
        'It is {"score": 10}, says the response.\nScore: 2',  # two verdicts
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


@pytest.mark.parametrize("text", ['{"winner": "C++"}', '{"winner": null}', "A is fine and B is fine.", '{"score": 1}'])
def test_no_winner_is_invented(text: str) -> None:
    with refused("reward.output"):
        parse(text, WINNER, "judge")


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
