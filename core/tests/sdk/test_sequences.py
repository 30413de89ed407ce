"""The sequence builder: what it asks, what it records, its policies, and what it refuses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from jackfield.abc.agent import AgentContext, AgentSequence
from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield.errors import AgentError
from jackfield.sdk.sequences import SequenceBuilder, sequences_of
from jackfield_chats import (
    FAMILIES,
    TOOLS,
    Family,
    ScriptedModel,
    make_tokenizer,
    render,
    result,
    said,
    spoken,
    user,
)
from jackfield_testing import in_loop, refused

QWEN = FAMILIES["qwen3"]
CHATML = FAMILIES["qwen2_5"]
END = "<|im_end|>"
QUESTION = user("What is it?")


class Talk:
    """A model with its script, and a builder that asks it."""

    def __init__(self, *answers: str, family: Family = CHATML, context: Mapping[str, Any] | None = None, **how: Any):
        self.tokenizer = make_tokenizer(family)
        self.model = ScriptedModel(self.tokenizer, *answers)
        self.metrics: Counter[str] = Counter()
        given: dict[str, Any] = {"generate": self.model.generate, "tokenizer": self.tokenizer, **(context or {})}
        self.context = AgentContext(metric=self._metric, **given)
        sampling = how.pop("sampling", {"max_new_tokens": 200, "seed": 7})
        self.builder = SequenceBuilder(self.context, sampling, how.pop("messages", [QUESTION]), **how)

    def _metric(self, name: str, number: float) -> None:
        self.metrics[name] += int(number)

    def text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def sequences(self, *others: SequenceBuilder) -> tuple[AgentSequence, ...]:
        return sequences_of([self.builder, *others])

    def mine(self, sequence: AgentSequence) -> list[str]:
        """Return the texts of the tokens with mask 1, run by run."""
        runs: list[list[int]] = [[]]
        for token, mask in zip(sequence.response_ids, sequence.response_mask, strict=True):
            if mask:
                runs[-1].append(token)
            elif runs[-1]:
                runs.append([])
        return [self.text(run) for run in runs if run]


@in_loop
async def test_a_conversation_is_one_sequence_of_what_the_model_saw_and_said() -> None:
    talk = Talk("It is so." + END, "Yes!" + END)
    builder = talk.builder
    answer = await builder.generate()
    assert ("It is so.", True, "stop") == (answer.text, answer.closed, answer.finish_reason)
    builder.reward(0.5)
    assert builder.append_turn([user("Really?")])
    await builder.generate()
    builder.reward(1.0)
    builder.reward(0.25)
    (sequence,) = talk.sequences()
    first, second = talk.model.requests
    assert first.prompt_ids == sequence.prompt_ids == talk.tokenizer.encode_chat([QUESTION])
    whole = (*sequence.prompt_ids, *sequence.response_ids)
    assert second.prompt_ids == whole[: len(second.prompt_ids)]
    assert render(talk.tokenizer, [QUESTION, said(CHATML, "It is so."), user("Really?")]) + "Yes!" + END == talk.text(
        whole
    )
    assert ["It is so." + END, "Yes!" + END] == talk.mine(sequence)
    of_tokens = zip(sequence.response_mask, sequence.response_log_probs, sequence.weight_versions, strict=True)
    assert {(1, -0.5, 1), (1, -0.5, 2), (0, 0.0, -1)} == set(of_tokens)
    assert sequence.token_rewards is not None
    rewarded = {place: reward for place, reward in enumerate(sequence.token_rewards) if reward}
    assert {len(talk.model.given[0]) - 1: 0.5, len(sequence.response_ids) - 1: 1.25} == rewarded
    assert [QUESTION, {"role": "assistant", "content": "It is so."}, user("Really?")] == builder.messages


@in_loop
async def test_inline_results_continue_the_answer() -> None:
    """Search-R1 and ReTool: the model stops at a text, a result is put behind it, and the model goes on."""
    script = ("I add: <tool>1+1</tool> never sampled", "so it is 2." + END, "Bye" + END)
    talk = Talk(*script)
    builder = talk.builder
    answer = await builder.generate(stop=["</tool>"])
    assert ("I add: <tool>1+1</tool>", False) == (answer.text, answer.closed)
    assert builder.append_text("\n<result>2<|im_end|></result>\n")
    await builder.generate(stop=["</tool>"])
    whole_turn = "I add: <tool>1+1</tool>\n<result>2<|im_end|></result>\nso it is 2."
    assert builder.append_turn([user("Bye")])
    assert {"role": "assistant", "content": whole_turn} == builder.messages[1]
    await builder.generate()
    (sequence,) = talk.sequences()
    assert ["I add: <tool>1+1</tool>", "so it is 2." + END, "Bye" + END] == talk.mine(sequence)
    end = talk.tokenizer.end_token_ids[0]
    assert 3 == sequence.response_ids.count(end), "of two answers and of the user's turn"
    for request, given in zip(talk.model.requests, talk.model.given, strict=True):
        whole = (*sequence.prompt_ids, *sequence.response_ids)
        seen = len(request.prompt_ids)
        assert (request.prompt_ids, given) == (whole[:seen], whole[seen : seen + len(given)])
    assert ("</tool>",) == talk.model.requests[0].sampling.stop
    assert () == talk.model.requests[2].sampling.stop


@in_loop
async def test_an_answer_that_was_cut_is_ended_before_the_next_turn() -> None:
    talk = Talk("It is so and so." + END, "Yes" + END)
    answer = await talk.builder.generate(max_new_tokens=3)
    assert ("length", False) == (answer.finish_reason, answer.closed)
    talk.builder.append_turn([user("And?")])
    await talk.builder.generate()
    (sequence,) = talk.sequences()
    assert (
        talk.text(sequence.response_ids)
        == render(talk.tokenizer, [QUESTION, said(CHATML, answer.text), user("And?")]).removeprefix(
            render(talk.tokenizer, [QUESTION])
        )
        + "Yes"
        + END
    )
    assert [answer.text, "Yes" + END] == talk.mine(sequence)


@pytest.mark.parametrize("ends", ["<|observation|>", "<|user|>", "<|endoftext|>"])
@pytest.mark.parametrize("role", ["tool", "user"])
@in_loop
async def test_a_header_that_the_model_wrote_itself_is_not_repeated(ends: str, role: str) -> None:
    """GLM's models end a turn with the header of the next; if it is another one, the right one follows."""
    family = FAMILIES["glm4"]
    talk = Talk("\nIt is." + ends, "\nYes<|user|>", family=family)
    await talk.builder.generate()
    talk.builder.append_turn([result("3") if role == "tool" else user("3")], answer=said(family, "It is."))
    await talk.builder.generate()
    header = "<|observation|>\n<tool_response>\n3\n</tool_response>" if role == "tool" else "<|user|>\n3"
    kept = "" if header.startswith(ends) else ends
    (sequence,) = talk.sequences()
    assert f"\nIt is.{kept}{header}<|assistant|>\nYes<|user|>" == talk.text(sequence.response_ids)


