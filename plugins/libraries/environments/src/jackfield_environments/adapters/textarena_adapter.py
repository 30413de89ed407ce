"""Games of textarena, alone or against opponents. It needs only the standard library until one is made."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

_MOVE = re.compile(r"\[[^\[\]]+\]")


def make(
    id: str, players: int = 1, player: int = 0, opponent: str = "random", settings: dict[str, Any] | None = None
) -> TextArena:
    """Make the game ``id``; the agent is ``player``, and the others take their last offered move, or a random one.

    ``opponent`` is ``random`` or ``first``: which of the moves in brackets, as the game last showed them, others take.
    """
    import textarena

    given = settings or {}
    textarena.make(id, **given)  # unknown names and settings are refused here
    return TextArena(lambda: textarena.make(id, **given), players, player, opponent)


class TextArena:
    """A game whose text the agent reads at its turns. The reward of the game comes with its last step.

    Each reset makes another game: wrappers of the library keep the text of earlier episodes.
    """

    def __init__(self, make_game: Callable[[], Any], players: int, player: int, opponent: str) -> None:
        if opponent not in ("random", "first"):
            raise ValueError(f"an opponent is 'random' or 'first', not {opponent!r}")
        self._make_game, self._players, self._player, self._opponent = make_game, players, player, opponent

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin a game; opponents move until it is the agent's turn."""
        self._rng = random.Random(seed)
        self._game = self._make_game()
        self._game.reset(num_players=self._players, seed=seed)
        text, done = self._until_own_turn(False)
        if done:
            raise RuntimeError("the game ended before the agent's first turn")
        return text, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Move, and let the opponents move."""
        done, _ = self._game.step(action)
        text, done = self._until_own_turn(done)
        if not done:
            return text, 0.0, False, False, {}
        rewards, infos = self._game.close()
        reward = float((rewards or {}).get(self._player, 0.0))
        info = dict((infos or {}).get(self._player) or {})
        plain = {name: value for name, value in info.items() if isinstance(value, str | int | float | bool)}
        return str(info.get("reason") or ""), reward, True, False, {**plain, "won": reward > 0}

    def close(self) -> None:
        """Do nothing: a game is closed when it ends."""

    def _until_own_turn(self, done: bool) -> tuple[str, bool]:
        while not done:
            player, observation = self._game.get_observation()
            text = observation if isinstance(observation, str) else "\n".join(str(part[1]) for part in observation)
            if player == self._player:
                return text, False
            done, _ = self._game.step(self._move(text))
        return "", True

    def _move(self, text: str) -> str:
        moves: list[str] = (
            _MOVE.findall(text.splitlines()[-1] if text.strip() else "") or _MOVE.findall(text) or ["[pass]"]
        )
        chosen: str = moves[0] if self._opponent == "first" else self._rng.choice(moves)
        return chosen
