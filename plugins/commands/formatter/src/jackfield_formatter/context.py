"""The settings of the formatter, and what models get of them."""

from __future__ import annotations

from typing import Any, Literal

import attrs
from attrs.validators import ge, gt, min_len

from jackfield.errors import ConfigError
from jackfield.settings import option
from jackfield_formatter.encoder import Encoder
from jackfield_formatter.pieces import pieces

TEXT_PROMPT = "Continue the text:\n\n{before}"  #: of the pieces of a text


@attrs.frozen(kw_only=True)
class FormatSettings:
    """How records become rows."""

    into: str = option(help="the model: task, sft, dpo, experience, or one of another package", validator=min_len(1))
    map: dict[str, Any] = option(
        factory=dict,
        help="by column of the model, an expression of Jinja over the record's columns; what is not a text is a value",
    )
    function: str | None = option(
        None, "folder/file.py:function or package.module:function, which gets a record and returns one, a list or None"
    )
    shape: str | None = option(None, "the shape of the records; null: recognised")
    answers: str = option(
        "auto",
        "how a final answer is marked: `####` (a last line), `boxed`, a tag's name such as `answer`, whole (not at "
        "all), or auto",
        min_len(1),
    )
    thinking: Literal["keep", "drop"] = option("keep", "whether answers to learn from have what precedes </think>")
    turns: Literal["last", "all"] = option("last", "a row for the last turn of a conversation, or for each one (sft)")
    size: int = option(2000, "the most that a piece of a text without a prompt has (sft)", ge(1))
    unit: Literal["characters", "tokens"] = option("characters", "what `size` counts")
    text_prompt: str = option(TEXT_PROMPT, "the prompt of a piece of a text; {before} is the piece before it (sft)")
    model: str | None = option(None, "folder of the model whose tokens are counted and written")
    chat_template: str | None = option(None, "Jinja chat template that replaces the tokenizer's")
    log_probs: bool = option(
        False,
        "log-probs of the responses under the model in the folder `model`, where records have none (experience)",
    )
    seconds: float = option(60.0, "deadline of the function for a record", gt(0.0))

    def __attrs_post_init__(self) -> None:
        if self.function is not None and (self.map or self.shape):
            other = "map" if self.map else "shape"
            fix = f"leave {other} out: the function returns the columns of the model"
            raise ConfigError("a function has no effect beside it", where=other, expected="one of both", fix=fix)
        if self.model is None and (self.unit == "tokens" or self.log_probs):
            what, expected = "there are no tokens without a model", "the folder of a model as `model`"
            raise ConfigError(what, where="model", expected=expected, found="none")


@attrs.define(kw_only=True, eq=False)
class FormatContext:
    """What a model gets to make rows."""

    settings: FormatSettings
    _encoder: Encoder | None = attrs.field(default=None, init=False)

    @property
    def encoder(self) -> Encoder:
        """The tokenizer of the model in the folder ``model``; without one, ``config.missing-key`` is raised."""
        if self._encoder is None:
            if self.settings.model is None:
                details: dict[str, Any] = {"where": "model", "expected": "the folder of a model", "found": "none"}
                fix = "name the model that is trained: rows of experiences have its tokens"
                what = "these rows have tokens, and no tokenizer is given"
                raise ConfigError(what, code="config.missing-key", fix=fix, **details)
            self._encoder = Encoder(self.settings.model, self.settings.chat_template)
        return self._encoder

    def pieces(self, text: str) -> list[str]:
        """Return a text in pieces of at most ``size`` units."""
        settings = self.settings
        return pieces(text, settings.size, self.encoder.count if settings.unit == "tokens" else len)
