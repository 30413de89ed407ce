"""The settings of the agent."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs.validators import ge, gt, le, min_len

from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield_tool_calls import Format


@attrs.frozen(kw_only=True)
class InlineCall:
    """A call within the model's answer, whose result is put behind it: between two texts."""

    begin: str = option("<tool>", "The text before a call.", min_len(1))
    end: str = option("</tool>", "The text after it, at which the model stops.", min_len(1))
    tool: str | None = option(None, "The tool that is called; null: the call is JSON with name and arguments.")
    argument: str = option("query", "With `tool`: the argument that gets the text.", min_len(1))
    result: str = option("<result>{text}</result>", "What is put behind the call; {text} is the result.")

    def __attrs_post_init__(self) -> None:
        if "{text}" not in self.result:
            raise ConfigError("result has no {text}", where="result", expected="a text with {text}", found=self.result)


@attrs.frozen(kw_only=True)
class Config:
    """Settings of how calls look, and of when the loop ends."""

    format: Format | Literal["auto", "inline"] = option(
        "auto", "How the model writes calls; auto: as the chat template shows them; inline: within its answer."
    )
    inline: tuple[InlineCall, ...] = option((), "inline: the texts around calls; empty: <tool>…</tool>.")
    show_tools: bool | None = option(
        None, "Whether the chat template shows the tools' schemas to the model; null: unless the format is inline."
    )
    max_turns: int = option(8, "Answers of the model; calls in the last one are not made.", [ge(1), le(4096)])
    max_parallel: int = option(16, "Calls of one answer that run at a time.", [gt(0), le(4096)])
    error_role: Literal["tool", "user"] = option(
        "tool", "The role of the message that tells the model of a call that cannot be read."
    )
    on_overflow: Literal["truncate", "end"] = option(
        "truncate", "What happens to a result for which the context has no room: it is cut, or the rollout ends."
    )
    on_template_change: Literal["refuse", "fork", "keep"] = option(
        "refuse",
        "What happens if the chat template would render earlier turns otherwise: the rollout fails, goes on in another "
        "sequence, or goes on with what the model saw.",
    )

    def __attrs_post_init__(self) -> None:
        if self.inline and self.format != "inline":
            found, fix = f"format {self.format}", "set format: inline, or remove inline"
            raise ConfigError(f"inline has no effect with {found}", where="inline", found=found, fix=fix)

    @property
    def marks(self) -> tuple[InlineCall, ...]:
        """The texts around inline calls."""
        return self.inline or (InlineCall(),)
