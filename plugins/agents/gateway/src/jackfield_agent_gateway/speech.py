"""What clients hear of an answer while the model still generates it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import attrs

from jackfield.abc.rollout import GenerateChunk
from jackfield_openai.said import Head
from jackfield_openai.text import TextStream
from jackfield_tool_calls import Format, begins_thought, certain

_TAIL = 16  #: tokens of a prompt that show whether it begins the model's reasoning


@attrs.frozen(kw_only=True, eq=False)
class Piece:
    """The next part of one answer."""

    choice: int
    content: str
    reasoning: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


@attrs.define(eq=False)
class Listener:
    """A client that streams an answer."""

    pieces: asyncio.Queue[Piece | None] = attrs.field(factory=asyncio.Queue)  #: None: nothing more comes
    head: Head = attrs.field(factory=Head)  #: of the answer, once its first piece is there


class Speech:
    """One answer, as far as its text is certain.

    ``plain``: all of it is content; otherwise reasoning is split off, and with a ``format`` calls are.
    """

    def __init__(
        self,
        choice: int,
        decode: Callable[[Sequence[int], bool], str],
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        format: Format | None,
        plain: bool,
    ) -> None:
        self._choice, self._format, self._plain = choice, format, plain
        self._stream = TextStream(lambda ids: decode(ids, format is None), stop)
        self._thinks = not plain and begins_thought(decode(prompt_ids[-_TAIL:], False))
        self._text = self.content = self.reasoning = ""

    def hear(self, chunk: GenerateChunk) -> Piece:
        """Return what has become certain with some tokens."""
        self._text += self._stream.feed(chunk.token_ids)
        found = (self._text, "") if self._plain else certain(self._text, self._format, thinks=self._thinks)
        before, (self.content, self.reasoning) = (len(self.content), len(self.reasoning)), found
        return Piece(
            choice=self._choice,
            content=self.content[before[0] :],
            reasoning=self.reasoning[before[1] :],
            token_ids=tuple(chunk.token_ids),
            log_probs=tuple(chunk.log_probs),
        )

    def fits(self, content: str, reasoning: str) -> bool:
        """Return whether an answer begins with what clients have heard."""
        thought = not self.content or reasoning == self.reasoning  # text begins after the reasoning
        return thought and content.startswith(self.content) and reasoning.startswith(self.reasoning)
