"""Answers in OpenAI's form, whole and in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import attrs

from jackfield.abc.rollout import GenerateChunk
from jackfield_openai.bodies import Body
from jackfield_openai.text import ServedTokenizer, TextStream


class Choice:
    """One of the texts that a request asks for."""

    def __init__(self, index: int, prompt: tuple[int, ...], body: Body, tokenizer: ServedTokenizer) -> None:
        self.index = index
        self.prompt = prompt
        self.sampling = body.sampling(index)
        self.minimum_weight_version = body.minimum_weight_version
        self.chunks: list[GenerateChunk] = []
        self._body = body
        self._tells_log_probs = body.wants_log_probs
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer.decode, body.stop_strings)
        self._offset = 0

    @property
    def completion_tokens(self) -> int:
        """Return the number of tokens that have come."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    def piece(self, chunk: GenerateChunk) -> dict[str, Any]:
        """Return a streamed choice with the content of a chunk."""
        self.chunks.append(chunk)
        text = self._text.feed(chunk.token_ids)
        if chunk.finish_reason is not None:
            text += self._text.finish()
        return self._choice("delta", text, [chunk])

    def whole(self) -> dict[str, Any]:
        """Return the complete choice."""
        text = "".join(self._text.feed(chunk.token_ids) for chunk in self.chunks) + self._text.finish()
        return self._choice("message", text, self.chunks)

    def _choice(self, chat_key: str, text: str, chunks: Sequence[GenerateChunk]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self.index, "finish_reason": chunks[-1].finish_reason}
        if self._body.chat:
            choice[chat_key] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = self._log_probs(chunks) if self._tells_log_probs else None
        if self._body.return_token_ids:
            choice["token_ids"] = [token for chunk in chunks for token in chunk.token_ids]
            choice["weight_versions"] = [version for chunk in chunks for version in chunk.weight_versions]
            if len(chunks) == len(self.chunks):
                choice["prompt_token_ids"] = list(self.prompt)
        return choice

    def _log_probs(self, chunks: Sequence[GenerateChunk]) -> dict[str, Any]:
        drawn = [pair for chunk in chunks for pair in zip(chunk.token_ids, chunk.log_probs, strict=True)]
        texts = [self._tokenizer.decode([token]) for token, _ in drawn]
        if self._body.chat:
            content = [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, (_, value) in zip(texts, drawn, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [value for _, value in drawn],
            "top_logprobs": None,
            "text_offset": offsets,
        }


@attrs.frozen
class Answer:
    """The data that all choices of a request share."""

    body: Body
    model: str
    choices: list[Choice]
    id: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    created: int = attrs.field(factory=lambda: int(time.time()))

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        return {**self._head(""), "choices": [choice.whole() for choice in self.choices], "usage": self.usage()}

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
        prefix, kind = ("chatcmpl", "chat.completion") if self.body.chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{self.id}", "object": kind + suffix, "created": self.created, "model": self.model}
