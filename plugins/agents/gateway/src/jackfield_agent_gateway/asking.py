"""What a request asks of the model, whatever the form of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from jackfield_agent_gateway.history import digest_of, digests


@attrs.frozen(kw_only=True, eq=False)
class Ask:
    """A request in the form that all kinds of requests have in common."""

    messages: list[dict[str, Any]] = attrs.field(factory=list)  #: for the chat template
    text: str | tuple[int, ...] | None = None  #: of a completion, instead of messages
    tools: tuple[Mapping[str, Any], ...] = ()
    calls_tools: bool = True  #: whether tool calls are looked for, if there are tools
    choices: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = attrs.field(factory=dict)  #: of the client
    is_retry: bool = False  #: the client says that it has sent this before
    streams: bool = False  #: the client hears the answer as it comes
    keys: list[str] = attrs.field(init=False)  #: digests of the conversation after each message
    key: str = attrs.field(init=False)  #: digest of the whole request

    @keys.default
    def _keys(self) -> list[str]:
        begin = digest_of(["chat", [dict(tool) for tool in self.tools]] if self.text is None else ["text"])
        return digests(begin, self.messages) if self.text is None else [digest_of([begin, self.text])]

    @key.default
    def _key(self) -> str:
        asked = (self.choices, self.max_tokens, self.stop, self.stop_token_ids, dict(self.sampling), self.calls_tools)
        return digest_of([self.keys[-1], *asked])
