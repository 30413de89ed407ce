"""Environments that hang, crash and misbehave, for tests. An episode ends after three steps."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

Result = tuple[str, float, bool, bool, dict[str, Any]]


class Rough:
    """Does what an action says. ``folder`` gets a file for each object that is made, and for each that is closed."""

    def __init__(self, folder: str, make: str = "well", reset: str = "well") -> None:
        self._folder, self._reset = Path(folder), reset
        self._id = f"{os.getpid()}-{time.time_ns()}"
        (self._folder / f"made-{self._id}").touch()
        if make != "well":
            _misbehave(make)

    def reset(self, *, seed: int | None = None, level: str = "easy") -> tuple[str, dict[str, Any]]:
        """Begin; hang or crash the first time if that was ordered."""
        mark = self._folder / "was-reset"
        if self._reset != "well" and not mark.exists():
            mark.touch()
            _misbehave(self._reset)
        self._steps = 0
        return f"seed {seed}, level {level}", {"pid": os.getpid(), "id": self._id}

    def step(self, action: str) -> Result:
        """Do what the action says."""
        self._steps += 1
        _misbehave(action)
        if action == "odd":
            return ("too", "short")  # type: ignore[return-value]
        if action == "text":
            return "", "1.0", False, False, {}  # type: ignore[return-value]
        if action.startswith("say"):
            print(action, end="" if action.endswith("-") else None)
        if action == "infinite":
            return "", float("inf"), False, False, {}
        return f"did {action}", 1.5, self._steps >= 3, False, {"pid": os.getpid()}

    def close(self) -> None:
        """Leave a mark."""
        (self._folder / f"closed-{self._id}").touch()


class Slow(Rough):
    """The same with coroutine functions."""

    async def reset(self, *, seed: int | None = None, level: str = "easy") -> Any:  # type: ignore[override]
        """Begin."""
        await asyncio.sleep(0)
        return super().reset(seed=seed, level=level)

    async def step(self, action: str) -> Any:  # type: ignore[override]
        """Do what the action says; ``wait`` never ends."""
        if action == "wait":
            await asyncio.Event().wait()
        return super().step(action)


def _misbehave(how: str) -> None:
    if how == "hang":
        while not Path(os.environ.get("ROUGH_RELEASE", "/nowhere")).exists():
            time.sleep(0.01)
    if how == "crash":
        os._exit(3)
    if how == "raise":
        raise ValueError("the dragon ate the key")


def needs_a_package() -> None:
    """Import what is nowhere."""
    import a_package_that_is_nowhere  # type: ignore[import-not-found]  # noqa: F401


value = 3
