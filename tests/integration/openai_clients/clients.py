"""Drives one client library against a served model: ``python clients.py CLIENT BASE_URL``. Runs where the clients are.

Prints JSON: the version of the library, and for each feature ``"works"`` or what went wrong. The model is random and
its tokens are bytes, so texts mean nothing; calls of tools and JSON come from grammars, and have to be right.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any, Literal

os.environ |= {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}

MODEL = "policy"
ASK: list[Any] = [{"role": "user", "content": "Is it warm in Rome?"}]
City = Literal["Rome", "Oslo"]
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
PARAMETERS |= {"additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "It.", "parameters": PARAMETERS}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": PARAMETERS, "strict": True}}
Features = dict[str, Callable[[], Any]]


def check_city(found: Any) -> None:
    """Check the arguments of a call, or an answer in JSON."""
    value = json.loads(found) if isinstance(found, str) else found
    assert value["city"] in ("Rome", "Oslo"), value


def read(stream: Iterable[Any]) -> None:
    """Read a stream to its end; it has several pieces."""
    pieces = list(stream)
    assert len(pieces) > 1, pieces


def with_openai(url: str) -> Features:
    """OpenAI's own client."""
    import openai

    client = openai.OpenAI(base_url=url, max_retries=0)
    chat = client.chat.completions

    def streamed() -> None:
        events = list(chat.create(model=MODEL, messages=ASK, max_tokens=5, seed=1, stream=True))
        whole = chat.create(model=MODEL, messages=ASK, max_tokens=5, seed=1).choices[0]
        pieces = [event.choices[0] for event in events]
        assert whole.message.content == "".join(piece.delta.content or "" for piece in pieces)
        assert ["assistant", None] == [piece.delta.role for piece in pieces[:2]]
        assert whole.finish_reason == pieces[-1].finish_reason

    def tools() -> None:
        named: Any = {"type": "function", "function": {"name": "weather"}}
        for choice in ("required", named):
            answer = chat.create(model=MODEL, messages=ASK, tools=[TOOL], tool_choice=choice).choices[0]
            assert "tool_calls" == answer.finish_reason
            call: Any = answer.message.tool_calls[0]  # type: ignore[index]
            assert call.id, call
            check_city(call.function.arguments)
        events = chat.create(model=MODEL, messages=ASK, tools=[TOOL], tool_choice="required", stream=True)
        deltas = [each for event in events for each in event.choices[0].delta.tool_calls or []]
        check_city(deltas[0].function.arguments)  # type: ignore[union-attr]
        back = [*ASK, answer.message.model_dump(exclude_none=True)]
        back.append({"role": "tool", "tool_call_id": call.id, "content": "warm"})
        chat.create(model=MODEL, messages=back, tools=[TOOL], max_tokens=3)

    def schema() -> None:
        check_city(chat.create(model=MODEL, messages=ASK, response_format=FORMAT).choices[0].message.content)

    def log_probs() -> None:
        answer = chat.create(model=MODEL, messages=ASK, max_tokens=4, logprobs=True, top_logprobs=3).choices[0]
        for entry in answer.logprobs.content:  # type: ignore[union-attr]
            assert 3 == len(entry.top_logprobs), entry
            assert entry.bytes is not None

    def completions() -> None:
        fields: Any = {"model": MODEL, "prompt": "é x", "max_tokens": 2, "logprobs": 1, "echo": True}
        found = client.completions.create(**fields, frequency_penalty=0.5, logit_bias={"120": -100}).choices[0].logprobs
        assert ["bytes:\\xc3", "bytes:\\xa9", " ", "x"] == found.tokens[:4], found  # type: ignore[union-attr, index]
        assert [0, 0, 1, 2] == found.text_offset[:4], found  # type: ignore[union-attr, index]
        assert None is found.token_logprobs[0]  # type: ignore[union-attr, index]

    def responses() -> None:
        first = client.responses.create(model=MODEL, input="Hello", max_output_tokens=4)
        client.responses.create(model=MODEL, input="And?", previous_response_id=first.id, max_output_tokens=4)
        tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
        answer = client.responses.create(model=MODEL, input="Hello", tools=[tool], tool_choice="required")
        check_city(answer.output[0].arguments)  # type: ignore[union-attr]
        form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": PARAMETERS}}
        check_city(client.responses.create(model=MODEL, input="Hello", text=form).output_text)
        events = list(client.responses.create(model=MODEL, input="Hello", max_output_tokens=4, stream=True))
        assert "response.created" == events[0].type
        assert events[-1].type in ("response.completed", "response.incomplete")

    def errors() -> None:
        assert MODEL == client.models.retrieve(MODEL).id == client.models.list().data[0].id
        codes = []
        for call in (
            lambda: client.models.retrieve("another"),
            lambda: chat.create(model="another", messages=ASK),
            lambda: client.completions.create(model=MODEL, prompt="x" * 5000),
        ):
            try:
                call()
            except openai.APIStatusError as error:
                codes.append(error.code)
        assert ["model_not_found", "model_not_found", "context_length_exceeded"] == codes, codes

    return {
        "chat": lambda: chat.create(model=MODEL, messages=ASK, max_tokens=3, stop=None, user="me", tools=[]),
        "streaming": streamed, "tools": tools, "JSON schema": schema, "log-probs": log_probs,
        "completions": completions, "responses": responses, "errors": errors,
    }  # fmt: skip


