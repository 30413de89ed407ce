"""Chats and completions: bodies of requests, and answers in OpenAI's form, whole or as events."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from jackfield_agent_gateway.asking import Ask
from jackfield_agent_gateway.speech import Piece
from jackfield_huggingface.shaping import Grammar
from jackfield_openai.bodies import NEUTRAL, Body, ChatBody, CompletionBody
from jackfield_openai.grammars import read_grammar
from jackfield_openai.messages import read_messages, read_tools
from jackfield_openai.said import Answers, Head, Said, arguments_text
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

    def ask(self, is_retry: bool, images: bool = False) -> Ask:
        """Return what is asked of the model, which may see images or not."""
        most = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return Ask(
            messages=read_messages(self.messages, images),
            tools=read_tools(self.tools),
            calls_tools=calls_tools(self.tool_choice),
            max_tokens=most,
            **common(self, is_retry),
        )


@attrs.frozen(kw_only=True)
class TextBody(CompletionBody):
    """The body of ``/v1/completions`` with one prompt."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL

    def ask(self, is_retry: bool, images: bool = False) -> Ask:
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
        "streams": body.stream,
    }


@attrs.define
class _Sent:
    """What a client has got of one answer."""

    content: int = 0  #: characters
    reasoning: int = 0
    tokens: int = 0
    rest: list[tuple[int, float]] = attrs.field(factory=list)  #: tokens whose log-probs it has not got
    offset: int = 0  #: characters of the tokens whose log-probs it has got
    begun: bool = False

    def note(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Note that further tokens have come."""
        self.rest += zip(token_ids, log_probs, strict=True)
        self.tokens += len(token_ids)


@attrs.define
class Form:
    """Answers in the form of chats or completions, for one client."""

    body: Body
    model: str
    decode: Decode
    _sent: dict[int, _Sent] = attrs.field(factory=lambda: defaultdict(_Sent), init=False)  #: by choice

    def whole(self, answers: Answers) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = [self._choice(place, said) for place, said in enumerate(answers.said)]
        return {**self._head(answers.head, ""), "choices": choices, "usage": _usage(answers)}

    def more(self, head: Head, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the events of a piece of an answer that is under way."""
        self._sent[piece.choice].note(piece.token_ids, piece.log_probs)
        for delta in self._deltas(piece.choice, piece.content, piece.reasoning):
            yield self._event(head, piece.choice, delta)

    def end(self, answers: Answers) -> Iterator[dict[str, Any]]:
        """Yield the events of what is left of answers."""
        head = answers.head
        for place, said in enumerate(answers.said):
            sent = self._sent[place]
            sent.note(said.token_ids[sent.tokens :], said.log_probs[sent.tokens :])
            content, reasoning = said.content[sent.content :], said.reasoning[sent.reasoning :]
            last: dict[str, Any] = {} if self.body.chat else {"content": content}
            if self.body.chat:
                for delta in self._deltas(place, content, reasoning):
                    yield self._event(head, place, delta)
                for number, call in enumerate(_calls(said)):
                    yield self._event(head, place, {"tool_calls": [{"index": number, **call}]})
            yield self._event(head, place, last, said)
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield {**self._head(head, ".chunk" if self.body.chat else ""), "choices": [], "usage": _usage(answers)}

    def _deltas(self, place: int, content: str, reasoning: str) -> Iterator[dict[str, Any]]:
        sent = self._sent[place]
        sent.content, sent.reasoning = sent.content + len(content), sent.reasoning + len(reasoning)
        if self.body.chat and not sent.begun:
            sent.begun = True
            yield {"role": "assistant", "content": ""}
        if reasoning and self.body.chat:
            yield {"reasoning_content": reasoning}
        if content:
            yield {"content": content}

    def _event(self, head: Head, place: int, delta: dict[str, Any], said: Said | None = None) -> dict[str, Any]:
        """Return the event of a delta, or with what was ``said`` of the end."""
        choice: dict[str, Any] = {"index": place, "finish_reason": None if said is None else _reason(said)}
        choice |= {"delta": delta} if self.body.chat else {"text": delta.get("content", "")}
        sent = self._sent[place]
        is_due = self.body.wants_log_probs and bool(sent.rest) and (bool(delta.get("content")) or said is not None)
        choice["logprobs"] = self._log_probs(*zip(*sent.rest, strict=True), place=place) if is_due else None
        if is_due:
            sent.rest.clear()
        if said is not None and self.body.return_token_ids:
            choice |= _tokens(said)
        return {**self._head(head, ".chunk" if self.body.chat else ""), "choices": [choice]}

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
        is_due = self.body.wants_log_probs
        choice["logprobs"] = self._log_probs(said.token_ids, said.log_probs, place=place) if is_due else None
        if self.body.return_token_ids:
            choice |= _tokens(said)
        return choice

    def _log_probs(self, token_ids: Sequence[int], log_probs: Sequence[float], *, place: int) -> dict[str, Any]:
        texts = [self.decode([token]) for token in token_ids]
        if self.body.chat:
            content = [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(texts, log_probs, strict=True)
            ]
            return {"content": content, "refusal": None}
        sent = self._sent[place]
        offsets = list(itertools.accumulate(map(len, texts), initial=sent.offset))
        sent.offset = offsets.pop()
        return {"tokens": texts, "token_logprobs": list(log_probs), "top_logprobs": None, "text_offset": offsets}

    def _head(self, head: Head, suffix: str) -> dict[str, Any]:
        kind = "chat.completion" if self.body.chat else "text_completion"
        name = f"{'chatcmpl' if self.body.chat else 'cmpl'}-{head.id}"
        return {"id": name, "object": kind + suffix, "created": head.created, "model": self.model}


def _usage(answers: Answers) -> dict[str, int]:
    prompt, completion = answers.prompt_tokens, answers.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


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
