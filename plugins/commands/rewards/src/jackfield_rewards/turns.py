"""Turns of several runs at one reward."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs


@attrs.define(eq=False)
class FairTurns:
    """At most so many turns at a time, which runs that wait get one after the other.

    Within a run, the request with the lowest priority (the oldest batch) comes first. A turn is the same for all runs,
    however many samples they have waiting and whatever the numbers of their batches are.
    """

    most: int
    in_progress: int = attrs.field(default=0, init=False)
    _waiting: dict[str, list[tuple[int, int, asyncio.Future[None]]]] = attrs.field(factory=dict, init=False)
    _next: deque[str] = attrs.field(factory=deque, init=False)  #: runs that have samples waiting
    _numbers: itertools.count[int] = attrs.field(factory=itertools.count, init=False)
    _admitted: int = attrs.field(default=0, init=False)

    @property
    def waiting(self) -> dict[str, int]:
        """The number of requests that wait, by run."""
        return {run: sum(not turn.done() for *_, turn in heap) for run, heap in self._waiting.items()}

    @asynccontextmanager
    async def turn(self, run: str, priority: int) -> AsyncIterator[int]:
        """Wait for a turn and keep it; yield its number."""
        if self.in_progress < self.most and not self._next:
            self.in_progress += 1
        else:
            await self._wait(run, priority)
        self._admitted += 1
        try:
            yield self._admitted
        finally:
            self._give_back()

    async def _wait(self, run: str, priority: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        if run not in self._waiting:
            self._waiting[run] = []
            self._next.append(run)
        heapq.heappush(self._waiting[run], (priority, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was granted in the same moment
                self._give_back()
            raise

    def _give_back(self) -> None:
        self.in_progress -= 1
        while self._next and self.in_progress < self.most:
            run = self._next.popleft()
            heap = self._waiting[run]
            while heap and heap[0][2].done():  # given up
                heapq.heappop(heap)
            if heap:
                self.in_progress += 1
                heapq.heappop(heap)[2].set_result(None)
            if heap:
                self._next.append(run)
            else:
                del self._waiting[run]
