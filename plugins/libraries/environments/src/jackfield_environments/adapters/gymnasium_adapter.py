"""Gymnasium environments with discrete actions, as texts. It needs only the standard library until one is made."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def make(
    id: str,
    actions: Sequence[str] | None = None,
    instructions: str = "",
    settings: dict[str, Any] | None = None,
    max_steps: int | None = None,
) -> GymnasiumText:
    """Make ``gymnasium.make(id, **settings)``; ``actions`` are the words of the actions 0, 1, …"""
    import gymnasium

    given: dict[str, Any] = {"render_mode": "ansi", **(settings or {})}
    if "ansi" not in (gymnasium.spec(id).kwargs.get("render_modes") or _modes(gymnasium, id)):
        given.pop("render_mode")
    environment: Any = gymnasium.make(id, max_episode_steps=max_steps, **given)
    return GymnasiumText(environment, gymnasium, actions, instructions)


def _modes(gymnasium: Any, id: str) -> Sequence[str]:
    entry = gymnasium.spec(id).entry_point
    found = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    return (getattr(found, "metadata", None) or {}).get("render_modes") or ()


class GymnasiumText:
    """A Gymnasium environment whose observations and actions are texts.

    The observation is what the environment draws as text, if it does, else its value. An action is the word or number
    that an answer has last; one without any is not taken and costs nothing.
    """

    def __init__(self, environment: Any, gymnasium: Any, actions: Sequence[str] | None, instructions: str) -> None:
        self._environment, self._instructions = environment, instructions
        space, spaces = environment.action_space, gymnasium.spaces
        self._is_text = isinstance(space, spaces.Text)
        if not self._is_text and not isinstance(space, spaces.Discrete):
            raise TypeError(f"the action space {space} is neither discrete nor text")
        if self._is_text:
            self._names: dict[str, int] = {}
            return
        names = list(actions) if actions is not None else [str(space.start + n) for n in range(int(space.n))]
        if len(names) != int(space.n):
            raise ValueError(f"{len(names)} words for {int(space.n)} actions")
        self._names = {_plain(name): int(space.start) + number for number, name in enumerate(names)}

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        value, _ = self._environment.reset(seed=seed)
        self._value = value
        text = self._text(value)
        return (f"{self._instructions}\n{text}" if self._instructions else text), {"actions": list(self._names)}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the action that a text ends with."""
        info = {"actions": list(self._names), "possible": True}
        chosen: Any = action
        if not self._is_text:
            words = re.findall(r"-?\w+", _plain(action))
            chosen = next((self._names[word] for word in reversed(words) if word in self._names), None)
        if chosen is None:
            text = f"There is no such action. Actions: {', '.join(self._names)}.\n{self._text(self._value)}"
            return text, 0.0, False, False, {**info, "possible": False}
        self._value, reward, terminated, truncated, _ = self._environment.step(chosen)
        return self._text(self._value), float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _text(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        drawn = self._environment.render() if self._environment.render_mode == "ansi" else None
        if not isinstance(drawn, str):
            return str(value)
        return _mark(drawn).strip("\n")


def _mark(drawn: str) -> str:
    """Put what is coloured, such as the player's place, in brackets, and remove escape sequences."""
    return _ESCAPES.sub("", re.sub(r"\x1b\[[1-9][0-9;]*m(.)\x1b\[0m", r"[\1]", drawn))


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).strip().lower()
