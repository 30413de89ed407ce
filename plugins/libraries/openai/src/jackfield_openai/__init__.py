"""An endpoint that speaks OpenAI's API in front of any rollout server."""

from __future__ import annotations

from jackfield_openai.address import Address
from jackfield_openai.settings import EndpointConfig

__all__ = ["Address", "EndpointConfig"]
