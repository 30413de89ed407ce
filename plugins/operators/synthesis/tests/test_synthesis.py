"""What each operator makes of experiences, and what its gate keeps out."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from jackfield.abc.operator import NewRow, Operator, OperatorContext, OperatorRequest, OperatorResult, Row
from jackfield.abc.reward import GeneratedText
from jackfield.errors import ConfigError, RunError, WorkerLost
from jackfield.plugins.registry import load_plugin
from jackfield_reward_requests import AiohttpClient, loopback_server

pytestmark = pytest.mark.timeout(120)

Answers = Callable[[str, int], str]


@attrs.define(slots=False)
class Host:
    """A host that answers by a function of the last message and the number of the call, and scores by the truth."""

    answers: Answers = lambda asked, call: "So 5."
    asked: list[str] = attrs.field(factory=list)
    seeds: list[int] = attrs.field(factory=list)
    counts: dict[str, float] = attrs.field(factory=dict)
    in_flight: int = 0
    most: int = 0

    async def generate(self, model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0)
        self.asked.append(messages[-1]["content"])
        self.seeds.append(sampling["seed"])
        self.in_flight -= 1
        return GeneratedText(text=self.answers(messages[-1]["content"], len(self.asked) - 1), tokens=7)

    async def score(self, values: Mapping[str, Any], response: str) -> float:
        return float(re.findall(r"\d+", response)[-1:] == [str(values["ground_truth"])])

    def count(self, name: str, number: float) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + number

    def make(self, name: str, **settings: Any) -> Operator:
        context = OperatorContext(
            target="experiences", generate=self.generate, score=self.score, count=self.count, seed=4
        )
        operator: Operator = load_plugin("operator", name).build(settings, context, name)
        return operator


def processed(operator: Operator, rows: Sequence[Mapping[str, Any]]) -> OperatorResult:
    async def run() -> OperatorResult:
        await operator.start()
        try:
            named = tuple(Row(key=f"r{number}", values=row) for number, row in enumerate(rows))
            return await operator.process(OperatorRequest(rows=named))
        finally:
            await operator.close()

    return asyncio.run(run())


def experience(said: int, truth: int = 5, group: str = "a", **more: Any) -> dict[str, Any]:
    text = f"First I add. Then I look. So {said}."
    own = {"prompt": "What is 2 and 3?", "response": text, "reward": float(said == truth), "ground_truth": str(truth)}
    return {**own, "group": group, **more}


def responses(result: OperatorResult) -> list[tuple[tuple[str, ...], str, float]]:
    return [(new.parents, new.values["response"], new.values["reward"]) for new in result.made]


def test_failed_responses_are_repaired_and_right_ones_are_left() -> None:
    """The first answer is wrong, the second right; the model sees the failed one and the hint."""
    host = Host(answers=lambda asked, call: f"So {4 + call % 2}.")
    found = processed(host.make("repair", attempts=3, hint="ground_truth"), [experience(6), experience(5)])
    assert [(("r0",), "So 5.", 1.0)] == responses(found)
    assert 2 == len(host.asked)
    assert "What is 2 and 3?" in host.asked[0]
    assert "So 6." in host.asked[0]
    assert "Feedback: 5" in host.asked[0]
    assert 2 == len(set(host.seeds))
    assert {"tokens": 14.0, "made": 1.0, "rejected": 1.0} == host.counts


def test_what_was_measured_of_the_old_response_is_not_of_the_new_one() -> None:
    """Tokens and log-probs are null where the row has them, and a new response has one turn."""
    row = experience(6, response_tokens=9, log_prob_mean=-0.5, turns=3, log_prob_min=-2.0, topic="sums")
    (new,) = processed(Host().make("repair"), [row]).made
    unknown = {"response_tokens": None, "log_prob_mean": None, "log_prob_min": None}
    assert {"response": "So 5.", "reward": 1.0, "turns": 1, **unknown} == new.values


def test_a_failure_costs_no_experience(caplog: pytest.LogCaptureFixture) -> None:
    """A model that fails is counted and logged, the row stays, and the others are not affected."""

    def answers(asked: str, call: int) -> str:
        if "So 7." in asked:
            raise RunError("no replica is free")
        return "So 5."

    host = Host(answers=answers)
    with caplog.at_level(logging.WARNING, "jackfield"):
        found = processed(host.make("repair", asked={"retries": 0}), [experience(7), experience(6)])
    assert (["r1"], {}) == ([new.parents[0] for new in found.made], dict(found.set_aside))
    assert 1.0 == host.counts["failed"]
    assert "no replica is free" in caplog.text


def test_a_lost_worker_is_no_fault_of_a_row() -> None:
    def answers(asked: str, call: int) -> str:
        raise WorkerLost("it died")

    with pytest.raises(WorkerLost):
        processed(Host(answers=answers).make("repair"), [experience(6)])


def test_what_is_made_at_the_deadline_is_kept() -> None:
    """An answer that never comes is cancelled; the other row has its repair."""
    host, cancelled = Host(), list[str]()

    async def generate(model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
        if "So 7." in messages[-1]["content"]:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append("So 7.")
                raise
        return GeneratedText(text="So 5.", tokens=7)

    host.generate = generate  # type: ignore[method-assign]
    rows = (Row(key="slow", values=experience(7)), Row(key="fast", values=experience(6)))
    request = OperatorRequest(rows=rows, deadline_seconds=0.5)
    found = asyncio.run(host.make("repair").process(request))
    assert [("fast",)] == [new.parents for new in found.made]
    assert ({}, ["So 7."], 1.0) == (dict(found.set_aside), cancelled, host.counts["failed"])


@pytest.mark.parametrize(
    "row", [{}, {"response": 3}, {"reward": "1"}, {"messages": ["text"]}, {"prompt": 3}], ids=lambda row: str([*row])
)
def test_rows_that_are_bad_are_set_aside(row: dict[str, Any]) -> None:
    bad = {**experience(6), **row} if row else {"response": "So 6."}
    found = processed(Host().make("repair"), [bad, experience(6)])
    assert ({"r0"}, [("r1",)]) == (set(found.set_aside), [new.parents for new in found.made])


def test_the_policy_can_simply_be_asked_once_more() -> None:
    host = Host()
    processed(host.make("repair", template="{prompt}"), [experience(6)])
    assert ["What is 2 and 3?"] == host.asked


def test_what_does_not_pass_is_not_made() -> None:
    host = Host(answers=lambda asked, call: "So 9.")
    assert () == processed(host.make("repair", attempts=4), [experience(6)]).made
    assert (4, 4.0) == (len(host.asked), host.counts["rejected"])


def test_an_improvement_can_be_asked_for() -> None:
    """A score of 1 is no improvement by 0.6 over a reward of a half."""
    gate = {"minimum": 0.0, "improvement": 0.6}
    rows = [experience(6), {**experience(6), "reward": 0.5}]
    assert [("r0",)] == [new.parents for new in processed(Host().make("repair", gate=gate), rows).made]


def test_seeds_follow_from_rows_and_not_from_their_order() -> None:
    hosts = [Host(), Host(), Host()]
    for host, rows in zip(hosts, ([0, 1], [1, 0], [0, 1]), strict=True):
        named = tuple(Row(key=f"r{number}", values=experience(6)) for number in rows)
        asyncio.run(host.make("repair", attempts=1).process(OperatorRequest(rows=named)))
    assert hosts[0].seeds == hosts[2].seeds
    assert sorted(hosts[0].seeds) == sorted(hosts[1].seeds)


def test_no_more_answers_are_asked_for_at_a_time_than_settings_say() -> None:
    host = Host()
    processed(host.make("repair", asked={"concurrency": 3}), [experience(6) for _ in range(20)])
    assert 3 == host.most


def test_successes_are_amplified_by_different_answers_only() -> None:
    said = ["First I add. Then I look. So 5.", "It is 5", "It is 5", "It is 6", "5"]
    host = Host(answers=lambda asked, call: said[call])
    found = processed(host.make("amplify", variants=5), [experience(5), experience(6)])
    assert ["It is 5", "5"] == [text for _, text, _ in responses(found)]


def test_variants_can_have_to_be_shorter() -> None:
    said = ["So, as far as I can see, it has to be 5", "It is 5"]
    host = Host(answers=lambda asked, call: said[call])
    found = processed(host.make("amplify", variants=2, longest=0.5), [experience(5)])
    assert ["It is 5"] == [text for _, text, _ in responses(found)]
    assert (1.0, 1.0) == (host.counts["made"], host.counts["rejected"])


def test_splices_can_have_to_improve_on_both_parents() -> None:
    rows = [experience(6), {**experience(5), "reward": 0.7}]
    rows[0]["response"], rows[1]["response"] = "One. So 6.", "Two. So 5."
    for improvement, count in ((0.3, 1), (0.4, 0)):
        gate = {"minimum": 0.0, "improvement": improvement}
        assert count == len(processed(Host().make("splice", attempts=40, gate=gate), rows).made)


def test_splices_join_two_responses_of_a_group() -> None:
    """The wrong beginning with the right end, which neither of them has; groups are not mixed."""
    rows = [experience(6), experience(5), experience(5, group="b")]
    rows[0]["response"], rows[1]["response"] = "One. Two. So 6.", "Three. Four. So 5."
    found = processed(Host().make("splice", attempts=40, keep=9), rows)
    texts = {text for _, text, _ in responses(found)}
    assert {"One. Four. So 5.", "One. So 5.", "One. Two. Four. So 5.", "One. Two. So 5."} == texts
    assert {("r0", "r1")} == {parents for parents, _, _ in responses(found)}
    again = processed(Host().make("splice", attempts=40, keep=9), rows)
    assert responses(found) == responses(again)


FUNCTIONS = """
import re

