"""What the calls of a reward share: limits and their turns, the circuit breaker, and the cache of scores."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import msgspec

from jackfield.abc.reward import ScoreResult
from jackfield.clock import Clock
from jackfield.config.reward_service import RewardServiceConfig
from jackfield.errors import RewardError

Order: TypeAlias = tuple[int, str]  #: priority and group: a lower one gets its turn first
_TICK = 1e-6  #: seconds below which a wait is none
_BURST = 0.05  #: share of a second, and of a minute of tokens, that may be used at once


@attrs.define(eq=False)
class Call:
    """A call of an agent, which may take several turns."""

    order: Order = (0, "")
    parent: Call | None = None  #: the call of another service in which it is made
    holds: Limits | None = None  #: the limits of which it has a turn for all that it does
    waiting: int = 0  #: number of turns that it waits for
    _paused: float = 0.0  #: seconds of earlier waits
    _since: float = 0.0  #: when the first of the present waits began

    def wait(self, now: float, more: int) -> None:
        """Record that a wait for a turn begins (``more`` is 1) or ends (-1), also for the calls around this one."""
        if more > 0 and not self.waiting:
            self._since = now
        self.waiting += more
        if not self.waiting:
            self._paused += now - self._since
        if self.parent is not None:
            self.parent.wait(now, more)

    def has_turn(self, limits: Limits) -> bool:
        """Return whether it, or a call around it, has a turn of these limits."""
        return self.holds is limits or (self.parent is not None and self.parent.has_turn(limits))

    def paused(self, now: float) -> float:
        """Return the seconds that it has waited for turns."""
        return self._paused + (now - self._since if self.waiting else 0.0)


CALL: ContextVar[Call | None] = ContextVar("jackfield_reward_call", default=None)  #: the call that a task belongs to


@attrs.define(eq=False)
class Limits:
    """Turns of all calls of a service, in the order of priority, and the counters of the calls."""

    settings: RewardServiceConfig
    clock: Clock
    most: int | None = None  #: turns at a time
    in_progress: int = attrs.field(default=0, init=False)
    counts: dict[str, float] = attrs.field(factory=dict, init=False)  #: by name, since they were last taken
    _waiting: list[tuple[Order, int, asyncio.Future[None]]] = attrs.field(factory=list, init=False)
    _numbers: itertools.count[int] = attrs.field(factory=itertools.count, init=False)
    _next: float = attrs.field(default=0.0, init=False)  #: when the next turn may begin
    _tokens: float = attrs.field(default=0.0, init=False)  #: that were used and have not been regained
    _at: float = attrs.field(default=0.0, init=False)  #: when ``_tokens`` was computed
    _mean: float = attrs.field(default=0.0, init=False)  #: tokens of a turn, which the next one is expected to use
    _timer: asyncio.Task[None] | None = attrs.field(default=None, init=False)

    @property
    def waiting(self) -> int:
        """Return the number of calls that wait for their turn."""
        return len(self._waiting)

    def count(self, name: str, number: float = 1.0) -> None:
        """Add to a counter."""
        self.counts[name] = self.counts.get(name, 0.0) + number

    def turn(self, call: Call | None = None) -> Turn:
        """Wait for a turn, and keep it; it gives the function that counts the tokens that it used."""
        return Turn(self, call or CALL.get() or Call())

    def end(self, reserved: float, used: int) -> None:
        """End a turn that has used tokens."""
        self.in_progress -= 1
        if used:
            self._mean = 0.9 * self._mean + 0.1 * used if self._mean else float(used)
            self.count("tokens", used)
        self._tokens += used - reserved
        self._grant()

    async def begin(self, call: Call) -> float:
        """Wait for a turn; return the tokens that it reserves."""
        await self._wait(call)
        self._tokens += self._mean
        return self._mean

    async def _wait(self, call: Call) -> None:
        if not self._waiting and self._delay() == 0.0:
            self._begin()
            return
        began, turn = self.clock.time(), asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (call.order, next(self._numbers), turn))
        call.wait(began, 1)
        try:
            self._grant()
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was granted in the same moment
                self.in_progress -= 1
                self._grant()
            raise
        finally:
            call.wait(now := self.clock.time(), -1)
            self.count("waits/reward/turns", now - began)

    def _delay(self) -> float | None:
        """Return the seconds until a turn may begin; None: not before another one ends."""
        if self.most is not None and self.in_progress >= self.most:
            return None
        now, delays = self.clock.time(), [0.0]
        if self.settings.requests_per_second is not None:
            delays.append(self._next - now)
        if (most := self.settings.tokens_per_minute) is not None:
            per_second = (1 - _BURST) * most / 60
            self._tokens, self._at = max(0.0, self._tokens - (now - self._at) * per_second), now
            delays.append((self._tokens + self._mean - _BURST * most) / per_second if self._tokens else 0.0)
        return delay if (delay := max(delays)) > _TICK else 0.0

    def _begin(self) -> None:
        self.in_progress += 1
        if (rate := self.settings.requests_per_second) is not None:
            self._next = max(self._next, self.clock.time() - _BURST) + 1 / rate

    def _grant(self) -> None:
        """Grant the turns that may begin, and look again when the next one may."""
        while self._waiting:
            if self._waiting[0][2].done():  # given up
                heapq.heappop(self._waiting)
            elif (delay := self._delay()) == 0.0:
                self._begin()
                heapq.heappop(self._waiting)[2].set_result(None)
            else:
                if delay is not None and (self._timer is None or self._timer.done()):
                    self._timer = asyncio.ensure_future(self._later(delay))
                return

    async def _later(self, seconds: float) -> None:
        await self.clock.sleep(seconds)
        self._timer = None
        self._grant()

    def taken(self) -> dict[str, float]:
        """Return the counters, and begin again at 0."""
        counts, self.counts = self.counts, {}
        return counts

    def close(self) -> None:
        """End the timer."""
        if self._timer is not None:
            self._timer.cancel()


@attrs.define(eq=False)
class Turn:
    """A turn, or a part of one that the call has already: another one would wait for the first."""

    limits: Limits
    call: Call
    reserved: float | None = None  #: tokens; None: it is a part of another one
    used: int = 0

    async def __aenter__(self) -> Callable[[int], None]:
        """Wait for the turn."""
        if not self.call.has_turn(self.limits):
            self.reserved = await self.limits.begin(self.call)
        return self._use

    def _use(self, tokens: int) -> None:
        self.used += tokens

    async def __aexit__(self, *_: object) -> None:
        """End the turn."""
        if self.reserved is not None:
            self.limits.end(self.reserved, self.used)
        elif self.used:
            self.limits.count("tokens", self.used)


@attrs.define(eq=False)
class Breaker:
    """Holds calls back while the service that scores does not answer, but for one that tries."""

    settings: RewardServiceConfig
    clock: Clock
    who: str
    _failures: int = attrs.field(default=0, init=False)
    _since: float | None = attrs.field(default=None, init=False)  #: when it opened; None: it is closed
    _tries: int = attrs.field(default=0, init=False)
    _trying: asyncio.Future[None] | None = attrs.field(default=None, init=False)  #: done when the present try ends

    @property
    def is_open(self) -> bool:
        """Return whether calls are held back."""
        return self._since is not None

    async def enter(self) -> bool:
        """Wait until a call may begin; return whether it is a try, which ends with :meth:`leave`.

        Without any success for ``outage_seconds`` raise ``reward.unavailable``.
        """
        while self._since is not None:
            if self.clock.time() - self._since >= self.settings.outage_seconds:
                what, fix = f"no score for {self.settings.outage_seconds:g} s", "look at what the reward calls"
                raise RewardError(f"{what} from {self.who}", code="reward.unavailable", where=self.who, fix=fix)
            if self._trying is not None:
                await asyncio.wait([self._trying])
                continue
            self._trying, self._tries = asyncio.get_running_loop().create_future(), self._tries + 1
            pause = self.settings.breaker_seconds * min(2.0 ** (self._tries - 1), 10.0)
            try:
                await self.clock.sleep(min(pause, self._since + self.settings.outage_seconds - self.clock.time()))
            except asyncio.CancelledError:
                self.leave(None)
                raise
            return True
        return False

    def leave(self, is_available: bool | None, *, tried: bool = True) -> None:
        """Record whether a call reached the service; None: unknown. ``tried``: it was the try."""
        if is_available:
            if self._since is not None:
                self._tell("answers again")
            self._failures, self._since, self._tries = 0, None, 0
        elif is_available is not None:
            self._failures += 1
            if self._since is None and self._failures >= (self.settings.breaker_failures or float("inf")):
                self._since = self.clock.time()
                self._tell(f"failed {self._failures} times in a row; one call at a time tries it from now on")
        if tried and self._trying is not None:
            self._trying.set_result(None)
            self._trying = None

    def _tell(self, what: str) -> None:
        logging.getLogger("jackfield").warning("%s %s", self.who, what)


@attrs.define(eq=False)
class RewardCache:
    """Scores by the digest of what they depend on, in a SQLite file that several processes may share."""

    folder: Path
    _database: sqlite3.Connection = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        file = self.folder / "scores.sqlite"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(file, timeout=10.0, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=OFF")  # after a power failure, scores are computed again
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, result BLOB) WITHOUT ROWID"
            )
        except (OSError, sqlite3.Error) as error:
            fix = "give reward_service.cache a folder that can be written, or remove the file"
            refused: Any = {"code": "reward.cache", "where": str(file), "found": error, "fix": fix}
            raise RewardError("the cache of scores cannot be opened", **refused) from error

    def get(self, keys: Sequence[bytes]) -> list[ScoreResult] | None:
        """Return the results of these keys, if all are there and can be read."""
        found = list[ScoreResult]()
        for key in keys:
            row = None
            with contextlib.suppress(sqlite3.Error):
                row = self._database.execute("SELECT result FROM scores WHERE key = ?", (key,)).fetchone()
            if row is None:
                return None
            found.append(attrs.evolve(msgspec.json.decode(row[0], type=ScoreResult), is_cached=True))
        return found

    def put(self, results: Iterable[tuple[bytes, ScoreResult]]) -> None:
        """Keep results; a full or damaged disk keeps none."""
        rows: list[Any] = [(key, msgspec.json.encode(result)) for key, result in results]
        with contextlib.suppress(sqlite3.Error):
            self._database.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?)", rows)

    def close(self) -> None:
        """Close the file."""
        self._database.close()
