"""Agents of real libraries run through the gateway as they are, and are recorded exactly."""

from __future__ import annotations

import asyncio
import json
import warnings
from typing import Any

import openai
import pytest

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_of_openai_agents_is_one_sequence(serve: Any, exact: Any, api: str, streams: bool) -> None:
    """Its tool loop over both APIs: a call, its result, an answer."""
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout:
            served.model.answers = {"two and three?": CALL, "tool\n5": "It is 5."}
            client = openai.AsyncOpenAI(base_url=served.url, api_key=rollout.key, max_retries=0)
            kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
            model = kind(model="policy", openai_client=client)
            agent = agents.Agent(name="adder", instructions="Use the tool.", model=model, tools=[add])
            if streams:
                result = agents.Runner.run_streamed(agent, "What is two and three?")
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, "What is two and three?")
            assert "It is 5." == result.final_output
            await client.close()
            sequences = rollout.recording.sequences()
            assert [(None, None)] == [(sequence.parent, sequence.relation) for sequence in sequences]
            assert [{"a": 2, "b": 3}] == [call.arguments for call in rollout.recording.calls]
            exact(served.model, sequences)

    asyncio.run(run())


def test_an_agent_of_smolagents_is_recorded_exactly(serve: Any, exact: Any) -> None:
    """Its tool-calling agent, which blocks, in a thread of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        smolagents = pytest.importorskip("smolagents")

    class Add(smolagents.Tool):  # type: ignore[misc, name-defined]
        """A tool as smolagents wants it."""

        name = "add"
        description = "Adds two numbers."
        inputs = {  # noqa: RUF012 - smolagents wants a plain dict
            "a": {"type": "integer", "description": "one"},
            "b": {"type": "integer", "description": "other"},
        }
        output_type = "integer"

        def forward(self, a: int, b: int) -> int:
            return a + b

    def program(url: str, key: str) -> Any:
        model = smolagents.OpenAIServerModel(model_id="policy", api_base=url, api_key=key)
        agent = smolagents.ToolCallingAgent(tools=[Add()], model=model, max_steps=3, verbosity_level=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return agent.run("What is two and three?")

    async def run() -> None:
        final = {"name": "final_answer", "arguments": {"answer": "5"}}
        async with serve(context={"max_model_len": 100_000}) as served, served.rollout() as rollout:
            answers = iter([CALL, f"<tool_call>\n{json.dumps(final)}\n</tool_call>"])
            served.model.next = lambda: next(answers)
            assert "5" == str(await asyncio.to_thread(program, served.url, rollout.key))
            assert ["add", "final_answer"] == [call.name for call in rollout.recording.calls]
            exact(served.model, rollout.recording.sequences())

    asyncio.run(run())