def truth(row):
    first, second = map(int, re.findall("[0-9]+", row["messages"][-1]["content"]))
    return first + second

def other(row):
    prompt = "What is 1 and 1?"
    return {"prompt": prompt, "ground_truth": "2", "messages": [{"role": "user", "content": prompt}]}

def verify(row, response):
    return response.endswith("!")

def broken(row, response):
    raise ValueError("no")
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    return str(tmp_path / "own.py")


def test_counterfactuals_change_a_number_and_its_truth(functions: str) -> None:
    def add(asked: str, call: int) -> str:
        return f"So {sum(map(int, re.findall('[0-9]+', asked)))}."

    host = Host(answers=add)
    found = processed(host.make("counterfactual", function=f"{functions}:truth", variants=3), [experience(5)])
    assert 3 == len(found.made)
    for new in found.made:
        first, second = map(int, re.findall("[0-9]+", new.values["prompt"]))
        assert 1 == (first != 2) + (second != 3), "one of them changed"
        assert str(first + second) == new.values["ground_truth"]
        assert 1.0 == new.values["reward"]


def test_counterfactuals_change_a_word(functions: str) -> None:
    """The verifier alone decides, so that nobody has to know the truth."""
    gate = {"by": "verifier", "verifier": f"{functions}:verify"}
    host = Host(answers=lambda asked, call: "9!" if "minus" in asked else "no")
    operator = host.make("counterfactual", change="words", words={"and": "minus", "is": "was"}, gate=gate, variants=8)
    found = processed(operator, [experience(5), {**experience(5), "prompt": "Iss 2+2?"}])
    assert {"What is 2 minus 3?", "What was 2 and 3?"} == set(host.asked)
    assert {"What is 2 minus 3?"} == {new.values["prompt"] for new in found.made}
    assert {None} == {new.values["ground_truth"] for new in found.made}


