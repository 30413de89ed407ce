"""Chats and completions: bodies of requests, and answers in OpenAI's form, whole or as events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from jackfield_agent_gateway.asking import Ask
from jackfield_huggingface.shaping import Grammar
from jackfield_openai.bodies import NEUTRAL, Body, ChatBody, CompletionBody
from jackfield_openai.grammars import read_grammar
from jackfield_openai.messages import read_messages, read_tools
from jackfield_openai.said import Answers, Said, arguments_text
from jackfield_openai.text import refused

Decode = Callable[[Sequence[int]], str]

#: What a recorded conversation cannot have, beside what no server can.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "add_generation_prompt": (None, True),
    "add_special_tokens": (None, True),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "echo": (None, False),
    "return_tokens_as_token_ids": (None, False),
}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


@attrs.frozen(kw_only=True)
class ToolChatBody(ChatBody):
    """The body of ``/v1/chat/completions`` with tools."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL

    def grammar(self) -> Grammar | None:
        return read_grammar(self.response_format, self.structured_outputs)  # nothing enforces calls

    def ask(self, is_retry: bool) -> Ask:
        """Return what is asked of the model."""
        most = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return Ask(
            messages=read_messages(self.messages),
            tools=read_tools(self.tools),
            calls_tools=calls_tools(self.tool_choice),
            max_tokens=most,
            **common(self, is_retry),
        )


@attrs.frozen(kw_only=True)
class TextBody(CompletionBody):
    """The body of ``/v1/completions`` with one prompt."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL

    def ask(self, is_retry: bool) -> Ask:
        """Return what is asked of the model."""
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            prompt = tuple(prompt)
        if not isinstance(prompt, str | tuple) or not prompt:
            raise refused("prompt", "one text or its token ids", self.prompt)
        return Ask(text=prompt, max_tokens=self.most_tokens, **common(self, is_retry))


def calls_tools(choice: Any) -> bool:
    """Return whether tool calls are looked for; ``required`` and a name are wishes that nothing enforces."""
    if choice in (None, "auto", "none", "required") or isinstance(choice, Mapping):
        return bool(choice != "none")
    raise refused("tool_choice", "auto, none, required or a function", choice)


#: What clients call what a recording cannot have.
_NAMES = {"grammar": "response_format", "top_log_probs": "top_logprobs", "prompt_log_probs": "prompt_logprobs"}


def check_plain(body: Body) -> None:
    """Refuse what would change the distribution that a recording learns from, naming the field."""
    for name in sorted(body.shaping().wanted):
        raise refused(_NAMES.get(name, name), "nothing: it is not served", True, "unsupported_parameter")


def common(body: Body, is_retry: bool) -> dict[str, Any]:
    """Return what all kinds of requests ask in the same way."""
    check_plain(body)
    return {
        "choices": body.choices,
        "stop": body.stop_strings,
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "sampling": {name: getattr(body, name) for name in _SAMPLING if getattr(body, name) is not None},
        "is_retry": is_retry,
    }


@attrs.frozen
class Form:
    """Answers in the form of chats or completions."""

    body: Body
    answers: Answers
    model: str
    decode: Decode

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = [self._choice(place, said) for place, said in enumerate(self.answers.said)]
        return {**self._head(""), "choices": choices, "usage": self.usage()}

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer."""
        head = self._head(".chunk" if self.body.chat else "")
        for place, said in enumerate(self.answers.said):
            for delta, reason in self._deltas(said):
                choice: dict[str, Any] = {"index": place, "finish_reason": reason}
                choice |= {"delta": delta} if self.body.chat else {"text": delta.get("content", "")}
                is_text = "content" in delta and bool(delta["content"])
                choice["logprobs"] = self._log_probs(said) if self.body.wants_log_probs and is_text else None
                if reason is not None and self.body.return_token_ids:
                    choice |= _tokens(said)
                yield {**head, "choices": [choice]}
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield {**head, "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens."""
        prompt, completion = self.answers.prompt_tokens, self.answers.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _deltas(self, said: Said) -> Iterator[tuple[dict[str, Any], str | None]]:
        if not self.body.chat:
            yield {"content": said.content}, _reason(said)
            return
        yield {"role": "assistant", "content": ""}, None
        if said.reasoning:
            yield {"reasoning_content": said.reasoning}, None
        if said.content:
            yield {"content": said.content}, None
        for place, call in enumerate(_calls(said)):
            yield {"tool_calls": [{"index": place, **call}]}, None
        yield {}, _reason(said)

    def _choice(self, place: int, said: Said) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": place, "finish_reason": _reason(said)}
        if self.body.chat:
            message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
            if said.reasoning:
                message["reasoning_content"] = said.reasoning
            if said.calls:
                message |= {"content": said.content or None, "tool_calls": _calls(said)}
            choice["message"] = message
        else:
            choice["text"] = said.content
        choice["logprobs"] = self._log_probs(said) if self.body.wants_log_probs else None
        if self.body.return_token_ids:
            choice |= _tokens(said)
        return choice

    def _log_probs(self, said: Said) -> dict[str, Any]:
        texts = [self.decode([token]) for token in said.token_ids]
        if self.body.chat:
            content = [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(texts, said.log_probs, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = [sum(map(len, texts[:place])) for place in range(len(texts))]
        values = list(said.log_probs)
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}

    def _head(self, suffix: str) -> dict[str, Any]:
        kind = "chat.completion" if self.body.chat else "text_completion"
        name = f"{'chatcmpl' if self.body.chat else 'cmpl'}-{self.answers.id}"
        return {"id": name, "object": kind + suffix, "created": self.answers.created, "model": self.model}


def _calls(said: Said) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_text(call)}}
        for call in said.calls
    ]


def _reason(said: Said) -> str:
    return "tool_calls" if said.calls else said.finish_reason


def _tokens(said: Said) -> dict[str, Any]:
    return {
        "token_ids": list(said.token_ids),
        "weight_versions": list(said.weight_versions),
        "prompt_token_ids": list(said.prompt_ids),
    }
