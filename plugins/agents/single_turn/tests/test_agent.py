"""One question, one answer: what goes to the rollout server and what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from jackfield.abc.agent import AgentContext, AgentLoopOutput, AgentSequence
from jackfield.abc.rollout import GenerateRequest, GenerateResult, SamplingParams
from jackfield.clock import Clock
from jackfield.errors import AgentError, DataError
from jackfield_agent_single_turn.agent import Config, SingleTurnAgent
from jackfield_testing import refused
from jackfield_virtual_clock import VirtualClock

END = 99
MESSAGES = [{"role": "user", "content": "abc"}]
Generate = Callable[[GenerateRequest], Awaitable[GenerateResult]]


class Letters:
    """A chat tokenizer whose tokens are letters."""

    end_token_ids = (END,)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return tuple(ord(letter) for message in messages for letter in message["content"])

    def encode_turn(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))


class Server:
    """Answers each request with the same tokens, and keeps the requests."""

    def __init__(self, *token_ids: int, finish_reason: Any = "stop") -> None:
        self.token_ids = token_ids
        self.finish_reason = finish_reason
        self.requests: list[GenerateRequest] = []

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        return GenerateResult(
            request_id=request.request_id,
            token_ids=self.token_ids,
            log_probs=tuple(-0.1 * token for token in self.token_ids),
            weight_versions=tuple(range(len(self.token_ids))),
            finish_reason=self.finish_reason,
        )


def make(generate: Generate, **options: Any) -> SingleTurnAgent:
    return SingleTurnAgent(Config(), AgentContext(generate=generate, tokenizer=Letters(), **options))


def answer(agent: SingleTurnAgent, sampling: Mapping[str, Any] | None = None, **fields: Any) -> AgentLoopOutput:
    return asyncio.run(agent.run(sampling or {}, **{"messages": MESSAGES, **fields}))


def test_the_answer_is_one_sequence_with_all_tokens_of_the_model() -> None:
    """The end token included; log-probabilities and versions as the server gave them."""
    server = Server(7, 8, END)
    expected = AgentSequence(
        prompt_ids=(97, 98, 99),
        response_ids=(7, 8, END),
        response_mask=(1, 1, 1),
        response_log_probs=(-0.1 * 7, -0.1 * 8, -0.1 * END),
        weight_versions=(0, 1, 2),
        finish_reason="stop",
    )
    assert AgentLoopOutput(sequences=(expected,), num_turns=1) == answer(make(server), question="not looked at")
    assert (97, 98, 99) == server.requests[0].prompt_ids


def test_sampling_parameters_reach_the_server_with_the_end_tokens() -> None:
    server = Server(7)
    keywords = {"temperature": 0.5, "max_new_tokens": 3, "seed": 4, "stop": ["\n"], "stop_token_ids": [5, END]}
    answer(make(server), keywords)
    expected = SamplingParams(temperature=0.5, max_new_tokens=3, seed=4, stop=("\n",), stop_token_ids=(5, END))
    assert expected == server.requests[0].sampling
    answer(make(server))
    assert SamplingParams(stop_token_ids=(END,)) == server.requests[1].sampling
    answer(make(server), {"ignore_eos": True})
    assert SamplingParams(ignore_eos=True) == server.requests[2].sampling


def test_unknown_sampling_parameters_are_refused_with_a_suggestion() -> None:
    server = Server(7)
    with refused("agent.failed", "'temperature'") as caught:
        answer(make(server), {"temprature": 1.0})
    assert "agent.failed" == caught.value.code
    assert [] == server.requests


def test_prompts_beyond_the_limit_are_refused_with_the_task() -> None:
    server = Server(7)
    assert answer(make(server, max_prompt_tokens=3)).sequences
    with pytest.raises(DataError) as caught:
        answer(make(server, max_prompt_tokens=2), task_id="train:7")
    assert "task train:7" in str(caught.value.where)
    assert "data.prompt-too-long" == caught.value.code
    assert "at most 2 tokens" == caught.value.expected
    assert 1 == len(server.requests)


def test_a_task_without_messages_is_refused() -> None:
    with pytest.raises(AgentError) as caught:
        asyncio.run(make(Server(7)).run({}, task_id="t:1", question="?"))
    assert "task t:1" in str(caught.value.where)
    assert "agent.failed" == caught.value.code


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_the_reason_of_the_end_is_passed_on(reason: str) -> None:
    [sequence] = answer(make(Server(7, finish_reason=reason))).sequences
    assert reason == sequence.finish_reason


def test_an_answer_aborted_before_its_first_token_is_no_sequence() -> None:
    assert () == answer(make(Server(finish_reason="abort"))).sequences


def test_request_ids_are_unique_and_carry_the_run() -> None:
    server = Server(7)
    one, other, nameless = (
        make(server, request_prefix="s3/g1/r0"),
        make(server, request_prefix="s3/g1/r0"),
        make(server),
    )
    for agent in (one, other, one, nameless, nameless):
        answer(agent)
    identifiers = [request.request_id for request in server.requests]
    assert 5 == len(set(identifiers))
    assert all(identifier.startswith("s3/g1/r0/") for identifier in identifiers[:3])


def test_cancelling_a_run_cancels_its_generation() -> None:
    """Nothing is left running."""

    async def main() -> None:
        started, ended = asyncio.Event(), asyncio.Event()

        async def hang(request: GenerateRequest) -> GenerateResult:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError

        run = asyncio.create_task(make(hang).run({}, messages=MESSAGES))
        await started.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert ended.is_set()
        assert {asyncio.current_task()} == asyncio.all_tasks()

    VirtualClock().run(main())


def test_errors_of_the_server_pass_through() -> None:
    async def broken(request: GenerateRequest) -> GenerateResult:
        raise RuntimeError("no replica")

    with pytest.raises(RuntimeError, match="no replica"):
        answer(make(broken))


def test_the_cost_of_a_run_is_small() -> None:
    """512 runs share one loop with generation: they may take a fraction of a decode step (a generous bound)."""

    async def main() -> float:
        agents = [make(Server(7, 8, END), request_prefix=f"r{index}") for index in range(512)]
        began = Clock().time()
        for agent in agents:
            await agent.run({"temperature": 1.0}, messages=MESSAGES, task_id="t")
        return (Clock().time() - began) / len(agents)

    assert 1e-3 > min(asyncio.run(main()) for _ in range(3))