async def tool_loop(talk: Talk, family: Family) -> None:
    """Two calls with thoughts, an answer without one, and another question."""
    call = said(family, thought="hm, well", calls=[{"a": 1}])
    for message in (call, call):
        await talk.builder.generate()
        assert talk.builder.append_turn([result("3")], answer=message)
    await talk.builder.generate()
    talk.builder.append_turn([user("And then?")], answer=said(family, "It is 3."))


def loop_script(family: Family) -> list[str]:
    tokenizer = make_tokenizer(family)
    call = spoken(tokenizer, family, said(family, thought="hm, well", calls=[{"a": 1}]))
    return [
        call,
        call,
        spoken(tokenizer, family, said(family, "It is 3.")),
        spoken(tokenizer, family, said(family, "So.")),
    ]


@pytest.mark.parametrize("name", ["qwen3", "glm4", "gpt_oss"])
@in_loop
async def test_thoughts_stay_in_a_tool_loop_and_are_missed_at_the_next_question(name: str) -> None:
    """The last answer has no thought, and the template drops those of the calls before it."""
    family = FAMILIES[name]
    talk = Talk(*loop_script(family), family=family, tools=TOOLS)
    with refused("data.not-append-only"):
        await tool_loop(talk, family)
    assert 3 == talk.builder.turns
    (sequence,) = talk.sequences()
    assert 3 == len(talk.mine(sequence))