def with_litellm(url: str) -> Features:
    """LiteLLM, with its provider of compatible servers."""
    import litellm

    fixed: Any = {"model": f"openai/{MODEL}", "messages": ASK, "api_base": url, "num_retries": 0}

    def tools() -> None:
        answer = litellm.completion(**fixed, tools=[TOOL], tool_choice="required")
        check_city(answer.choices[0].message.tool_calls[0].function.arguments)

    def log_probs() -> None:
        answer = litellm.completion(**fixed, max_tokens=3, logprobs=True, top_logprobs=2)
        assert 2 == len(answer.choices[0].logprobs.content[0].top_logprobs)

    def responses() -> None:
        answer = litellm.responses(model=f"openai/{MODEL}", input="Hello", api_base=url, max_output_tokens=3)
        assert "message" == answer.output[0].type

    def completions() -> None:
        model = f"text-completion-openai/{MODEL}"
        assert litellm.text_completion(model=model, prompt="x", api_base=url, max_tokens=3).choices

    return {
        "chat": lambda: litellm.completion(**fixed, max_tokens=3),
        "streaming": lambda: read(litellm.completion(**fixed, max_tokens=3, stream=True)),
        "tools": tools,
        "JSON schema": lambda: check_city(
            litellm.completion(**fixed, response_format=FORMAT).choices[0].message.content
        ),
        "log-probs": log_probs, "completions": completions, "responses": responses,
    }  # fmt: skip


def with_langchain(url: str) -> Features:
    """LangChain's ``ChatOpenAI``."""
    from langchain_openai import ChatOpenAI

    def model(**more: Any) -> Any:
        return ChatOpenAI(model=MODEL, base_url=url, max_retries=0, **{"max_tokens": 200, **more})

    def tools() -> None:
        check_city(model().bind_tools([TOOL], tool_choice="required").invoke("Rome?").tool_calls[0]["args"])

    def schema() -> None:
        chosen = {"title": "answer", "description": "It.", **PARAMETERS}
        check_city(model().with_structured_output(chosen, method="json_schema").invoke("Rome?"))

    def log_probs() -> None:
        found = model(max_tokens=3, logprobs=True, top_logprobs=2).invoke("x").response_metadata["logprobs"]
        assert 2 == len(found["content"][0]["top_logprobs"])

    return {
        "chat": lambda: model(max_tokens=3).invoke("Rome?"),
        "streaming": lambda: read(model(max_tokens=3).stream("Rome?")),
        "tools": tools, "JSON schema": schema, "log-probs": log_probs,
        "responses": lambda: model(max_tokens=20, use_responses_api=True).invoke("Rome?"),
    }  # fmt: skip


def with_pydantic_ai(url: str) -> Features:
    """Pydantic AI's agents."""
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Answer(BaseModel):
        city: City

    provider = OpenAIProvider(base_url=url, api_key="none")
    model = OpenAIChatModel(MODEL, provider=provider)
    short: Any = {"max_tokens": 8}

    async def streamed() -> None:
        async with Agent(model, model_settings=short).run_stream("Rome?") as result:
            assert [piece async for piece in result.stream_text()]

    def output(kind: Any) -> Callable[[], None]:
        return lambda: check_city(Agent(model, output_type=kind(Answer)).run_sync("Rome?").output.model_dump())

    responses = OpenAIResponsesModel(MODEL, provider=provider)
    return {
        "chat": lambda: Agent(model, model_settings=short).run_sync("Rome?"),
        "streaming": lambda: asyncio.run(streamed()),
        "tools": output(ToolOutput), "JSON schema": output(NativeOutput),
        "responses": lambda: Agent(responses, model_settings={"max_tokens": 20}).run_sync("Rome?"),
    }  # fmt: skip


