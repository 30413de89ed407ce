"""One request while it is generated."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Literal

import attrs

from jackfield.abc.rollout import GenerateRequest
from jackfield.errors import RolloutError
from jackfield.sdk.relay import Running
from jackfield_rollout_transformers.sampling import modes_of


@attrs.define(eq=False)
class Sequence:
    """A running or waiting request, and its tokens so far. Its caller gets them by :meth:`feed`."""

    running: Running
    limit: int  #: of generated tokens
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None = None
    modes: Counter[str] = attrs.field(init=False)
    done: asyncio.Future[None] = attrs.field(init=False, factory=lambda: asyncio.get_running_loop().create_future())
    row: int = -1  #: row in the batch; -1: not in it
    length: int = 0  #: number of its tokens in the KV cache
    token_ids: list[int] = attrs.Factory(list)
    log_probs: list[float] = attrs.Factory(list)
    finish_reason: Literal["stop", "length"] | None = None
    error: RolloutError | None = None  #: why it cannot be generated

    @modes.default
    def _modes(self) -> Counter[str]:
        return modes_of(self.request.sampling)

    @property
    def request(self) -> GenerateRequest:
        """Return the request of its caller."""
        return self.running.request

    @property
    def context(self) -> tuple[int, ...]:
        """Return the tokens to compute when the sequence joins: the prompt and the generated tokens."""
        return (*self.request.prompt_ids, *self.token_ids) if self.token_ids else self.request.prompt_ids

    @property
    def longest(self) -> int:
        """Return the largest number of positions that it may need."""
        return len(self.request.prompt_ids) + self.limit

    def append(self, token: int, log_prob: float) -> bool:
        """Add a generated token; return whether it was the last."""
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        if token in self.stop_ids or (self.stop_strings is not None and self.stop_strings.completed(self.token_ids)):
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.limit:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def fail(self, message: str, fix: str) -> None:
        """Mark the sequence as failed; its caller gets the error."""
        name = self.request.request_id
        self.error = RolloutError(f"request {name!r} failed: {message}", code="rollout.failed", where=name, fix=fix)

    def feed(self, version: int) -> None:
        """Give the caller the tokens since the last call, which weights of ``version`` generated."""
        known = len(self.running.token_ids)
        if known < len(self.token_ids):
            self.running.append(self.token_ids[known:], self.log_probs[known:], version)


class StopStrings:
    """A check whether the newest token completes one of the stop strings.

    Decoding is by far the most expensive part, so it happens only for tokens that can complete a string: those with
    its last character, a part of a character, or text that the tokenizer shows only in context.
    """

    def __init__(self, strings: tuple[str, ...], decode: Callable[[list[int]], str], pieces: dict[int, str]) -> None:
        self._strings = strings
        self._decode = decode
        self._pieces = pieces  # token -> its text alone; shared by all requests of a server
        self._last_characters = frozenset(string[-1] for string in strings)
        self._ends_in_space = any(character.isspace() for character in self._last_characters)
        # nearly every token has at least one byte of text
        self._window = max(len(string.encode()) for string in strings) + 8

    def completed(self, token_ids: list[int]) -> bool:
        """Return whether the last token has completed a string in the text of ``token_ids``."""
        if not self._may_complete(token_ids[-1]):
            return False
        text = self._decode(token_ids[-self._window :])
        return any(string in text for string in self._strings)

    def _may_complete(self, token: int) -> bool:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._decode([token])
        if self._ends_in_space or not piece or "\ufffd" in piece:
            return True
        return not self._last_characters.isdisjoint(piece)