@pytest.mark.parametrize("name", ["qwen3", "glm4", "gpt_oss"])
@in_loop
async def test_a_fork_begins_with_what_the_template_makes_of_the_conversation(name: str) -> None:
    family = FAMILIES[name]
    sampling = {"max_new_tokens": 400}
    talk = Talk(*loop_script(family), family=family, tools=TOOLS, on_template_change="fork", sampling=sampling)
    await tool_loop(talk, family)
    await talk.builder.generate()
    first, second = talk.sequences()
    assert (None, None, 0, "template") == (first.parent, first.relation, second.parent, second.relation)
    assert (0, 1) == (first.step_id, second.step_id)
    assert second.prompt_ids == talk.tokenizer.encode_chat(talk.builder.messages, tools=TOOLS)
    assert "hm, well" in talk.text(first.response_ids)
    assert "hm, well" not in talk.text(second.prompt_ids)
    assert {"template_forks": 1} == talk.metrics
    given = [*map(talk.text, talk.model.given)]
    assert given == [*talk.mine(first), *talk.mine(second)], "each token is trained once"
    assert talk.model.requests[3].prompt_ids == second.prompt_ids


@in_loop
async def test_keep_goes_on_with_what_the_model_saw() -> None:
    talk = Talk(*loop_script(QWEN), family=QWEN, tools=TOOLS, on_template_change="keep")
    await tool_loop(talk, QWEN)
    await talk.builder.generate()
    (sequence,) = talk.sequences()
    assert 2 == talk.text(sequence.response_ids).count("hm, well")
    assert 4 == len(talk.mine(sequence))
    assert {} == talk.metrics


@in_loop
async def test_a_thought_that_the_message_lacks_is_found_in_the_answer() -> None:
    """The agent gives the answer without the thought that the model wrote."""
    talk = Talk("<think>\nhm\n</think>\n\nIt is." + END, family=QWEN)
    await talk.builder.generate()
    with refused("data.not-append-only"):
        talk.builder.append_turn([user("And?")], answer=said(QWEN, "It is."))
    kept = Talk("<think>\nhm\n</think>\n\nIt is." + END, "Yes" + END)  # its template drops nothing
    await kept.builder.generate()
    assert kept.builder.append_turn([user("And?")], answer=said(CHATML, "It is."))


@in_loop
async def test_a_reward_after_a_fork_is_for_the_turn_before_it() -> None:
    talk = Talk("<think>\nhm\n</think>\n\nIt is." + END, "Yes" + END, family=QWEN, on_template_change="fork")
    await talk.builder.generate()
    talk.builder.append_turn([user("And?")])
    talk.builder.reward(1.0)
    await talk.builder.generate()
    first, second = talk.sequences()
    assert (1.0, None) == ((first.token_rewards or (0.0,))[-1], second.token_rewards)


# -- room


@pytest.mark.parametrize("policy", ["truncate", "end"])
@in_loop
async def test_messages_without_room_are_cut_or_left_out_and_counted(policy: Any) -> None:
    long = "it is so. " * 40
    prompt = len(make_tokenizer(CHATML).encode_chat([QUESTION]))
    talk = Talk("So." + END, "Yes" + END, context={"max_model_len": prompt + 60}, on_overflow=policy)
    await talk.builder.generate()
    messages = [user("short"), user(long)]
    whole = len(talk.tokenizer.encode_turn(messages))
    goes_on = talk.builder.append_turn(messages)
    assert (policy == "truncate") == goes_on
    if not goes_on:
        assert whole == talk.metrics["cut_tokens"]
        assert [QUESTION] == talk.builder.messages
        assert 57 >= talk.builder.room
        with refused("agent.failed"):
            await talk.builder.generate()
        return
    assert "short" == talk.builder.messages[2]["content"]
    assert talk.builder.messages[3]["content"].endswith("(cut)")
    assert long.startswith(talk.builder.messages[3]["content"].removesuffix("\n… (cut)"))
    assert 1 <= talk.builder.room <= 8, "as much as fits"
    await talk.builder.generate()
    (sequence,) = talk.sequences()
    inserted = sequence.response_mask.count(0)
    assert whole - inserted == pytest.approx(talk.metrics["cut_tokens"], abs=1)
    assert len(sequence.prompt_ids) + len(sequence.response_ids) <= prompt + 60


@in_loop
async def test_several_long_messages_are_all_cut() -> None:
    prompt = len(make_tokenizer(CHATML).encode_chat([QUESTION]))
    talk = Talk("So." + END, context={"max_model_len": prompt + 90})
    await talk.builder.generate()
    assert talk.builder.append_turn([user("it is so. " * 40), user("is it so? " * 30)])
    assert all(message["content"].endswith("(cut)") for message in talk.builder.messages[2:])


