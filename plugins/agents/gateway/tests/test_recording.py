"""Requests of OpenAI's own client become sequences with the exact tokens that the model saw and said."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jackfield.errors import RolloutError

USER = {"role": "user", "content": "first"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'


def client(served: Any, rollout: Any, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.url, api_key=rollout.key, max_retries=0, **options)


async def chat(api: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    return await api.chat.completions.create(model="any", messages=messages, **options)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def shape(sequences: Any) -> list[tuple[int | None, str | None]]:
    return [(sequence.parent, sequence.relation) for sequence in sequences]


def test_turns_that_extend_each_other_are_one_sequence(serve: Any, exact: Any) -> None:
    """Three turns of a chat, whose answers the client sends back as it got them."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            messages: list[Any] = [{"role": "system", "content": "Be brief."}, USER]
            for text in ("second", "third", None):
                answer = await chat(api, messages)
                messages += [answer.choices[0].message, user(text)] if text else []
            assert ["answer 3", "stop"] == [answer.choices[0].message.content, answer.choices[0].finish_reason]
            sequences = rollout.recording.sequences()
            assert [(None, None)] == shape(sequences)
            exact(served.model, sequences)
            whole = served.tokenizer.decode((*sequences[0].prompt_ids, *sequences[0].response_ids), False)
            assert whole.endswith("<|im_start|>user\nthird<|im_end|>\n<|im_start|>assistant\nanswer 3<|im_end|>")
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
                len(served.model.asked[-1].prompt_ids),
                len(served.model.said[-1]),
            )

    asyncio.run(run())


