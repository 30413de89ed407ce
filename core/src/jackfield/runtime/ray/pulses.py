"""Heartbeats of the actors of a run, and the end of those that give none."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded
from jackfield.rpc import Process
from jackfield.rpc.heartbeat import LOOKS
from jackfield.runtime.ray.host import Sign
from jackfield.runtime.ray.stub import ENDS, PROCESSES

__all__ = ["SignsOfLife"]

_END_SECONDS = 15.0  #: for a process of another node to be killed
_SHOWN = 4  #: calls of a worker that a message about its end names


class SignsOfLife:
    """Asks one actor what it does, and kills its process when it cannot run, or answers no more from another machine.

    Until its worker is made it imports, and has the deadline of a start.
    """

    def __init__(self, name: str, handle: Any, clock: Clock, heartbeat_seconds: float) -> None:
        self._name = name
        self._handle = handle
        self._clock = clock
        self._silence = heartbeat_seconds
        self._question: asyncio.Future[Sign] | None = None
        self._last: Sign | None = None  #: of a process whose worker was made
        self._watching: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Begin, unless that was done."""
        if self._watching is None or self._watching.done():
            if self._last is not None:
                PROCESSES[self._name] = str(self._last.process)
            self._watching = asyncio.create_task(self._watch(), name=f"heartbeats of {self._name}")

    def close(self) -> None:
        """Leave the actor alone."""
        PROCESSES.pop(self._name, None)  # another actor may have this name later
        ENDS.pop(self._name, None)
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()

    async def _watch(self) -> None:
        silent = 0
        while True:
            heard = self._heard()
            process = None if self._last is None else self._last.process
            if process is not None and process.is_near:  # a dead one is no silent one
                heard = process.can_run() or not process.lives()
            silent = 0 if heard else silent + 1
            if silent > LOOKS:
                await self.end_process()
                silent = 0
            await self._clock.sleep(self._silence / LOOKS)

    def _heard(self) -> bool:
        """Return whether it has answered since the last look; then it is asked again."""
        if self._question is not None and not self._question.done():
            return False
        asked = self._handle.heartbeat.options(concurrency_group="heartbeat").remote()
        self._question = asyncio.wrap_future(asked.future())
        self._question.add_done_callback(self._answered)
        return True

    def _answered(self, question: asyncio.Future[Sign]) -> None:
        if not question.cancelled() and question.exception() is None:  # of others, those tell who wait for the worker
            self._note(question.result())

    def _note(self, sign: Sign) -> None:
        """Remember the process; name the one before, which has died though its worker may not have been in use."""
        last = self._last
        if last is not None and self._name not in ENDS and sign.process != last.process:
            ENDS[self._name] = "its process was started again"
            text = "%s (%s) died; its process was started again"
            logging.getLogger("jackfield").warning(text, self._name, last.process)
        if not sign.ready:
            return
        if last is None or sign.process != last.process:
            PROCESSES[self._name] = str(sign.process)
            ENDS.pop(self._name, None)
        self._last = sign

    async def end_process(self) -> None:
        """Kill the process that has answered last; its death is noticed as every other is."""
        sign = self._last
        if sign is None or self._name in ENDS:  # it has ended, and the next one takes its time to start
            return
        doing = ", ".join(sign.doing[:_SHOWN])
        at_work = f" while it had to {doing}" if doing else ""
        text = f"{self._name} ({sign.process}) sent no heartbeat for {self._silence:g} s{at_work} and was killed"
        ENDS[self._name] = f"{text} (deadlines.heartbeat)"  # before those who wait for it notice
        if await _end_there(sign, self._clock, _END_SECONDS):
            logging.getLogger("jackfield").warning("%s", ENDS[self._name])
        else:
            ENDS.pop(self._name, None)


async def _end_there(sign: Sign, clock: Clock, seconds: float) -> bool:
    """Kill the process that has given a sign, on its node, unless it can run; return whether it was killed.

    Ray itself would ask the process to end, which a stopped one does not hear.
    """
    if sign.process.is_near:
        return sign.process.kill()
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(sign.node, soft=False)
    ended = ray.remote(_end_if_stopped).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    try:
        reference = ended.remote(sign.process)
        return await clock.wait_for(asyncio.wrap_future(reference.future()), seconds, f"{sign.process} to be killed")
    except (RayError, DeadlineExceeded):  # the node is gone, and Ray knows it, or will
        return False


def _end_if_stopped(process: Process) -> bool:
    return not process.can_run() and process.kill()