def test_counterfactuals_act_in_another_way_at_a_turn() -> None:
    """The conversation ends before the turn, and the same action is no new one."""
    said = ["look", "go", "look", "stay"]
    messages = [{"role": "user", "content": "start"}]
    for action in ("look", "go"):
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": f"you {action}"}]
    host = Host(answers=lambda asked, call: said[call % 4] + " 5")
    row = experience(5, messages=[{**each, "content": f"{each['content']} 5"} for each in messages])
    found = processed(host.make("counterfactual", change="turn", variants=12, attempts=4), [row]).made
    assert {1, 3} == {len(new.values["messages"]) for new in found}
    for new in found:
        kept = new.values["messages"]
        assert row["messages"][: len(kept)] == kept
        assert row["messages"][len(kept)]["content"] != new.values["response"]
        assert kept[-1]["content"] == new.values["prompt"]
    assert () == processed(host.make("counterfactual", change="turn"), [experience(5)]).made


def test_counterfactuals_of_a_function_have_its_columns(functions: str) -> None:
    host = Host(answers=lambda asked, call: "So 2.")
    operator = host.make("counterfactual", change="function", function=f"{functions}:other")
    (new,) = processed(operator, [experience(5)]).made
    assert ("What is 1 and 1?", "2", "So 2.") == tuple(
        new.values[name] for name in ("prompt", "ground_truth", "response")
    )
    assert ["What is 1 and 1?"] == host.asked