@in_loop
async def test_a_fork_without_room_is_cut_too() -> None:
    script = ("<think>\nhm\n</think>\n\nIt is." + END, "Yes" + END)
    talk = Talk(*script, family=QWEN, context={"max_model_len": 120}, on_template_change="fork")
    await talk.builder.generate()
    assert talk.builder.append_turn([user("it is so. " * 40)])
    assert talk.metrics["cut_tokens"] > 0
    await talk.builder.generate()
    _, second = talk.sequences()
    assert len(second.prompt_ids) < 120
    ended = Talk(*script, family=QWEN, context={"max_model_len": 120}, on_template_change="fork", on_overflow="end")
    await ended.builder.generate()
    assert not ended.builder.append_turn([user("it is so. " * 40)])
    assert 1 == len(ended.sequences())
    assert ended.metrics["cut_tokens"] > 0


@pytest.mark.parametrize("policy", ["truncate", "end"])
@in_loop
async def test_text_without_room_is_cut_or_left_out(policy: Any) -> None:
    prompt = len(make_tokenizer(CHATML).encode_chat([QUESTION]))
    talk = Talk("So", "Yes" + END, context={"max_model_len": prompt + 12}, on_overflow=policy)
    await talk.builder.generate()
    text = "it is so. " * 9
    goes_on = talk.builder.append_text(text)
    inserted = len(talk.tokenizer.encode_text(text))
    assert (policy == "truncate") == goes_on
    left_out = inserted if not goes_on else inserted - (12 - len(talk.model.given[0]) - 1)
    assert {"cut_tokens": left_out} == talk.metrics
    if goes_on:
        assert (1, 1) == (talk.builder.room, talk.builder.left)


@in_loop
async def test_tokens_are_for_all_answers_together() -> None:
    talk = Talk("It is so." + END, "It is so." + END, "never", sampling={"max_new_tokens": 9})
    first = await talk.builder.generate()
    assert 9 == talk.model.requests[0].sampling.max_new_tokens
    talk.builder.append_turn([user("And?")])
    assert 9 - len(first.token_ids) == talk.builder.left
    second = await talk.builder.generate()
    assert ("length", 0) == (second.finish_reason, talk.builder.left)
    assert not talk.builder.append_turn([user("And?")])
    with refused("agent.failed"):
        await talk.builder.generate()
    (sequence,) = talk.sequences()
    assert (9, "length") == (sum(sequence.response_mask), sequence.finish_reason)


# -- further sequences


@in_loop
async def test_branches_go_on_alone_and_train_on_nothing_twice() -> None:
    talk = Talk("It is so." + END, "Left" + END, "Right" + END)
    await talk.builder.generate()
    one, other = talk.builder.branch(name="left"), talk.builder.branch(name="right")
    for branch in (one, other):
        assert branch.append_turn([user("Which?")])
        await branch.generate()
    trunk, left, right = talk.sequences(one, other)
    assert ["It is so." + END] == talk.mine(trunk)
    assert (["Left" + END], ["Right" + END]) == (talk.mine(left), talk.mine(right))
    assert [(0, "branch", "left"), (0, "branch", "right")] == [(s.parent, s.relation, s.name) for s in (left, right)]
    assert left.prompt_ids == (*trunk.prompt_ids, *trunk.response_ids)
    assert [QUESTION] == talk.builder.messages
    assert 200 - len(talk.model.given[0]) - len(talk.model.given[1]) == one.left


@in_loop
async def test_no_two_requests_of_a_rollout_share_random_numbers() -> None:
    talk = Talk(*["So." + END] * 8)
    await talk.builder.generate()
    branches = [talk.builder.branch(), talk.builder.branch()]
    branches += [branches[0].branch(), talk.builder.sub_agent([QUESTION], name="a")]
    branches += [talk.builder.sub_agent([QUESTION], name="a")]
    for branch in (talk.builder, *branches[:3]):
        branch.append_turn([user("And?")])
    for branch in (talk.builder, *branches):
        await branch.generate()
    seeds = [request.sampling.seed for request in talk.model.requests]
    assert 7 == seeds[0]
    assert len(seeds) == len(set(seeds)) == 7
    assert len({request.request_id for request in talk.model.requests}) == 7
    again = Talk(*["So." + END] * 2)
    await again.builder.generate()
    again.builder.append_turn([user("And?")])
    await again.builder.generate()
    assert seeds[1] == again.model.requests[1].sampling.seed, "the same when the run is repeated"


