"""A client of an OpenEnv server. It needs only the standard library until one is made."""

from __future__ import annotations

import json
from typing import Any


def make(
    url: str, action: str = "message", observation: str | None = None, settings: dict[str, Any] | None = None
) -> OpenEnv:
    """Connect to the server at ``url``.

    ``action`` is the field of an action that gets the text, ``settings`` are its other fields; ``observation`` is the
    field of an observation that is the text, by default all of it as JSON.
    """
    from openenv.core import GenericEnvClient

    return OpenEnv(GenericEnvClient(base_url=url).sync(), action, observation, settings or {})


class OpenEnv:
    """An environment on a server, with one session."""

    def __init__(self, client: Any, action: str, observation: str | None, more: dict[str, Any]) -> None:
        self._client, self._action, self._observation, self._more = client, action, observation, more
        self._client.connect()

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        result = self._client.reset(**({} if seed is None else {"seed": seed}))
        return self._text(result.observation), {"observation": result.observation}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take an action."""
        result = self._client.step({**self._more, self._action: action})
        info = {"observation": result.observation}
        return self._text(result.observation), float(result.reward or 0.0), bool(result.done), False, info

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _text(self, observation: Any) -> str:
        if isinstance(observation, dict) and self._observation is not None:
            if self._observation not in observation:
                raise KeyError(f"observations have no field {self._observation!r}: {', '.join(observation)}")
            observation = observation[self._observation]
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