@pytest.mark.parametrize(("by", "passes"), [("verifier", ["9!", "5!"]), ("both", ["5!"])])
def test_a_verifier_is_a_gate(functions: str, by: str, passes: list[str]) -> None:
    said = ["5", "9!", "5!"]
    host = Host(answers=lambda asked, call: said[call])
    gate = {"by": by, "verifier": f"{functions}:verify"}
    found = processed(host.make("repair", attempts=3, keep=3, gate=gate), [experience(6)])
    assert passes == [text for _, text, _ in responses(found)]


def test_a_verifier_that_fails_can_set_the_row_aside(functions: str) -> None:
    gate = {"by": "verifier", "verifier": f"{functions}:broken"}
    found = processed(Host().make("repair", gate=gate, on_failure="set_aside"), [experience(6), experience(5)])
    assert {"r0"} == set(found.set_aside)
    assert "no" in found.set_aside["r0"]


def test_long_responses_become_short_ones_with_the_same_result() -> None:
    """The first try is too long, the second wrong, the third right."""
    said = ["word " * 90 + "5", "6", "short, so 5"]
    host = Host(answers=lambda asked, call: said[call])
    row = experience(5, response="word " * 100 + "So 5.")
    found = processed(host.make("summarize", longer_than=100, attempts=3), [row, experience(5)])
    assert [(("r0",), "short, so 5", 1.0)] == responses(found)


def test_the_middle_of_a_conversation_becomes_a_summary() -> None:
    messages = [{"role": "user", "content": "Add 2 and 3."}]
    messages += [{"role": role, "content": f"step {n} " * 10} for n in range(4) for role in ("assistant", "user")]
    host = Host(answers=lambda asked, call: "They counted." if "middle of a longer" in asked else "So 5.")
    row = experience(5, messages=messages)
    (new,) = processed(host.make("summarize", of="messages", longer_than=50, keep_last=1), [row]).made
    kept = new.values["messages"]
    assert 2 == len(kept)
    assert "Add 2 and 3." in kept[0]["content"]
    assert "They counted." in kept[0]["content"]
    assert messages[-1] == kept[1]
    assert ("So 5.", 1.0) == (new.values["response"], new.values["reward"])


def test_a_summary_can_keep_the_answer() -> None:
    """No answer is asked for; the old one is scored beside the shorter conversation."""
    messages = [{"role": "user", "content": "Add 2 and 3."}]
    messages += [{"role": role, "content": f"step {n} " * 10} for n in range(4) for role in ("assistant", "user")]
    scored = list[Mapping[str, Any]]()
    host = Host(answers=lambda asked, call: "They counted.")

    async def score(values: Mapping[str, Any], response: str) -> float:
        scored.append(values)
        return float(response.endswith("So 5."))

    host.score = score  # type: ignore[method-assign]
    settings = {"of": "messages", "answer": "old", "longer_than": 50}
    rows = [experience(said, messages=messages, response_tokens=9) for said in (5, 6)]
    (new,) = processed(host.make("summarize", **settings, attempts=1), rows).made
    assert (rows[0]["response"], 1.0) == (new.values["response"], new.values["reward"])
    assert [3, 3] == [len(values["messages"]) for values in scored]
    assert 2 == len(host.asked)


def test_pairs_need_a_good_response_and_are_no_samples() -> None:
    rows = [experience(6), {**experience(4), "reward": 0.5}]
    assert () == processed(Host().make("preference_pairs", minimum=0.6), rows).made
    (new,) = processed(Host().make("preference_pairs", minimum=0.5), rows).made
    assert (0.5, None) == (new.values["margin"], new.values["response"])


@pytest.mark.parametrize(("pairs", "margins"), [("best_worst", [1.0]), ("all", [1.0, 0.5, 0.5])])
def test_pairs_of_a_group_have_the_better_response_first(pairs: str, margins: list[float]) -> None:
    rows = [experience(6), experience(5), {**experience(4), "reward": 0.5}, experience(5, group="b")]
    found = processed(Host().make("preference_pairs", pairs=pairs), rows)
    assert sorted(margins) == sorted(new.values["margin"] for new in found.made)
    for new in found.made:
        better, worse = (rows[int(key[1:])] for key in new.parents)
        assert (better["response"], worse["response"]) == (new.values["chosen"], new.values["rejected"])
        assert better["reward"] > worse["reward"]
        assert [{"role": "user", "content": "What is 2 and 3?"}] == new.values["prompt"]