def with_openai_agents(url: str) -> Features:
    """OpenAI's Agents SDK, on chats and on responses."""
    import openai
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
    from pydantic import BaseModel

    asked: list[str] = []

    class Answer(BaseModel):
        city: City

    @function_tool
    def weather(city: City) -> str:
        """Tell the weather of a city."""
        asked.append(city)
        return "warm"

    def agent(kind: Any = OpenAIChatCompletionsModel, tokens: int = 200, **more: Any) -> Any:
        client = openai.AsyncOpenAI(base_url=url, max_retries=0)  # one for each event loop
        chosen = {"model": kind(MODEL, client), "model_settings": ModelSettings(max_tokens=tokens), **more}
        return Agent(name="weather", **chosen)

    async def streamed() -> None:
        result = Runner.run_streamed(agent(tokens=4), "Rome?")
        assert [event async for event in result.stream_events()]

    def tools(kind: Any) -> None:
        settings = ModelSettings(max_tokens=200, tool_choice="required")
        asked.clear()
        chosen = {"tools": [weather], "model_settings": settings, "tool_use_behavior": "stop_on_first_tool"}
        Runner.run_sync(agent(kind, **chosen), "Rome?")
        check_city({"city": asked[0]})

    def schema() -> None:
        check_city(Runner.run_sync(agent(output_type=Answer), "Rome?").final_output.model_dump())

    return {
        "chat": lambda: Runner.run_sync(agent(tokens=4), "Rome?"),
        "streaming": lambda: asyncio.run(streamed()),
        "tools": lambda: tools(OpenAIChatCompletionsModel), "JSON schema": schema,
        "responses": lambda: tools(OpenAIResponsesModel),
    }  # fmt: skip


def with_smolagents(url: str) -> Features:
    """smolagents' ``OpenAIModel``."""
    from smolagents import ChatMessage, MessageRole, OpenAIModel, Tool

    class Weather(Tool):  # type: ignore[misc]
        name = "weather"
        description = "It."
        inputs = {"city": {"type": "string", "description": "Where.", "enum": ["Rome", "Oslo"]}}  # noqa: RUF012
        output_type = "string"

        def forward(self, city: str) -> str:
            return city

    model = OpenAIModel(MODEL, api_base=url, api_key="none", max_tokens=200)
    ask = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": "Rome?"}])]

    def tools() -> None:
        found = model.generate(ask, tools_to_call_from=[Weather()], stop_sequences=["Observation:"])
        check_city(found.tool_calls[0].function.arguments)

    return {
        "chat": lambda: model.generate(ask, max_tokens=4),
        "streaming": lambda: read(model.generate_stream(ask, max_tokens=4)),
        "tools": tools,
        "JSON schema": lambda: check_city(model.generate(ask, response_format=FORMAT).content),
    }  # fmt: skip


def with_inspect_ai(url: str) -> Features:
    """Inspect's provider of compatible servers."""
    from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
    from inspect_ai.tool import ToolInfo, ToolParams
    from inspect_ai.util import JSONSchema

    def ask(**settings: Any) -> Any:
        more = {"tools": settings.pop("tools", []), "tool_choice": settings.pop("tool_choice", None)}
        config = GenerateConfig(**{"max_tokens": 200, "max_retries": 0, **settings})

        async def once() -> Any:
            async with get_model(f"openai-api/local/{MODEL}", base_url=url, api_key="none", memoize=False) as model:
                return await model.generate("Rome?", config=config, **more)

        return asyncio.run(once())

    schema: Any = JSONSchema(
        type="object", properties={"city": JSONSchema(type="string", enum=["Rome", "Oslo"])}, required=["city"]
    )
    schema.additionalProperties = False

    def tools() -> None:
        parameters = ToolParams(properties=schema.properties, required=["city"])
        info = ToolInfo(name="weather", description="It.", parameters=parameters)
        found = ask(tools=[info], tool_choice="any")
        check_city(found.choices[0].message.tool_calls[0].arguments)

    def log_probs() -> None:
        found = ask(max_tokens=3, logprobs=True, top_logprobs=2).choices[0].logprobs
        assert 2 == len(found.content[0].top_logprobs)

    form = ResponseSchema(name="answer", json_schema=schema)
    return {
        "chat": lambda: ask(max_tokens=3), "tools": tools,
        "JSON schema": lambda: check_city(ask(response_schema=form).completion), "log-probs": log_probs,
    }  # fmt: skip