@in_loop
async def test_a_branch_of_a_long_conversation_is_no_prompt_of_the_data() -> None:
    prompt = len(make_tokenizer(CHATML).encode_chat([QUESTION]))
    talk = Talk("It is so." + END, "Yes" + END, context={"max_prompt_tokens": prompt})
    await talk.builder.generate()
    talk.builder.append_turn([user("Why is it so?")])
    await talk.builder.branch().generate()
    with refused("data.prompt-too-long", prompt - 1):
        Talk(context={"max_prompt_tokens": prompt - 1})


@in_loop
async def test_sub_agents_and_compaction_have_parents() -> None:
    talk = Talk("It is so." + END, "I search." + END, "Short" + END)
    await talk.builder.generate()
    helper = talk.builder.sub_agent([user("Search.")], name="helper", tools=TOOLS)
    await helper.generate()
    talk.builder.compact([user("Summary.")])
    await talk.builder.generate()
    _, compacted, searched = talk.sequences(helper)
    assert (0, "compaction", 1) == (compacted.parent, compacted.relation, compacted.step_id)
    assert (0, "sub_agent", "helper") == (searched.parent, searched.relation, searched.name)
    assert searched.prompt_ids == talk.tokenizer.encode_chat([user("Search.")], tools=TOOLS)
    assert compacted.prompt_ids == talk.tokenizer.encode_chat([user("Summary.")])
    assert [user("Summary.")] == talk.builder.messages
    assert 200 - sum(map(len, talk.model.given)) + len(talk.model.given[1]) == talk.builder.left


@in_loop
async def test_a_sequence_without_an_answer_is_left_out_and_its_parent_takes_its_place() -> None:
    talk = Talk("It is so." + END, "Short" + END, "Yes" + END)
    await talk.builder.generate()
    talk.builder.compact([user("One.")])
    talk.builder.compact([user("Two.")])
    await talk.builder.generate()
    _, last = talk.sequences()
    assert (0, "compaction", 2) == (last.parent, last.relation, last.step_id)
    child = talk.builder.branch()
    assert 2 == len(talk.sequences(child, talk.builder)), "a builder that is named twice counts once"
    child.append_turn([user("And?")])
    await child.generate()
    (alone,) = sequences_of([child])
    assert (None, None) == (alone.parent, alone.relation), "its parent is not among the builders"


# -- what goes wrong


@in_loop
async def test_after_an_aborted_answer_nothing_follows() -> None:
    class Aborted(ScriptedModel):
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            kept = (await super().generate(request)).token_ids[:2]
            how: Any = {"log_probs": (-0.5,) * len(kept), "weight_versions": (1,) * len(kept)}
            return GenerateResult(request_id=request.request_id, token_ids=kept, finish_reason="abort", **how)

    talk = Talk()
    model = Aborted(talk.tokenizer, "It is so." + END)
    context = AgentContext(generate=model.generate, tokenizer=talk.tokenizer)
    builder = SequenceBuilder(context, {}, [QUESTION])
    await builder.generate()
    assert not builder.may_continue
    assert not builder.append_turn([user("And?")])
    assert not builder.append_text("so")
    assert not builder.branch().may_continue
    with refused("agent.failed"):
        await builder.generate()
    (sequence,) = sequences_of([builder])
    assert (2, "abort") == (len(sequence.response_ids), sequence.finish_reason)


@in_loop
async def test_an_abort_before_the_first_token_yields_no_sequence() -> None:
    async def generate(request: GenerateRequest) -> GenerateResult:
        empty: Any = {"token_ids": (), "log_probs": (), "weight_versions": ()}
        return GenerateResult(request_id=request.request_id, finish_reason="abort", **empty)

    context = AgentContext(generate=generate, tokenizer=make_tokenizer(CHATML))
    builder = SequenceBuilder(context, {}, [QUESTION])
    assert "" == (await builder.generate()).text
    assert () == sequences_of([builder])


@in_loop
async def test_a_cancelled_call_leaves_the_builder_as_it_was() -> None:
    started, talk = asyncio.Event(), Talk("It is so." + END)

    async def forever(request: GenerateRequest) -> GenerateResult:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    context = AgentContext(generate=forever, tokenizer=talk.tokenizer)
    builder = SequenceBuilder(context, {}, [QUESTION])
    task = asyncio.ensure_future(builder.generate())
    await started.wait()
    for misuse in (builder.generate(), _call(builder.compact, [QUESTION]), _call(builder.append_text, "so")):
        with refused("agent.failed"):
            await misuse
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert () == sequences_of([builder])
    builder.context = talk.context
    assert "It is so." == (await builder.generate()).text


