"""An endpoint that speaks OpenAI's API in front of any rollout server. Needs the extra ``jackfield[serve]``."""

from __future__ import annotations

from jackfield.runtime.openai.settings import EndpointConfig

__all__ = ["EndpointConfig"]
