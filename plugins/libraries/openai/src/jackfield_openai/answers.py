"""Answers in OpenAI's form, whole or as the pieces of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import attrs

from jackfield.abc.agent import ToolCall
from jackfield.abc.rollout import GenerateChunk, GenerateRequest
from jackfield_huggingface.shaping import NEUTRAL, Likeliest, ShapedChunk, ShapedRequest, ShapedResult
from jackfield_openai.bodies import Body, ChatBody, CompletionBody
from jackfield_openai.said import Said, arguments_text
from jackfield_openai.text import ServedTokenizer, TextStream
from jackfield_openai.tokens import Offsets
from jackfield_openai.tools import ToolUse
from jackfield_tool_calls import Format, Parsed

_Told = tuple[int, float | None, Likeliest]  #: a token with its log-prob and the likeliest ones


class Choice:
    """One of the texts that a request asks for."""

    def __init__(
        self, index: int, prompt: tuple[int, ...], body: Body, tokenizer: ServedTokenizer, format: Format | None = None
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.chunks: list[GenerateChunk] = []
        self._body, self._tokenizer, self._format = body, tokenizer, format
        self._use = body.tool_use if isinstance(body, ChatBody) else ToolUse()
        self._only_prompt = isinstance(body, CompletionBody) and body.only_prompt
        decode = tokenizer.decode_all if self._use.parses else tokenizer.decode  # marks of calls are special tokens
        self._text = TextStream(decode, body.stop_strings)
        self._offsets = Offsets(tokenizer.texts)
        self._begun = False  #: whether a piece was told
        self._held = ""  #: text that may be a call

    @property
    def completion_tokens(self) -> int:
        """Return the number of tokens that have come."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    def request(self, name: str) -> GenerateRequest:
        """Return the request for the rollout server."""
        body, shaping = self._body, self._body.shaping()
        fields: dict[str, Any] = {
            "request_id": name,
            "prompt_ids": self.prompt,
            "sampling": body.sampling(self.index),
            "minimum_weight_version": body.minimum_weight_version,
        }
        return GenerateRequest(**fields) if shaping == NEUTRAL else ShapedRequest(**fields, shaping=shaping)

    def add(self, chunk: GenerateChunk) -> None:
        """Take generated tokens."""
        if self._only_prompt:
            chunk = attrs.evolve(chunk, token_ids=(), log_probs=(), weight_versions=(), finish_reason="length")
        self.chunks.append(chunk)

    def pieces(self, chunk: GenerateChunk) -> list[dict[str, Any]]:
        """Return streamed choices with the content of a chunk. With tools they come together, at the end."""
        self.add(chunk)
        text = self._text.feed(self.chunks[-1].token_ids)
        if chunk.finish_reason is not None:
            text += self._text.finish()
        if not self._use.parses:
            return [self._choice({"content": text}, text, [self.chunks[-1]])]
        self._held += text
        if chunk.finish_reason is None:
            return []
        parsed = self._read(self._held)
        delta: dict[str, Any] = {"content": parsed.content}
        if parsed.reasoning:
            delta["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            delta["tool_calls"] = [{"index": place, **call_of(call)} for place, call in enumerate(parsed.calls)]
        return [self._choice(delta, parsed.content, self.chunks, bool(parsed.calls))]

    def parsed(self) -> Parsed:
        """Return the parts of the complete answer."""
        text = "".join(self._text.feed(chunk.token_ids) for chunk in self.chunks) + self._text.finish()
        return self._read(text) if self._use.parses else Parsed(text, "", [], [])

    def _read(self, text: str) -> Parsed:
        """Return the parts of a text with special tokens, of which the last may be an end that no format knows."""
        parsed, last = self._use.parsed(text, self._format), self.chunks[-1]
        if last.finish_reason == "stop" and last.token_ids and not self._tokenizer.decode(last.token_ids[-1:]):
            end = self._tokenizer.decode_all(last.token_ids[-1:])
            if parsed.content.endswith(end):
                return parsed._replace(content=parsed.content.removesuffix(end).rstrip())
        return parsed

    def said(self) -> Said:
        """Return the complete answer without a form."""
        parsed = self.parsed()
        return Said(
            content=parsed.content,
            reasoning=parsed.reasoning,
            calls=tuple(parsed.calls),
            finish_reason=str(self.chunks[-1].finish_reason),
            prompt_ids=self.prompt,
            token_ids=self._joined("token_ids"),
            log_probs=self._joined("log_probs"),
            weight_versions=self._joined("weight_versions"),
        )

    def whole(self) -> dict[str, Any]:
        """Return the complete choice."""
        parsed = self.parsed()
        message: dict[str, Any] = {"content": parsed.content, "refusal": None}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message |= {"content": parsed.content or None, "tool_calls": [call_of(call) for call in parsed.calls]}
        return self._choice(message, parsed.content, self.chunks, bool(parsed.calls), key="message")

    def prompt_log_probs(self) -> list[dict[str, Any] | None]:
        """Return the log-probs of the prompt's tokens in vLLM's form: by token id, none for the first."""
        texts, found = self._tokenizer.texts, self._prompt_found()
        listed: list[dict[str, Any] | None] = [None]
        for token, (value, rank, top) in zip(self.prompt[1:], found, strict=False):
            ranked = {each: (rank, log_prob) for rank, (each, log_prob) in enumerate(top, 1)} | {token: (rank, value)}
            listed.append(
                {
                    str(each): {"logprob": log_prob, "rank": place, "decoded_token": texts.text(each)}
                    for each, (place, log_prob) in ranked.items()
                }
            )
        return listed

    def _joined(self, name: str) -> tuple[Any, ...]:
        return tuple(value for chunk in self.chunks for value in getattr(chunk, name))

    def _choice(
        self, said: dict[str, Any], text: str, chunks: Sequence[GenerateChunk], calls: bool = False, key: str = "delta"
    ) -> dict[str, Any]:
        first, self._begun = not self._begun, True
        reason = "tool_calls" if calls else chunks[-1].finish_reason
        choice: dict[str, Any] = {"index": self.index, "finish_reason": reason}
        body = self._body
        if body.chat:
            choice[key] = {"role": "assistant", **said} if first else said
        else:
            choice["text"] = (self._tokenizer.decode(self.prompt) if first and body.echoes else "") + text
        choice["logprobs"] = self._log_probs(chunks, first and body.echoes) if body.wants_log_probs else None
        if first and body.prompt_logprobs is not None and not body.chat:
            choice["prompt_logprobs"] = self.prompt_log_probs()
        if body.return_token_ids:
            choice["token_ids"] = [token for chunk in chunks for token in chunk.token_ids]
            choice["weight_versions"] = [version for chunk in chunks for version in chunk.weight_versions]
            if first:
                choice["prompt_token_ids"] = list(self.prompt)
        return choice

    def _prompt_found(self) -> Sequence[Any]:
        chunk = self.chunks[0]
        return chunk.prompt if isinstance(chunk, ShapedChunk | ShapedResult) else ()

    def _told(self, chunks: Sequence[GenerateChunk], echoes: bool) -> list[_Told]:
        told: list[_Told] = []
        if echoes:
            told = [(self.prompt[0], None, ())]
            told += [
                (token, found[0], found[2]) for token, found in zip(self.prompt[1:], self._prompt_found(), strict=False)
            ]
        for chunk in chunks:
            shaped = chunk.likeliest if isinstance(chunk, ShapedChunk | ShapedResult) else ()
            likeliest = shaped or ((),) * len(chunk.token_ids)
            told += zip(chunk.token_ids, chunk.log_probs, likeliest, strict=False)
        return told

    def _log_probs(self, chunks: Sequence[GenerateChunk], echoes: bool) -> dict[str, Any]:
        told, count = self._told(chunks, echoes), self._body.top_log_probs
        if self._body.chat:
            content = [
                {
                    **self._entry(token, value),
                    "top_logprobs": [self._entry(each, log_prob) for each, log_prob in top[:count]],
                }
                for token, value, top in told
            ]
            return {"content": content, "refusal": None}
        tops = []
        for token, value, top in told:
            likeliest = {self._name(each, "bytes:"): log_prob for each, log_prob in top[:count]}
            tops.append(None if value is None else likeliest | {self._name(token, "bytes:"): value})
        tokens = [token for token, _, _ in told]
        return {
            "tokens": [self._name(token, "bytes:") for token in tokens],
            "token_logprobs": [value for _, value, _ in told],
            "top_logprobs": tops,
            "text_offset": self._offsets.of(tokens),
        }

    def _entry(self, token: int, value: float | None) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": value, "bytes": list(self._tokenizer.texts.bytes(token))}

    def _name(self, token: int, prefix: str = "") -> str:
        as_id = self._body.return_tokens_as_token_ids
        return f"token_id:{token}" if as_id else self._tokenizer.texts.text(token, prefix)


def call_of(call: ToolCall) -> dict[str, Any]:
    """Return a tool call in OpenAI's form."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_text(call)}}


@attrs.frozen
class Answer:
    """The data that all choices of a request share."""

    body: Body
    model: str
    choices: list[Choice]
    id: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    created: int = attrs.field(factory=lambda: int(time.time()))

    @property
    def public_id(self) -> str:
        """Return the id that clients see."""
        return f"{'chatcmpl' if self.body.chat else 'cmpl'}-{self.id}"

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        body = self.body
        found = {**self._head(""), "choices": [choice.whole() for choice in self.choices], "usage": self.usage()}
        if body.chat and body.return_token_ids:
            found["prompt_token_ids"] = list(self.choices[0].prompt)
        if body.chat and body.prompt_logprobs is not None:
            found["prompt_logprobs"] = self.choices[0].prompt_log_probs()
        return found

    def event(self, choices: list[dict[str, Any]], usage: bool = False) -> dict[str, Any]:
        """Return one event of a stream."""
        event = {**self._head(".chunk" if self.body.chat else ""), "choices": choices}
        return {**event, "usage": self.usage()} if usage else event

    def usage(self) -> dict[str, int]:
        """Count prompt and answer tokens; a prompt counts once for all of its answers."""
        prompt = sum(len(choice.prompt) for choice in self.choices) // self.body.choices
        completion = sum(choice.completion_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _head(self, suffix: str) -> dict[str, Any]:
        kind = "chat.completion" if self.body.chat else "text_completion"
        return {"id": self.public_id, "object": kind + suffix, "created": self.created, "model": self.model}