async def _call(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


@pytest.mark.parametrize("counts", [(2, 1, 2), (2, 2, 1), (300, 300, 300)])
@in_loop
async def test_answers_of_wrong_lengths_are_refused(counts: tuple[int, int, int]) -> None:
    async def generate(request: GenerateRequest) -> GenerateResult:
        tokens, log_probs, versions = counts
        values: Any = {"token_ids": (9,) * tokens, "log_probs": (-1.0,) * log_probs, "weight_versions": (1,) * versions}
        return GenerateResult(request_id=request.request_id, finish_reason="stop", **values)

    context = AgentContext(generate=generate, tokenizer=make_tokenizer(CHATML))
    builder = SequenceBuilder(context, {"max_new_tokens": 200}, [QUESTION])
    with refused("agent.failed"):
        await builder.generate()
    assert () == sequences_of([builder])


@in_loop
async def test_calls_out_of_turn_are_refused() -> None:
    talk = Talk("It is so." + END, "Yes" + END)
    builder = talk.builder
    for call in (lambda: builder.append_turn([user("And?")]), lambda: builder.reward(1.0)):
        with refused("agent.failed"):
            call()
    await builder.generate()
    for call in (
        lambda: builder.append_text("so"),  # behind the end token
        lambda: builder.append_turn([]),
        lambda: builder.append_turn("And?"),  # type: ignore[arg-type]
        lambda: builder.append_turn(user("And?")),  # type: ignore[arg-type]
        lambda: builder.append_turn([{"content": "And?"}]),
        lambda: builder.compact([]),
    ):
        with refused("agent.failed"):
            call()
    with refused("agent.failed"):
        await builder.generate()  # nothing was appended
    builder.append_turn([user("And?")])
    with refused("agent.failed"):
        builder.append_turn([user("And?")])
    assert "Yes" == (await builder.generate()).text
    assert 1 == len(talk.sequences())


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({"messages": []}, "agent.failed"),
        ({"messages": ["What is it?"]}, "agent.failed"),
        ({"sampling": {"temprature": 1.0}}, "agent.failed"),
        ({"sampling": {"temperature": -1.0}}, "rollout.request"),
        ({"sampling": {"max_new_tokens": "many"}}, "rollout.request"),
        ({"on_template_change": "ignore"}, "agent.failed"),
        ({"on_overflow": "drop"}, "agent.failed"),
    ],
)
def test_bad_settings_are_refused_before_the_model_is_asked(how: Mapping[str, Any], code: str) -> None:
    with refused(code):
        Talk(**how)


@in_loop
async def test_images_are_not_dropped_silently() -> None:
    """A template that does not show the parts of a message refuses them."""
    image = {"role": "user", "content": [{"type": "text", "text": "See"}]}
    talk = Talk("It is so." + END)
    await talk.builder.generate()
    with refused("data.malformed"):
        talk.builder.append_turn([image])


@in_loop
async def test_the_error_names_the_task() -> None:
    talk = Talk("It is so." + END, task="gsm8k/7")
    with pytest.raises(AgentError) as caught:
        talk.builder.reward(1.0)
    assert "task gsm8k/7" == caught.value.where


@in_loop
async def test_one_stop_text_is_one_text() -> None:
    talk = Talk("some eggs" + END)
    await talk.builder.generate(stop="eggs")
    assert ("eggs",) == talk.model.requests[0].sampling.stop


@in_loop
async def test_a_branch_after_an_answer_that_is_not_there_is_refused() -> None:
    talk = Talk("one" + END)
    await talk.builder.generate()
    for turn in (0, -1, 2):
        with refused("agent.failed"):
            talk.builder.branch(turn=turn)


@in_loop
async def test_parents_come_before_their_children_in_whatever_order_they_are_given() -> None:
    talk = Talk("one" + END, "two" + END)
    await talk.builder.generate()
    child = talk.builder.sub_agent([user("And you?")], name="helper")
    await child.generate()
    first, second = sequences_of([child, talk.builder])
    assert (None, 0, "helper") == (first.parent, second.parent, second.name)


@in_loop
async def test_half_surrogates_of_a_tool_become_tokens() -> None:
    talk = Talk("one" + END, "two" + END)
    await talk.builder.generate()
    assert talk.builder.append_turn([user("a\ud800b")])
    await talk.builder.generate()
    assert "a?b" in talk.text(talk.model.requests[1].prompt_ids)
