"""The Responses API of the gateway: what its requests ask of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from jackfield_agent_gateway.asking import Ask
from jackfield_agent_gateway.chats import calls_tools, common
from jackfield_openai.grammars import read_grammar
from jackfield_openai.messages import read_messages, read_tools
from jackfield_openai.responses import ResponseBody, read_tool
from jackfield_openai.text import refused


@attrs.frozen(kw_only=True)
class AskingResponseBody(ResponseBody):
    """The body of ``/v1/responses``."""

    def ask(
        self, known: Mapping[str, list[dict[str, Any]]], is_retry: bool, images: bool = False
    ) -> tuple[Ask, list[dict[str, Any]]]:
        """Return what is asked of the model, and the conversation."""
        if read_grammar(self.text_format) is not None:
            raise refused("text.format", "text: nothing else is served", self.text, "unsupported_parameter")
        messages = self.messages(known)
        ask = Ask(
            messages=read_messages(messages, images),
            tools=read_tools([read_tool(tool, place) for place, tool in enumerate(self.tools or ())]),
            calls_tools=calls_tools(self.tool_choice),
            max_tokens=self.max_output_tokens,
            **common(self, is_retry),
        )
        return ask, messages
