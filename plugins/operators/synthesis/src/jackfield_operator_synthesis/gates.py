"""What a new response has to pass before a row is made of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs.validators import gt, in_

from jackfield.abc.operator import OperatorContext, Use
from jackfield.errors import ConfigError, OperatorError
from jackfield.sdk import option
from jackfield_user_code import UserCodePool, WorkerLimits, digest_file


@attrs.frozen(kw_only=True)
class GateConfig:
    """Settings of the gate."""

    by: Literal["reward", "verifier", "both"] = option(
        "reward",
        "what scores a new response: the run's reward, your verifier, or both, of which the lower one counts",
        in_(("reward", "verifier", "both")),
    )
    minimum: float = option(1.0, "least score of a new response")
    improvement: float | None = option(None, "how much more than its parent's reward it has at least; null: any")
    verifier: str | None = option(
        None, "folder/file.py:function; it gets row and response, and returns a number or true"
    )
    seconds: float = option(60.0, "longest time of a verifier's call; then its process is killed", gt(0.0))
    workers: int = option(1, "processes that call the verifier", gt(0))

    def __attrs_post_init__(self) -> None:
        """Refuse a verifier that is missing or without effect."""
        if (self.by == "reward") == (self.verifier is not None):
            expected = "the path of a function" if self.verifier is None else "by: verifier or both"
            details: Any = {"where": "gate.verifier", "expected": expected, "found": self.verifier}
            raise ConfigError("the gate's verifier does not fit `by`", **details)


class Gate:
    """Scores new responses, and says which pass."""

    def __init__(self, config: GateConfig, context: OperatorContext) -> None:
        self.config, self.context = config, context
        self._pool: UserCodePool | None = None
        if config.verifier is not None:
            place, separator, name = config.verifier.rpartition(":")
            if not separator or not name.isidentifier() or not Path(place).expanduser().is_file():
                details: Any = {
                    "where": "gate.verifier",
                    "expected": "folder/file.py:function",
                    "found": config.verifier,
                }
                raise ConfigError("a path does not name a function of a file", **details)
            self._file, limits = Path(place).expanduser(), WorkerLimits()
            options: dict[str, Any] = {"workers": config.workers, "clock": context.clock, "limits": limits}
            self._pool = UserCodePool(config.verifier, keywords={}, **options)

    @property
    def uses(self) -> tuple[Use, ...]:
        """Return ``reward`` if the run's reward scores."""
        return () if self.config.by == "verifier" else ("reward",)

    @property
    def version(self) -> str:
        """Return a digest of the verifier's file."""
        return "" if self._pool is None else digest_file(self._file)

    async def start(self) -> None:
        """Start the verifier's processes."""
        if self._pool is not None:
            await self._pool.start()

    async def close(self) -> None:
        """Kill the verifier's processes."""
        if self._pool is not None:
            await self._pool.close()

    async def passed(self, values: Mapping[str, Any], response: str, parent: float | None = None) -> float | None:
        """Return the score of a response to the task of a row; None: it does not pass.

        ``parent`` is the reward of what it was made from. It adds to the counter ``made`` or ``rejected``.
        """
        score = await self._score(values, response)
        better = self.config.improvement is None or parent is None or score >= parent + self.config.improvement
        passes = score >= self.config.minimum and better
        self.context.count("made" if passes else "rejected", 1)
        return score if passes else None

    async def _score(self, values: Mapping[str, Any], response: str) -> float:
        asked = [] if self.config.by == "verifier" else [self.context.score(values, response)]
        asked += [] if self._pool is None else [self._verified(values, response)]
        return min(await asyncio.gather(*asked))

    async def _verified(self, values: Mapping[str, Any], response: str) -> float:
        assert self._pool is not None
        given = {"row": dict(values), "response": response}
        result = await self._pool.call(given, self.config.seconds, "the verifier of new responses")
        if result.status != "ok" or not isinstance(result.value, bool | int | float):
            found = result.error or f"{type(result.value).__name__}"
            what, expected = "a verifier gave no number", "a number, or true or false"
            raise OperatorError(what, where=self.config.verifier, expected=expected, found=found)
        return float(result.value)