@pytest.mark.parametrize("form", ["object", "written", "null"])
def test_tool_calls_go_out_parsed_and_come_back_as_the_tokens_that_were_said(serve: Any, exact: Any, form: str) -> None:
    """However the client writes the answer, it is not rendered again."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            served.model.answers = {"user\nfirst": CALL}
            answer = (await chat(api, [USER], tools=[TOOL])).choices[0]
            call = answer.message.tool_calls[0]
            assert ("tool_calls", "I add.", "add") == (answer.finish_reason, answer.message.content, call.function.name)
            assert {"a": 1, "b": [2]} == json.loads(call.function.arguments)
            said = answer.message
            if form != "object":
                said = answer.message.model_dump(exclude_none=form == "written")
                said["tool_calls"][0]["function"]["arguments"] = '{"b":[2],  "a":1}'
            result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
            assert "answer 2" == (await chat(api, [USER, said, result], tools=[TOOL])).choices[0].message.content
            sequences = rollout.recording.sequences()
            assert [(None, None)] == shape(sequences)
            exact(served.model, sequences)
            assert ["add"] == [each.name for each in rollout.recording.calls]

    asyncio.run(run())


def test_a_malformed_call_reaches_the_program_as_the_model_wrote_it(serve: Any) -> None:
    """A program sees broken JSON as text, and the run's events name it."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            broken = '<tool_call>{"name": "add", "arguments": {</tool_call>'
            served.model.answers = {"first": broken}
            answer = (await chat(api, [USER], tools=[TOOL])).choices[0]
            assert (broken, None, "stop") == (answer.message.content, answer.message.tool_calls, answer.finish_reason)
            assert ["bad_tool_call"] == [name for name, _ in served.events]
            other = await chat(
                api,
                [
                    user("first "),
                ],
                tools=[TOOL],
                tool_choice="none",
            )
            assert other.choices[0].message.tool_calls is None

    asyncio.run(run())


def test_reasoning_is_a_field_of_its_own_and_may_be_left_out_of_the_history(serve: Any, exact: Any) -> None:
    """The client sends back the content alone; the tokens keep the reasoning."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            served.model.answers = {"first": "<think>\nwhy\n</think>\n\nyes"}
            message = (await chat(api, [USER])).choices[0].message
            assert ("why", "yes") == (message.reasoning_content, message.content)
            await chat(api, [USER, {"role": "assistant", "content": "yes"}, user("more")])
            sequences = rollout.recording.sequences()
            assert [(None, None)] == shape(sequences)
            exact(served.model, sequences)

    asyncio.run(run())


def test_histories_that_differ_are_sequences_with_parents(serve: Any, exact: Any) -> None:
    """Another continuation of an answer, a history that the client has rewritten, and another agent."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            first = (await chat(api, [USER])).choices[0].message
            await chat(api, [USER, first, user("one")])
            await chat(api, [USER, first, user("two")])
            await chat(api, [USER, {"role": "assistant", "content": "I never said that"}, user("one")])
            await chat(api, [{"role": "system", "content": "You are another agent."}, user("other")])
            sequences = rollout.recording.sequences()
            expected = [(None, None), (0, "branch"), (0, "compaction"), (0, "sub_agent")]
            assert expected == shape(sequences)
            exact(served.model, sequences)

    asyncio.run(run())


def test_a_fork_of_a_fork_in_the_middle_of_a_line_has_the_tokens_up_to_there(serve: Any, exact: Any) -> None:
    """A program that searches a tree of turns."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            path: list[Any] = [USER]
            for text in ("a", "b", "c"):
                path += [(await chat(api, path)).choices[0].message, user(text)]
            middle = [*path[:4], user("other")]  # after the second answer
            middle += [(await chat(api, middle)).choices[0].message, user("d")]
            await chat(api, middle)
            await chat(api, [*middle[:6], user("e")])
            sequences = rollout.recording.sequences()
            assert [(None, None), (0, "branch"), (1, "branch")] == shape(sequences)
            exact(served.model, sequences)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeat_gets_the_recorded_answer(serve: Any, exact: Any, stream: bool) -> None:
    """A turn that is sent twice is generated once, and the conversation goes on after it."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            one, two = await chat(api, [USER]), await chat(api, [USER], stream=stream)
            text = "".join([part.choices[0].delta.content or "" async for part in two]) if stream else None
            assert one.choices[0].message.content == (text if stream else two.choices[0].message.content)
            await chat(api, [USER, one.choices[0].message, user("more")])
            await chat(api, [USER])
            assert (2, 2) == (len(served.model.asked), rollout.recording.repeats)
            assert [(None, None)] == shape(rollout.recording.sequences())
            exact(served.model, rollout.recording.sequences())

    asyncio.run(run())


def test_a_repeat_joins_a_request_that_still_runs_also_after_its_client_left(serve: Any, exact: Any) -> None:
    """A client that disconnects in the middle of an answer finds it when it comes back."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            served.model.gate = asyncio.Event()
            leaving = asyncio.create_task(chat(api, [USER]))
            await served.model.arrived.wait()
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            joining = [asyncio.create_task(chat(api, [USER])) for _ in range(3)]
            while rollout.recording.repeats < 3:
                await asyncio.sleep(0)
            served.model.gate.set()
            answers = await asyncio.gather(*joining)
            assert {"answer 1"} == {answer.choices[0].message.content for answer in answers}
            assert (1, 0) == (len(served.model.asked), served.model.cancelled)
            exact(served.model, rollout.recording.sequences())

    asyncio.run(run())


def test_repeats_may_branch_but_a_retry_of_the_client_never_does(serve: Any, exact: Any) -> None:
    """With ``repeats: branch`` an equal request is another sample; a marked retry is not."""

    async def run() -> None:
        async with serve(repeats="branch") as served, served.rollout() as rollout, client(served, rollout) as api:
            answers = [await chat(api, [USER]) for _ in range(2)]
            retry = await chat(api, [USER], extra_headers={"x-stainless-retry-count": "1"})
            texts = [answer.choices[0].message.content for answer in (*answers, retry)]
            assert ["answer 1", "answer 2", "answer 2"] == texts
            assert [(None, None), (0, "branch")] == shape(rollout.recording.sequences())
            seeds = [request.sampling.seed for request in served.model.asked]
            assert 1 == seeds[0]
            assert seeds[1] not in (None, 1)
            exact(served.model, rollout.recording.sequences())

    asyncio.run(run())


def test_the_client_s_own_retries_after_an_error_go_on_where_it_was(serve: Any, exact: Any) -> None:
    """The model's server fails once; the second request of the client has the same turn."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout:
            async with openai.AsyncOpenAI(base_url=served.url, api_key=rollout.key, max_retries=2) as api:
                first = (await chat(api, [USER])).choices[0].message
                served.model.failures = [RolloutError("broken", code="rollout.failed")]
                await chat(api, [USER, first, user("more")])
            assert [(None, None)] == shape(rollout.recording.sequences())
            exact(served.model, rollout.recording.sequences())

    asyncio.run(run())


def test_several_choices_are_branches_and_each_can_be_continued(serve: Any, exact: Any) -> None:
    """``n`` answers to one prompt, with seeds of their own."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            first = (await chat(api, [USER])).choices[0].message
            answer = await chat(api, [USER, first, user("more")], n=3)
            assert [0, 1, 2] == [choice.index for choice in answer.choices]
            assert 3 == len({request.sampling.seed for request in served.model.asked[1:]})
            await chat(api, [USER, first, user("more"), answer.choices[2].message, user("last")])
            sequences = rollout.recording.sequences()
            assert [(None, None), (0, "branch"), (0, "branch")] == shape(sequences)
            exact(served.model, sequences)
            assert sum(answer.usage.prompt_tokens == len(request.prompt_ids) for request in served.model.asked) == 3

    asyncio.run(run())


def test_log_probs_token_ids_and_stops_are_those_of_the_model(serve: Any, exact: Any) -> None:
    """What the client asks to see is what is recorded; a stop text is no part of the answer."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            served.model.answers = {"first": "one two STOP three"}
            extra = {"return_token_ids": True}
            answer = (await chat(api, [USER], stop=["STOP"], logprobs=True, extra_body=extra)).choices[0]
            assert "one two " == answer.message.content
            (sequence,) = rollout.recording.sequences()
            assert list(sequence.response_ids) == answer.token_ids
            assert list(sequence.response_log_probs) == [each.logprob for each in answer.logprobs.content]
            await chat(api, [USER, answer.message, user("more")])
            sequences = rollout.recording.sequences()
            assert [(None, None)] == shape(sequences)
            exact(served.model, sequences)

    asyncio.run(run())


def test_a_stream_has_the_parts_of_an_answer_that_is_not_streamed(serve: Any) -> None:
    """Text, tool calls, reason, usage: the client adds the pieces up."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            served.model.answers = {"first": CALL}
            options = {"stream": True, "stream_options": {"include_usage": True}, "tools": [TOOL]}
            parts = [part async for part in await chat(api, [USER], **options)]
            whole = await chat(api, [USER], tools=[TOOL])
            deltas = [part.choices[0].delta for part in parts if part.choices]
            calls = [call for delta in deltas for call in delta.tool_calls or ()]
            assert "I add." == "".join(delta.content or "" for delta in deltas)
            expected = whole.choices[0].message.tool_calls[0]
            assert [expected.id] == [call.id for call in calls]
            assert expected.function.arguments == "".join(call.function.arguments for call in calls)
            assert ("tool_calls", whole.usage) == (parts[-2].choices[0].finish_reason, parts[-1].usage)

    asyncio.run(run())


def test_completions_that_extend_each_other_are_one_sequence(serve: Any, exact: Any) -> None:
    """The program appends results inside of the model's own text, as Search-R1 and ReTool do."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            served.model.answers = {"question:": " think <search>x</search> late", "</result>": " so 4"}
            stop = ["</search>"]
            one = (await api.completions.create(model="m", prompt="question:", stop=stop, max_tokens=50)).choices[0]
            assert " think <search>x" == one.text
            text = "question:" + one.text + "</search><result>4</result>"
            two = (await api.completions.create(model="m", prompt=text, stop=stop, max_tokens=50, logprobs=0)).choices[
                0
            ]
            assert " so 4" == two.text
            sequences = rollout.recording.sequences()
            assert [(None, None)] == shape(sequences)
            exact(served.model, sequences)
            # the answer ended its turn, which the text does not have: another sequence
            await api.completions.create(model="m", prompt=text + two.text + "!", max_tokens=50)
            ids = list(served.tokenizer.encode_text("ids"))
            served.model.closes = False
            three = await api.completions.create(
                model="m", prompt=ids, max_tokens=3, extra_body={"return_token_ids": True}
            )
            more = [*ids, *three.choices[0].token_ids, *ids]
            await api.completions.create(model="m", prompt=more, max_tokens=3)
            sequences = rollout.recording.sequences()
            assert [None, 0, 0] == [sequence.parent for sequence in sequences]
            exact(served.model, sequences)

    asyncio.run(run())


def test_a_context_that_is_full_is_the_error_that_clients_know(serve: Any, exact: Any) -> None:
    """The error has OpenAI's code, and what was recorded stays."""

    async def run() -> None:
        async with serve() as served, served.rollout(max_model_len=120, max_prompt_tokens=90) as rollout:
            async with client(served, rollout) as api:
                with pytest.raises(openai.BadRequestError) as prompt:
                    await chat(api, [user("x" * 200)])
                first = (await chat(api, [USER])).choices[0].message
                for text in ("y" * 200, "z" * 80):
                    with pytest.raises(openai.BadRequestError) as turn:
                        await chat(api, [USER, first, user(text)])
                    assert {"context_length_exceeded"} == {prompt.value.code, turn.value.code}
                await chat(api, [USER, first, user("ok")])
            exact(served.model, rollout.recording.sequences())

    asyncio.run(run())


def test_the_run_s_budget_counts_over_turns_and_forks(serve: Any, exact: Any) -> None:
    """``max_new_tokens`` is that of the whole conversation, and the client's limit counts beside it."""

    async def run() -> None:
        async with serve() as served, served.rollout({"max_new_tokens": 14}) as rollout, client(served, rollout) as api:
            first = await chat(api, [USER], max_tokens=5)
            assert "length" == first.choices[0].finish_reason
            said = first.choices[0].message
            for text in ("a", "b"):
                assert 9 == (await chat(api, [USER, said, user(text)])).usage.completion_tokens
            answer = (await chat(api, [USER, said, user("b")])).choices[0].message
            with pytest.raises(openai.BadRequestError):
                await chat(api, [USER, said, user("b"), answer, user("c")])
            exact(served.model, rollout.recording.sequences())

    asyncio.run(run())


def test_the_run_s_sampling_counts_unless_the_client_s_is_to(serve: Any) -> None:
    """A program's temperature does not change the policy that is trained."""

    async def run() -> None:
        for mode, expected in (("run", 0.7), ("client", 0.1)):
            async with serve(sampling=mode) as served, served.rollout({"temperature": 0.7}) as rollout:
                async with client(served, rollout) as api:
                    await chat(api, [USER], temperature=0.1)
                assert expected == served.model.asked[0].sampling.temperature

    asyncio.run(run())


def test_the_end_of_a_rollout_cancels_what_runs_and_refuses_what_comes(serve: Any) -> None:
    """Nothing generates for a rollout that has ended, and its key says why."""

    async def run() -> None:
        async with serve() as served:
            served.model.gate = asyncio.Event()
            async with served.rollout() as rollout:
                api = client(served, rollout)
                running = asyncio.create_task(chat(api, [USER]))
                await served.model.arrived.wait()
            found = await asyncio.gather(running, return_exceptions=True)
            assert [410] == [error.status_code for error in found if isinstance(error, openai.APIStatusError)]
            assert 1 == served.model.cancelled
            with pytest.raises(openai.APIStatusError) as late:
                await chat(api, [USER])
            assert (410, "rollout_ended") == (late.value.status_code, late.value.code)
            assert () == rollout.recording.sequences()
            await api.close()

    asyncio.run(run())


TURN = st.tuples(
    st.sampled_from(["extend", "fork", "fresh", "repeat", "rewrite", "fail", "both"]),
    st.integers(0, 20),
    st.integers(0, 3),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(TURN, min_size=1, max_size=10))
def test_whatever_a_program_does_each_answer_is_recorded_once_and_exactly(
    serve: Any, exact: Any, turns: list[tuple[str, int, int]]
) -> None:
    """Random programs extend, fork, begin, repeat and rewrite histories, and meet failures."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            known: list[list[Any]] = []
            sent: list[list[Any]] = []
            for number, (kind, place, text) in enumerate(turns):
                base = known[place % len(known)] if known else []
                messages = [*base, user(f"turn {text}")]
                if kind == "fresh" or not known:
                    messages = [user(f"fresh {text}")]
                elif kind == "repeat":
                    messages = sent[place % len(sent)]
                elif kind == "rewrite":
                    messages = [*base[:-1], {"role": "assistant", "content": f"changed {number}"}, user("and")]
                elif kind == "fail":
                    served.model.failures = [RolloutError("broken", code="rollout.failed")]
                requests = [chat(api, messages) for _ in range(2 if kind == "both" else 1)]
                answers = await asyncio.gather(*requests, return_exceptions=True)
                served.model.failures = []
                sent.append(messages)
                for answer in answers:
                    if isinstance(answer, BaseException):
                        assert isinstance(answer, openai.InternalServerError), answer
                    else:
                        known.append([*messages, answer.choices[0].message.model_dump(exclude_none=True)])
            exact(served.model, rollout.recording.sequences())
            for number, sequence in enumerate(rollout.recording.sequences()):
                assert sequence.parent is None if number == 0 else sequence.parent is None or sequence.parent < number

    asyncio.run(run())
