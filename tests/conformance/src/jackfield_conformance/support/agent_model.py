"""A tokenizer and a scripted model for the suite of agents.

Each id of a model token is used once, so an id shows which call generated it. The tokens decode to letters that the
tokenizer encodes to other ids, so text that was tokenised again shows, too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield.errors import RolloutError

_Messages: TypeAlias = Sequence[Mapping[str, Any]]

END = 2  #: the token that ends a turn
FIRST_MODEL_TOKEN = 10_000_000
_SEPARATOR = 3
_ANSWER = 4  #: where the model must answer
_ROLES = {"system": 5, "user": 6, "assistant": 7, "tool": 8}
_OTHER_ROLE = 9
_IMAGE = 10
_LETTERS = 1_000  #: plus the letter's number
_MOST_CALLS = 64
_PIXELS = 8  #: numbers per image


def letters(text: str) -> tuple[int, ...]:
    """Return a token per letter."""
    return tuple(_LETTERS + ord(letter) for letter in text)


def image_parts(messages: _Messages) -> Iterator[Mapping[str, Any]]:
    """Iterate over the parts of the messages' contents that are no text."""
    for message in messages:
        content = message.get("content")
        yield from (part for part in content if part.get("type") != "text") if isinstance(content, list) else ()


class Letters:
    """A chat tokenizer with a token per letter."""

    def __init__(self) -> None:
        self.turns: set[tuple[int, ...]] = set()  #: what ``encode_turn`` and ``encode_text`` returned
        self._texts: dict[int, str] = {}
        self._ids = itertools.count(FIRST_MODEL_TOKEN)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        return (END,)

    def encode_chat(self, messages: _Messages, *, tools: _Messages = ()) -> tuple[int, ...]:
        shown = letters(json.dumps([dict(each) for each in tools])) if tools else ()
        return (*shown, *itertools.chain.from_iterable(map(self._message, messages)), _ANSWER)

    def encode_turn(
        self,
        messages: _Messages,
        *,
        tools: _Messages = (),
        answer: Mapping[str, Any] | None = None,
        closed: bool = True,
    ) -> tuple[int, ...]:
        turn = (*(() if closed else (END,)), _SEPARATOR, *self.encode_chat(messages))
        self.turns.add(turn)
        return turn

    def encode_text(self, text: str) -> tuple[int, ...]:
        self.turns.add(letters(text))
        return letters(text)

    def encode_multi_modal(
        self, messages: _Messages, *, tools: _Messages = ()
    ) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        """Return the tokens, and ``pixel_values``: eight numbers per image, which depend on what the part says."""
        rows: list[list[float]] = []
        for part in image_parts(messages):
            said = json.dumps(part, sort_keys=True, default=str).encode()
            rows.append([float(sum(said[place::_PIXELS])) for place in range(_PIXELS)])
        tokens = self.encode_chat(messages, tools=tools)
        if not rows:
            return tokens, {}
        import numpy as np  # a plugin that knows no images need not have it

        return tokens, {"pixel_values": np.array(rows, np.float32)}

    def encode_multi_modal_turn(self, messages: _Messages, **how: Any) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        return self.encode_turn(messages, **how), self.encode_multi_modal(messages)[1]

    def placeholders(self) -> tuple[int, ...]:
        return ()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(self._text, token_ids))

    def answer(self, text: str) -> tuple[int, ...]:
        """Return new tokens of the model, and the end token."""
        ids = tuple(itertools.islice(self._ids, len(text)))
        self._texts.update(zip(ids, text, strict=True))
        return (*ids, END)

    def made(self, token_ids: Sequence[int]) -> bool:
        """Return whether these tokens are one of the tokenizer's turns and texts, or several in a row."""
        ids = tuple(token_ids)
        reached = {0}
        for end in range(1, len(ids) + 1):
            if any(ids[start:end] in self.turns for start in reached):
                reached.add(end)
        return len(ids) in reached

    def _message(self, message: Mapping[str, Any]) -> tuple[int, ...]:
        content = message.get("content") or ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        tokens: list[int] = []
        for part in parts:
            tokens += letters(part["text"]) if part.get("type") == "text" else (_IMAGE,)
        return (_ROLES.get(message["role"], _OTHER_ROLE), *tokens, _SEPARATOR)

    def _text(self, token: int) -> str:
        if token >= FIRST_MODEL_TOKEN:
            return self._texts[token]
        return chr(token - _LETTERS) if token >= _LETTERS else ""


class Model:
    """A model that answers by script, repeats the last answer, and records its requests.

    An answer ends with the end token, or at a stop text of the request. The call ``hang_at``, counted from 0, never
    ends; ``abort_at`` is aborted after ``abort_tokens`` tokens.
    """

    def __init__(
        self,
        answers: Sequence[str],
        tokenizer: Letters,
        *,
        hang_at: int | None = None,
        abort_at: int | None = None,
        abort_tokens: int = 0,
        fails: bool = False,
    ) -> None:
        self.requests: list[GenerateRequest] = []
        self.calls: list[tuple[GenerateRequest, GenerateResult]] = []  #: those that were answered
        self.running = 0
        self.hangs = asyncio.Event()  #: set when the call ``hang_at`` has started
        self.aborted: GenerateResult | None = None
        self.asked_after_abort = 0
        self.tokenizer = tokenizer
        self._answers = tuple(answers)
        self._hang_at, self._abort_at, self._abort_tokens, self._fails = hang_at, abort_at, abort_tokens, fails

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        call = len(self.requests)
        self.requests.append(request)
        self.asked_after_abort += self.aborted is not None
        if call >= _MOST_CALLS:
            raise RuntimeError(f"the agent has asked the model {call} times for one task, and continues")
        self.running += 1
        try:
            await asyncio.sleep(0)
            if call == self._hang_at:
                self.hangs.set()
                await asyncio.Event().wait()
            if self._fails:
                raise RolloutError("the replica died (says the conformance suite)", code="rollout.stopped")
            return self._answer(call, request)
        finally:
            self.running -= 1

    def _answer(self, call: int, request: GenerateRequest) -> GenerateResult:
        text = self._answers[min(call, len(self._answers) - 1)]
        ends = [text.index(stop) + len(stop) for stop in request.sampling.stop if stop in text]
        token_ids = self.tokenizer.answer(text)
        if ends:
            token_ids = token_ids[: min(ends)]
        finish_reason = "stop"
        if len(token_ids) > request.sampling.max_new_tokens:
            token_ids, finish_reason = token_ids[: request.sampling.max_new_tokens], "length"
        if call == self._abort_at:
            token_ids, finish_reason = token_ids[: self._abort_tokens], "abort"
        result = GenerateResult(
            request_id=request.request_id,
            token_ids=token_ids,
            log_probs=tuple(-(1 + (token + place) % 97) / 100 for place, token in enumerate(token_ids)),
            weight_versions=tuple(call * 3 + place % 2 + 1 for place in range(len(token_ids))),
            finish_reason=finish_reason,  # type: ignore[arg-type]
        )
        self.calls.append((request, result))
        if finish_reason == "abort":
            self.aborted = result
        return result