def with_lm_eval(url: str) -> Features:
    """The evaluation harness: log-likelihoods of answers, and generation."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    fixed: Any = {"model": MODEL, "tokenizer_backend": "remote", "max_retries": 1, "max_length": 4096}
    model = LocalCompletionsAPI(base_url=f"{url}/completions", **fixed)

    def likelihood() -> None:
        asked = [Instance("loglikelihood", {}, ("It is", answer), 0) for answer in (" warm", " cold")]
        import openai

        client = openai.OpenAI(base_url=url)
        for (value, greedy), (_, answer) in zip(model.loglikelihood(asked), (each.args for each in asked), strict=True):
            fields: Any = {"model": MODEL, "prompt": "It is" + answer, "echo": True, "logprobs": 0, "max_tokens": 0}
            own = client.completions.create(**fields).choices[0].logprobs.token_logprobs  # type: ignore[union-attr]
            assert abs(sum(own[len("It is") :]) - value) < 1e-4, (own, value)  # type: ignore[index, arg-type]
            assert not greedy

    def generated() -> None:
        limits = {"until": ["\n"], "max_gen_toks": 4}
        assert 1 == len(model.generate_until([Instance("generate_until", {}, ("It is", limits), 0)]))

    def chat() -> None:
        given: Any = {**fixed, "tokenizer_backend": None}
        talker = LocalChatCompletion(base_url=f"{url}/chat/completions", **given)
        text = talker.apply_chat_template(ASK)
        assert 1 == len(talker.generate_until([Instance("generate_until", {}, (text, {"max_gen_toks": 4}), 0)]))

    return {"chat": chat, "completions": generated, "log-probs": likelihood}


def with_trl(url: str) -> Features:
    """TRL's ``VLLMClient``: generation and log-probs, not the transfer of weights. It wants vLLM beside it, unused."""
    from trl.generation import vllm_client

    vllm_client.is_vllm_available = lambda: True
    client = vllm_client.VLLMClient(base_url=url.removesuffix("/v1"))

    def completions() -> None:
        found = client.generate([[65, 66], [67]], n=2, max_tokens=3, logprobs=2, structured_outputs_regex=None)
        assert [[65, 66], [67]] == found["prompt_ids"], found
        assert 4 == len(found["completion_ids"])
        assert len(found["logprobs"][0]) == len(found["completion_ids"][0])

    def chat() -> None:
        found = client.chat(
            [ASK, ASK], n=1, max_tokens=3, tools=[TOOL], chat_template_kwargs={"enable_thinking": False}
        )
        assert found["prompt_ids"][0] == found["prompt_ids"][1]

    def log_probs() -> None:
        found = client.get_sequence_logprobs([[65, 66, 67, 68]], [2], top_logprobs=3)
        assert (2, 3) == (len(found["logprobs"][0]), len(found["logprobs"][0][0])), found

    return {"chat": chat, "completions": completions, "log-probs": log_probs}


CLIENTS: dict[str, Callable[[str], Features]] = {
    "openai": with_openai,
    "litellm": with_litellm,
    "langchain-openai": with_langchain,
    "pydantic-ai": with_pydantic_ai,
    "openai-agents": with_openai_agents,
    "smolagents": with_smolagents,
    "inspect-ai": with_inspect_ai,
    "lm-eval": with_lm_eval,
    "trl": with_trl,
}


def tried(feature: Callable[[], Any]) -> str:
    """Return ``works``, or what went wrong."""
    try:
        feature()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return "works"


if __name__ == "__main__":
    name, url = sys.argv[1:]
    package = {"pydantic-ai": "pydantic-ai-slim"}.get(name, name)
    features = {feature: tried(function) for feature, function in CLIENTS[name](url).items()}
    print("\n" + json.dumps({"version": version(package), "features": features}))
