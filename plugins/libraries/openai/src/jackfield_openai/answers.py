"""Answers in OpenAI's form, whole and in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.rollout import GenerateChunk
from jackfield_openai.bodies import Body

_UNFINISHED = "\ufffd"  # a character of which not all bytes are there


class ServedTokenizer:
    """The tokenizer of a model folder. A chat template is asked for only by chats.

    Args:
        path: of the folder.
        trust_remote_code: run Python code that the folder brings.

    Raises:
        OSError: there is none.
    """

    def __init__(self, path: str, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=True
        )

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Tokens of a bare text, with those that the tokenizer begins one with."""
        return tuple(self._tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Tokens of a conversation, up to where the model has to answer. Raises what the template raises."""
        found = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        return tuple(found)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of some tokens, without special ones."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


class TextStream:
    """The text of one answer, piece by piece.

    A piece is given out once later tokens cannot change it: characters wait for their last byte, and what may turn out
    to be the beginning of a stop string waits until it is none. The stop string itself is not part of the text.

    Args:
        decode: token ids to text.
        stop: the request's stop strings.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._begin = self._end = 0  # tokens whose text is out; those before _begin are too far back to matter
        self._held = ""
        self._stopped = False

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take further tokens; return the text that is certain now."""
        self._ids.extend(token_ids)
        known = self._decode(self._ids[self._begin : self._end])
        text = self._decode(self._ids[self._begin :])
        if text.endswith(_UNFINISHED):
            return ""
        self._begin, self._end = self._end, len(self._ids)
        return self._release(text[len(known) :], last=False)

    def finish(self) -> str:
        """Return the rest of the text."""
        known = self._decode(self._ids[self._begin : self._end])
        return self._release(self._decode(self._ids[self._begin :])[len(known) :], last=True)

    def _release(self, new: str, last: bool) -> str:
        if self._stopped:
            return ""
        text = self._held + new
        found = [place for string in self._stop if (place := text.find(string)) >= 0]
        if found:
            self._stopped = True
            return text[: min(found)]
        kept = 0 if last else max((_overlap(text, string) for string in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, string: str) -> int:
    """How many characters at the end of ``text`` are the beginning of ``string``."""
    longest = min(len(text), len(string) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(string[:size])), 0)


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
        """A streamed choice with what a chunk adds."""
        self.chunks.append(chunk)
        text = self._text.feed(chunk.token_ids)
        if chunk.finish_reason is not None:
            text += self._text.finish()
        return self._choice("delta", text, [chunk])

    def whole(self) -> dict[str, Any]:
        """The choice once everything has come."""
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
    """What all choices of a request share."""

    body: Body
    model: str
    choices: list[Choice]
    id: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    created: int = attrs.field(factory=lambda: int(time.time()))

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return {**self._head(""), "choices": [choice.whole() for choice in self.choices], "usage": self.usage()}

    def event(self, choices: list[dict[str, Any]], usage: bool = False) -> dict[str, Any]:
        """One event of a stream."""
        event = {**self._head(".chunk" if self.body.chat else ""), "choices": choices}
        return {**event, "usage": self.usage()} if usage else event

    def usage(self) -> dict[str, int]:
        """Count the tokens that went in and came out; a prompt counts once, however many answers it has."""
        prompt = sum(len(choice.prompt) for choice in self.choices) // self.body.choices
        completion = sum(choice.completion_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _head(self, suffix: str) -> dict[str, Any]:
        prefix, kind = ("chatcmpl", "chat.completion") if self.body.chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{self.id}", "object": kind + suffix, "created": self.created, "model": self.model}