def test_pairs_of_turns_begin_where_conversations_part() -> None:
    def conversation(*said: str) -> list[dict[str, str]]:
        roles = ("user", "assistant", "user", "assistant")
        return [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]

    rows = [
        {"reward": 1.0, "group": "a", "conversation": conversation("hi", "hello", "2+2?", "4")},
        {"reward": 0.0, "group": "a", "conversation": conversation("hi", "hello", "2+2?", "5")},
        {"reward": 0.0, "group": "b", "conversation": conversation("hi", "hello")},
        {"reward": 1.0, "group": "b", "conversation": conversation("ho", "hello")},
    ]
    (new,) = processed(Host().make("preference_pairs", of="turns"), rows).made
    assert rows[0]["conversation"][:3] == new.values["prompt"]
    assert ("4", "5") == (new.values["chosen"][0]["content"], new.values["rejected"][0]["content"])


def test_pairs_of_turns_do_not_contradict_each_other() -> None:
    """Turns are compared by the mean reward of all conversations that have them, which is computed again here."""
    told = {("a", "c"): 1.0, ("a", "d"): 0.0, ("b", "e"): 0.4, ("b", "f"): 0.2}
    rows = [
        {"reward": reward, "group": "g", "conversation": [
            {"role": "user", "content": "hi"}, {"role": "assistant", "content": first},
            {"role": "user", "content": "and?"}, {"role": "assistant", "content": second},
        ]}
        for (first, second), reward in told.items()
    ]  # fmt: skip
    found = processed(Host().make("preference_pairs", of="turns", pairs="all"), rows).made
    pairs = {
        (new.values["chosen"][0]["content"], new.values["rejected"][0]["content"]): new.values["margin"]
        for new in found
    }
    assert pytest.approx({("a", "b"): 0.5 - 0.3, ("c", "d"): 1.0, ("e", "f"): 0.2}) == pairs
    first = next(new for new in found if len(new.values["prompt"]) == 1)
    assert ("r0", "r2") == first.parents


def test_responses_to_other_prompts_make_no_pair() -> None:
    """An operator before may have made a row of another task in the same group."""
    rows = [experience(6), {**experience(5), "prompt": "What is 1 and 4?"}]
    assert () == processed(Host().make("preference_pairs"), rows).made


def test_a_model_at_an_address_is_asked(tmp_path: Path) -> None:
    """By a real request, which a server on loopback answers."""
    address = loopback_server("jackfield_operator_synthesis.fake_model")

    async def run() -> Sequence[NewRow]:
        http = AiohttpClient()
        host = Host()
        context = OperatorContext(http=http, score=host.score, count=host.count)
        settings = {"asked": {"url": address, "model": "fake", "input_price": 1.0, "output_price": 2.0}}
        operator: Operator = load_plugin("operator", "repair").build(settings, context, "repair")
        await operator.start()
        try:
            found = await operator.process(OperatorRequest(rows=(Row(key="r0", values=experience(6)),)))
        finally:
            await operator.close()
            await http.close()
        assert {} == dict(found.set_aside)
        assert host.counts["cost"] == pytest.approx((90 * 1.0 + 10 * 2.0) / 1e6)
        assert ("reward",) == operator.uses
        return found.made

    (new,) = asyncio.run(run())
    assert "So 5." == new.values["response"]


@pytest.mark.parametrize(
    ("name", "settings", "where"),
    [
        ("repair", {"gate": {"by": "verifier"}}, "gate.verifier"),
        ("repair", {"gate": {"verifier": "x.py:f"}}, "gate.verifier"),
        ("repair", {"gate": {"by": "both", "verifier": "nothing.py:f"}}, "gate.verifier"),
        ("splice", {"keep": 5, "attempts": 2}, "keep"),
        ("counterfactual", {"function": "nothing.py:f"}, "function"),
        ("counterfactual", {}, "function"),
        ("counterfactual", {"change": "turn", "function": "nothing.py:f"}, "function"),
        ("counterfactual", {"change": "turn", "words": {"a": "b"}}, "words"),
        ("counterfactual", {"change": "words", "gate": {"by": "verifier", "verifier": "x.py:f"}}, "words"),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, settings: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Host().make(name, **settings)
    assert str(caught.value.where).endswith(where)
