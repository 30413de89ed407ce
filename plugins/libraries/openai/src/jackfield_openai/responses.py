"""OpenAI's Responses API: items become messages, and an answer becomes items, whole or as events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs
from attrs.validators import ge, le

from jackfield.abc.agent import ToolCall
from jackfield.sdk import option
from jackfield_openai.bodies import UNBOUNDED, Body, ChatBody
from jackfield_openai.messages import field_text
from jackfield_openai.said import Answers, Head, arguments_text
from jackfield_openai.text import ClientError, ServedTokenizer, refused

_TEXTS = ("input_text", "output_text", "text")
_ROLES = ("developer", "system", "user", "assistant")


@attrs.frozen(kw_only=True)
class ResponseBody(Body):
    """The body of ``/v1/responses``."""

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = option(None, validator=[ge(1), le(UNBOUNDED)])
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    text: Mapping[str, Any] | None = None
    store: bool | None = None
    # without effect:
    include: list[str] | None = None
    reasoning: Mapping[str, Any] | None = None
    truncation: str | None = None
    max_tool_calls: int | None = None
    prompt_cache_retention: str | None = None

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (None, False),
        "conversation": (None,),
        "n": (None, 1),
        "prompt_logprobs": (None,),
        "response_format": (None, {"type": "text"}),
        "return_token_ids": (None, False),
        "return_tokens_as_token_ids": (None, False),
        "prompt": (None,),
        "top_logprobs": (None, 0),
        "stream_options": (None, {}, {"include_obfuscation": False}),
    }

    def check(self) -> None:
        """Refuse also parts of fields that this address does not have, naming the field."""
        super().check()
        text = self.text or {}
        if "message.output_text.logprobs" in (self.include or ()):
            raise refused("include", "nothing about log-probs", self.include, "unsupported_parameter")
        for name in text.keys() - {"format", "verbosity"}:
            raise ClientError(f"text has no {str(name)[:200]!r}", "unknown_parameter", f"text.{name}")
        if text.get("verbosity") not in (None, "medium"):
            what = "nothing, or 'medium': it is not served"
            raise refused("text.verbosity", what, text["verbosity"], "unsupported_parameter")
        if not isinstance(text.get("format"), Mapping | None):
            raise refused("text.format", "an object", text["format"], "invalid_type")
        effort = (self.reasoning or {}).get("effort")
        if not isinstance(effort, str | None):
            raise refused("reasoning.effort", "a text", effort, "invalid_type")

    def chat_body(self, messages: list[dict[str, Any]]) -> ChatBody:
        """Return the same request as a chat with ``messages``."""
        fields = {each.name: getattr(self, each.name) for each in attrs.fields(Body)}
        choice = self.tool_choice
        if isinstance(choice, Mapping):
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        effort = (self.reasoning or {}).get("effort")
        body = ChatBody(
            **{**fields, "response_format": self.text_format, "stream": None, "stream_options": None},
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            tools=[read_tool(tool, place) for place, tool in enumerate(self.tools or ())] or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=effort,
        )
        body.check()
        return body

    @property
    def text_format(self) -> dict[str, Any] | None:
        """Return ``text.format`` in the form of chats."""
        given = (self.text or {}).get("format")
        if not isinstance(given, Mapping):
            return None
        kind = given.get("type")
        rest = {name: value for name, value in given.items() if name != "type"}
        return {"type": kind, "json_schema": rest} if kind == "json_schema" else {"type": kind}

    @property
    def wants_log_probs(self) -> bool:
        return False

    @property
    def most_tokens(self) -> int:
        return self.max_output_tokens or UNBOUNDED

    @property
    def prompt_count(self) -> int:
        return 1

    def prompts(self, tokenizer: ServedTokenizer) -> list[tuple[int, ...]]:
        raise NotImplementedError  # a gateway renders conversations itself

    def messages(self, known: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return the whole conversation; ``known`` has those of earlier responses."""
        before: list[dict[str, Any]] = []
        if self.previous_response_id is not None:
            if self.previous_response_id not in known:
                text = f"this rollout has no response {self.previous_response_id[:100]!r}"
                raise ClientError(text, "previous_response_not_found", "previous_response_id", 404)
            before = known[self.previous_response_id]
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        if not (found := [*system, *before, *_messages(items)]):
            raise refused("input", "a text, or a list with a message", items)
        return found


