"""Games of TextWorld, from files or made by seed. It needs only the standard library until one is made."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any


def make(
    file: str | None = None,
    rooms: int = 2,
    objects: int = 5,
    quest_length: int = 2,
    max_steps: int = 50,
    kept: int = 64,
) -> TextWorld:
    """Play ``file`` (.z8, .ulx or .json), or games of this size that each seed makes; ``kept`` of these are kept."""
    import textworld

    return TextWorld(textworld, file, {"rooms": rooms, "objects": objects, "quest": quest_length}, max_steps, kept)


class TextWorld:
    """A game, with its admissible commands as ``actions``. The reward of a step is the change of the score."""

    def __init__(self, textworld: Any, file: str | None, size: dict[str, int], max_steps: int, kept: int) -> None:
        self._library, self._file, self._size, self._max_steps, self._kept = textworld, file, size, max_steps, kept
        if file is not None and not Path(file).is_file():
            raise FileNotFoundError(f"there is no file {file}")
        names = ("description", "inventory", "admissible_commands", "score", "max_score", "won", "lost", "objective")
        self._wanted = textworld.EnvInfos(**dict.fromkeys(names, True))
        self._folder = Path(tempfile.mkdtemp(prefix="jackfield-textworld-"))
        self._game: Any = None
        self._playing: str | None = None

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin the game of a seed."""
        file = self._file or self._made(seed or 0)
        if file != self._playing:
            if self._game is not None:
                self._game.close()
            self._game, self._playing = self._library.start(file, request_infos=self._wanted), file
        self._state = self._game.reset()
        self._steps = 0
        return f"{self._state.objective}\n{self._state.description}".strip(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Give a command."""
        before = self._state.score
        self._state, _, done = self._game.step(action.strip())
        self._steps += 1
        reward = float(self._state.score - before)
        ended = bool(done or self._state.won or self._state.lost)
        text = self._state.feedback.partition("\n\n>")[0].strip()  # without the prompt and the status line
        return text, reward, ended, not ended and self._steps >= self._max_steps, self._info()

    def close(self) -> None:
        """Close the game, and remove the games that were made."""
        if self._game is not None:
            self._game.close()
        self._game = self._playing = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _info(self) -> dict[str, Any]:
        state = self._state
        return {"actions": list(state.admissible_commands or ()), "won": bool(state.won), "score": state.score}

    def _made(self, seed: int) -> str:
        path = self._folder / f"{seed}.z8"
        if not path.exists():
            old = sorted(self._folder.glob("*.z8"), key=lambda each: each.stat().st_mtime)
            for each in old[: max(0, len(old) - self._kept + 1)]:
                for file in self._folder.glob(f"{each.stem}.*"):
                    file.unlink()
            options = self._library.GameOptions()
            options.seeds, options.path = seed, str(path)
            options.nb_rooms, options.nb_objects = self._size["rooms"], self._size["objects"]
            options.chaining.max_depth = options.chaining.max_length = self._size["quest"]
            self._library.generator.compile_game(self._library.generator.make_game(options), options)
        return str(path)
