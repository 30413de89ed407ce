"""Open rollouts: which one a request belongs to, which ones are free, and when each has ended."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Mapping
from typing import Any

import attrs

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded
from jackfield_agent_gateway.recording import Recording
from jackfield_openai.text import ClientError
from jackfield_openai.web import same_key

_REMEMBERED = 10_000  #: ended rollouts whose keys are still known
_RETRY_SECONDS = 1


@attrs.define(eq=False)
class Rollout:
    """One open rollout and its recording."""

    name: str
    fields: Mapping[str, Any]
    recording: Recording
    clock: Clock
    deadline: float | None = None
    key: str = attrs.field(factory=lambda: _new_key(), repr=False)
    own_key: str | None = None  #: with which a client has taken it
    restarts: int = 0  #: attempts of its program that were dropped
    is_claimed: bool = False
    active: int = 0  #: requests that are being answered
    last: float = 0.0  #: when the last one ended
    reward: float | None = None
    metrics: dict[str, float] = attrs.field(factory=dict)
    responses: dict[str, list[dict[str, Any]]] = attrs.field(factory=dict)  #: conversations by id of a response
    finished: asyncio.Event = attrs.field(factory=asyncio.Event)
    rewarded: asyncio.Event = attrs.field(factory=asyncio.Event)

    @property
    def task(self) -> str:
        """Return what rollouts of one group have in common."""
        return str(self.fields.get("task_id", self.name))

    def forget(self) -> None:
        """Drop what an attempt of the program has left, and begin with an empty recording and another key."""
        self.key, self.recording, self.reward = _new_key(), self.recording.restarted(), None
        self.metrics, self.responses = {}, {}
        self.finished, self.rewarded = asyncio.Event(), asyncio.Event()
        self.restarts += 1

    def shown(self, address: str) -> dict[str, Any]:
        """Return what a program needs to know."""
        left = None if self.deadline is None else round(self.deadline - self.clock.time(), 3)
        return {"id": self.name, "key": self.key, "base_url": address, "task": dict(self.fields), "seconds_left": left}


class Rollouts:
    """The open rollouts of a gateway, by their keys."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[str, Rollout] = {}  #: by name and by key, own keys of clients among them
        self._ended: dict[str, None] = {}  #: keys of ended rollouts, the oldest first
        self._free: deque[Rollout] = deque()
        self._groups: dict[str, str] = {}  #: the task of each group of clients' own keys
        self._news = asyncio.Event()

    def add(self, rollout: Rollout, *, is_free: bool) -> None:
        """Open a rollout; a free one can be claimed."""
        self._open[rollout.name] = self._open[rollout.key] = rollout
        if is_free:
            self._free.append(rollout)
            self._tell()

    def remove(self, rollout: Rollout) -> None:
        """Close a rollout. Its keys are remembered, for messages."""
        self._end(rollout)
        if rollout in self._free:
            self._free.remove(rollout)
        if all(each.task != rollout.task for each in self._open.values()):
            self._groups = {group: task for group, task in self._groups.items() if task != rollout.task}

    def restart(self, rollout: Rollout) -> None:
        """Drop what was recorded of a rollout. Its earlier key is that of a rollout that has ended."""
        self._end(rollout)
        self._ended.pop(rollout.name, None)
        rollout.forget()
        self._open[rollout.name] = self._open[rollout.key] = rollout

    def with_key(self, key: str) -> Rollout | None:
        """Return the open rollout whose secret key this is; ``ClientError`` if it has ended."""
        rollout = self.find(key)
        return rollout if rollout is not None and same_key(key, rollout.key) else None

    def with_own_key(self, key: str) -> Rollout | None:
        """Return the open rollout that was taken with an own key; ``ClientError`` if the key is another one's name."""
        if (rollout := self.find(key)) is not None and rollout.own_key != key:
            raise unknown_key()
        return rollout

    def find(self, key: str) -> Rollout | None:
        """Return the open rollout of a name or key; ``ClientError`` if it has ended."""
        if (rollout := self._open.get(key)) is None and key in self._ended:
            raise ClientError("the rollout of this key has ended", "rollout_ended", status=410)
        return rollout

    async def claim(self, seconds: float, own_key: str | None = None) -> Rollout:
        """Take a free rollout, for which to wait so long; else ``ClientError`` with 503.

        With an own key ``GROUP/N`` the rollouts of one group are of one task. If all rollouts of that task are taken,
        the error has status 400, which clients do not try again.
        """
        group = None if own_key is None else own_key.rpartition("/")[0]
        until = self._clock.time() + seconds
        while (rollout := self._take(group)) is None:
            news, left = self._news, until - self._clock.time()
            try:
                await self._clock.wait_for(news.wait(), max(0.0, left), "a free rollout")
            except DeadlineExceeded as error:
                if group in self._groups:
                    raise self._full(str(group), seconds) from error
                text = f"no rollout is free; waited {seconds:g} s for a free rollout of the run"
                raise ClientError(text, "no_rollout", status=503, retry_after=_RETRY_SECONDS) from error
            if own_key is not None and (known := self._open.get(own_key)) is not None:
                return known  # another request with this key has taken it
        rollout.is_claimed = True
        rollout.last = self._clock.time()
        if own_key is not None:
            self._open[own_key], rollout.own_key = rollout, own_key
        return rollout

    def release(self, own_key: str) -> None:
        """Let an own key take another rollout, after its own one was finished by request."""
        self._ended.pop(own_key, None)

    def counts(self) -> dict[str, int]:
        """Return how many rollouts are open, and how many of them are free."""
        return {"open": len({id(each) for each in self._open.values()}), "free": len(self._free)}

    def _take(self, group: str | None) -> Rollout | None:
        if not group:
            return self._free.popleft() if self._free else None
        task, taken = self._groups.get(group), set(self._groups.values())
        for rollout in self._free:
            if rollout.task == task or (task is None and rollout.task not in taken):
                self._free.remove(rollout)
                self._groups[group] = rollout.task
                return rollout
        return None

    def _full(self, group: str, seconds: float) -> ClientError:
        taken = {id(each) for each in self._open.values() if each.task == self._groups[group]}
        text = (
            f"the task of group {group[:100]!r} has no further rollout: all {len(taken)} are taken, and none has "
            f"opened in {seconds:g} s. Use the key of another group"
        )
        return ClientError(text, "group_full")

    def _end(self, rollout: Rollout) -> None:
        keys = [key for key, found in self._open.items() if found is rollout]
        for key in keys:
            del self._open[key]
            self._ended[key] = None
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def unknown_key() -> ClientError:
    """Return the error of a key that does not open what was asked for."""
    return ClientError("the key is missing, or names no open rollout", "invalid_api_key", status=401)


def _new_key() -> str:
    return f"jf-{secrets.token_urlsafe(18)}"