def read_tool(tool: Any, place: int) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise refused(f"tools[{place}].type", "function: nothing else is served", kind, "unsupported_parameter")
    fields = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in fields if tool.get(name) is not None}}


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    """Return items as messages; the text and the calls of one answer are one message."""
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        path = f"input[{place}]"
        if not isinstance(item, Mapping):
            raise refused(path, "an object", item, "invalid_type")
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "function_call_output":
            output = item.get("output")
            content = output if isinstance(output, str) else _content(output, f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": field_text(item, "call_id", path), "content": content})
            continue
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if kind == "function_call":
            call = {name: field_text(item, name, path) for name in ("name", "arguments")}
            if last is None:
                messages.append(last := {"role": "assistant", "content": ""})
            calls = last.setdefault("tool_calls", [])
            calls.append({"id": field_text(item, "call_id", path), "type": "function", "function": call})
        elif kind == "message":
            given = item.get("content")
            content = given if isinstance(given, str) else _content(given, f"{path}.content")
            if (role := field_text(item, "role", path)) not in _ROLES:
                raise refused(f"{path}.role", "one of " + ", ".join(_ROLES), role)
            messages.append({"role": role, "content": content})
        else:
            raise refused(f"{path}.type", "message, function_call, function_call_output or reasoning", kind)
    return messages


def _content(parts: Any, path: str) -> Any:
    """Return the parts of an item as those of a message: one text, or texts and images."""
    if not isinstance(parts, list):
        raise refused(path, "a text, or a list of text parts", parts, "invalid_type")
    if not parts:
        raise refused(path, "one part at least", parts)
    found: list[dict[str, Any]] = []
    for place, part in enumerate(parts):
        if isinstance(part, Mapping) and part.get("type") == "input_image":
            found.append({"type": "image_url", "image_url": {"url": part.get("image_url")}})
        elif isinstance(part, Mapping) and part.get("type") in _TEXTS and isinstance(part.get("text"), str):
            found.append({"type": "text", "text": part["text"]})
        else:
            raise refused(f"{path}[{place}]", "a part with text or an image", part)
    return found


@attrs.define
class ResponseForm:
    """One answer in the form of the Responses API, for one client."""

    body: ResponseBody
    model: str
    _number: int = attrs.field(default=0, init=False)  #: of the next event
    _content: str = attrs.field(default="", init=False)  #: what the client has got
    _reasoning: str = attrs.field(default="", init=False)
    _place: int = attrs.field(default=0, init=False)  #: of the next item

    def whole(self, answers: Answers) -> dict[str, Any]:
        """Return the response."""
        said = answers.said[0]
        cut = said.finish_reason == "length" and not said.calls
        status = "incomplete" if cut else "completed"
        items = _items(answers.head, said.content, said.reasoning, said.calls)
        return {**self._head(answers.head, status), "output": items, "usage": _usage(answers)}

    def more(self, head: Head, content: str, reasoning: str) -> Iterator[dict[str, Any]]:
        """Yield the events of more of an answer that is under way: its text, when the reasoning is complete."""
        self._reasoning += reasoning
        yield from self._numbered(self._text(head, content))

    def end(self, answers: Answers) -> Iterator[dict[str, Any]]:
        """Yield the events of what is left of an answer, each with its type and number."""
        yield from self._numbered(self._rest(answers))

    def _numbered(self, events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for event in events:
            yield {**event, "sequence_number": self._number}
            self._number += 1

    def _begin(self, head: Head) -> Iterator[dict[str, Any]]:
        if self._number == 0:
            shown = {**self._head(head, "in_progress"), "output": [], "usage": None}
            yield {"type": "response.created", "response": shown}
            yield {"type": "response.in_progress", "response": shown}

    def _text(self, head: Head, content: str) -> Iterator[dict[str, Any]]:
        """Yield the events of more text, with those of the items before it and of its beginning."""
        yield from self._begin(head)
        if not content:
            return
        *before, message = _items(head, content, self._reasoning, ())
        if not self._content:
            for item in before:
                yield from self._item(item)
            shown = {**message, "status": "in_progress", "content": []}
            yield {"type": "response.output_item.added", "output_index": self._place, "item": shown}
            empty = {**message["content"][0], "text": "", "logprobs": []}
            yield {"type": "response.content_part.added", **self._at(message), "content_index": 0, "part": empty}
        self._content += content
        text = {**self._at(message), "content_index": 0, "logprobs": []}
        yield {"type": "response.output_text.delta", **text, "delta": content}

    def _rest(self, answers: Answers) -> Iterator[dict[str, Any]]:
        said, head = answers.said[0], answers.head
        self._reasoning = said.reasoning
        yield from self._text(head, said.content[len(self._content) :])
        for item in _items(head, said.content, said.reasoning, said.calls)[self._place :]:
            if item["type"] != "message":
                yield from self._item(item)
                continue
            part = item["content"][0]
            at = {**self._at(item), "content_index": 0}
            if not said.content:  # nothing has begun it
                shown = {**item, "status": "in_progress", "content": []}
                yield {"type": "response.output_item.added", "output_index": self._place, "item": shown}
                yield {"type": "response.content_part.added", **at, "part": part}
            yield {"type": "response.output_text.done", **at, "logprobs": [], "text": part["text"]}
            yield {"type": "response.content_part.done", **at, "part": part}
            yield self._done(item)
        whole = self.whole(answers)
        yield {"type": f"response.{whole['status']}", "response": whole}

    def _item(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a call or of reasoning."""
        shown = {**item, "status": "in_progress"}
        added = {"type": "response.output_item.added", "output_index": self._place}
        if item["type"] == "function_call":
            at, call = self._at(item), {"arguments": item["arguments"]}
            yield {**added, "item": {**shown, "arguments": ""}}
            yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **at, **call, "name": item["name"]}
        else:
            yield {**added, "item": shown}
        yield self._done(item)

    def _done(self, item: dict[str, Any]) -> dict[str, Any]:
        self._place += 1
        return {"type": "response.output_item.done", "output_index": self._place - 1, "item": item}

    def _at(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {"output_index": self._place, "item_id": item["id"]}

    def _head(self, head: Head, status: str) -> dict[str, Any]:
        body = self.body
        return {
            "id": response_id(head),
            "object": "response",
            "created_at": head.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "parallel_tool_calls": True if body.parallel_tool_calls is None else body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "temperature": body.temperature,
            "tool_choice": body.tool_choice or "auto",
            "tools": json.loads(json.dumps(body.tools or [])),
            "top_p": body.top_p,
            "metadata": {},
        }


def response_id(head: Head) -> str:
    """Return the id by which a later request names an answer."""
    return f"resp_{head.id}"


def answered(body: ResponseBody, before: list[dict[str, Any]], answers: Answers) -> list[dict[str, Any]]:
    """Return a conversation with its answer, as a client would send it; instructions are of one request alone."""
    said = answers.said[0]
    before = before[1:] if body.instructions else before
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_text(call)}}
            for call in said.calls
        ]
    return [*before, message]


def _items(head: Head, content: str, reasoning: str, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reasoning:
        text = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{head.id}", "summary": [], "content": text})
    if content or not calls:
        part = {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{head.id}", "role": "assistant", "status": "completed"}
        items.append({**message, "content": [part]})
    for place, call in enumerate(calls):
        item = {"type": "function_call", "id": f"fc_{head.id}_{place}", "call_id": call.id, "status": "completed"}
        items.append({**item, "name": call.name, "arguments": arguments_text(call)})
    return items


def _usage(answers: Answers) -> dict[str, Any]:
    prompt, completion = answers.prompt_tokens, answers.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
