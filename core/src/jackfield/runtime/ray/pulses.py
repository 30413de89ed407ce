"""Heartbeats of the actors of a run, and the end of those that give none."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded
from jackfield.heartbeat import Process, Work, silence, until_silent
from jackfield.runtime.ray.host import Sign
from jackfield.runtime.ray.stub import ENDS, PROCESSES

__all__ = ["SignsOfLife"]

_END_SECONDS = 15.0  #: for a process of another node to be killed
_SHOWN = 4  #: calls of a worker that a message about its end names
_LOOK_SECONDS = 1.0  #: in which a process of another node that is busy uses some processor time


class SignsOfLife:
    """Asks one actor whether it lives, one question after the other, and kills it when it does not answer.

    It answers in a thread of its own, once its worker was made; until then it imports, and has the deadline of a start.
    """

    def __init__(self, name: str, handle: Any, clock: Clock, heartbeat_seconds: float) -> None:
        self._name = name
        self._handle = handle
        self._clock = clock
        self._silence = heartbeat_seconds
        self._question: asyncio.Future[Sign] | None = None
        self._work = Work()
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
        self._heard()
        while True:
            await until_silent(self._heard, self._clock, self._silence)
            await self.end_process()

    def _heard(self) -> bool:
        """Whether it has answered, or used processor time, since the last look; then it is asked again.

        A process that Ray starts again answers later: what is silent then is the one before, which is gone.
        """
        works = self._last is not None and self._work.goes_on(self._last.process)
        question = self._question
        if question is not None and not question.done():
            return works
        asked = self._handle.heartbeat.options(concurrency_group="heartbeat").remote()
        self._question = asyncio.wrap_future(asked.future())
        self._question.add_done_callback(self._answered)
        return True

    def _answered(self, question: asyncio.Future[Sign]) -> None:
        if not question.cancelled() and question.exception() is None:  # of others, those tell who wait for the worker
            self._note(question.result())

    def _note(self, sign: Sign) -> None:
        self._note_death(sign.process)
        if not sign.ready:
            return
        if self._last is None or sign.process != self._last.process:
            PROCESSES[self._name] = str(sign.process)
            ENDS.pop(self._name, None)
        self._last = sign

    def _note_death(self, process: Process) -> None:
        """Tell that the process before this one died, though nobody may have waited for it."""
        last = self._last
        if last is None or self._name in ENDS or process == last.process:
            return
        ENDS[self._name] = "its process was started again"
        text = "%s (%s) died; its process was started again"
        logging.getLogger("jackfield").warning(text, self._name, last.process)

    async def end_process(self) -> None:
        """Kill the process that has answered last; its death is noticed as every other is."""
        sign = self._last
        if sign is None or self._name in ENDS:  # it has ended, and the next one takes its time to start
            return
        text = silence(self._name, sign.process, self._silence, ", ".join(sign.doing[:_SHOWN]))
        ENDS[self._name] = text  # before those who wait for it notice
        if await _end_there(sign, self._clock, _END_SECONDS):
            logging.getLogger("jackfield").warning("%s", text)
        else:
            ENDS.pop(self._name, None)


async def _end_there(sign: Sign, clock: Clock, seconds: float) -> bool:
    """Kill the process that has given a sign, on its node, unless it is busy; whether it was killed.

    Ray itself would ask the process to end, which a stopped one does not hear.
    """
    if sign.process.is_near:
        return sign.process.kill()
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(sign.node, soft=False)
    ended = ray.remote(_end_if_idle).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    try:
        reference = ended.remote(sign.process)
        return await clock.wait_for(asyncio.wrap_future(reference.future()), seconds, f"{sign.process} to be killed")
    except (RayError, DeadlineExceeded):  # the node is gone, and Ray knows it, or will
        return False


def _end_if_idle(process: Process) -> bool:
    work = Work()
    work.goes_on(process)
    time.sleep(_LOOK_SECONDS)
    return not work.goes_on(process) and process.kill()
