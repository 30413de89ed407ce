"""The endpoint beside a rollout server, for servers that have the setting ``openai``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield.abc.rollout import BaseRolloutServer
from jackfield_openai.settings import EndpointConfig

if TYPE_CHECKING:
    from jackfield_openai.endpoint import OpenAIEndpoint


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
