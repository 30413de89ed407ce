"""An endpoint that speaks OpenAI's API in front of any rollout server."""

from __future__ import annotations

from jackfield_openai.settings import Address, EndpointConfig

__all__ = ["Address", "EndpointConfig"]
