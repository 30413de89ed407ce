"""Settings of the endpoint; importable without a web server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs
from attrs.validators import ge, gt, le

from jackfield.abc.rollout import BaseRolloutServer
from jackfield.sdk import option
from jackfield_tool_calls import Format

if TYPE_CHECKING:
    from jackfield_openai.endpoint import OpenAIEndpoint


@attrs.frozen(kw_only=True)
class EndpointConfig:
    """An OpenAI-compatible address beside a replica."""

    port: int = option(0, "of the first replica, the next ones count on; 0: a free one", [ge(0), le(65535)])
    api_key: str | None = option(None, "what clients send as bearer token; needed where it does not listen on loopback")
    model_name: str | None = option(None, "under which clients ask for the model; null: any name will do")
    request_seconds: float = option(600.0, "the longest that one request may take", gt(0.0))
    max_body_bytes: int = option(16 * 2**20, "a longer request is refused", gt(0))
    max_choices: int = option(512, "answers of one request, prompts times n; more are refused", ge(1))
    max_connections: int = option(512, "at a time; further ones are answered with 503", ge(1))
    idle_seconds: float = option(
        30.0, "a connection is closed that has sent no whole header for so long, at first or after an answer", gt(0.0)
    )
    tool_format: Literal["auto"] | Format = option(
        "auto", "of tool calls in the model's answers, by the name of its family; auto: as its chat template shows them"
    )
    collect: str | None = option(None, "folder in which answers are kept as samples, with users' rewards; null: none")
    collect_lines: int = option(10_000, "lines that may wait for the disk; further ones are dropped and counted", ge(1))
    body_seconds: float = option(30.0, "the longest that a request's body may take to come", gt(0.0))


class Address:
    """The endpoint of a replica whose settings ask for one. A web server is imported only then."""

    def __init__(self) -> None:
        self._endpoint: OpenAIEndpoint | None = None

    async def open(self, server: BaseRolloutServer, config: EndpointConfig | None) -> str | None:
        """Begin to listen beside a started server; return the base URL, or None without settings."""
        if config is None:
            return None
        from jackfield_openai.endpoint import OpenAIEndpoint

        self._endpoint = OpenAIEndpoint(server, config)
        return await self._endpoint.start()

    async def close(self) -> None:
        """Stop to listen. May be called again."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.close()
