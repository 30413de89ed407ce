"""The process that forks workers, and these workers, as a pool sees them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded
from jackfield.sdk.rpc import Process
from jackfield_user_code import _frames, _tree
from jackfield_user_code._child import Output
from jackfield_user_code._link import Link

_ANSWER_BYTES = 64 * 2**20  #: a longer message ends the process
_CLOSE_SECONDS = 2.0  #: a parent that is asked to end has so long; then it is killed
_END_SECONDS = 5.0  #: from a kill to the end of the process
_LOOKS = 5  #: looks at a process that must all find that it cannot run
_OUTPUT_LINES = 10


@attrs.frozen
class Death:
    """How a process has ended."""

    how: str
    output: str = ""  #: its last lines, as the end of a message
    running: int = 0  #: the id of the call that ran; negative: of the one that ran last; 0: unknown
    wrong: bool = False  #: it was killed because it broke the protocol
    of_parent: bool = False  #: the process that had forked it ended
    ordered: bool = False  #: it was killed on purpose


class Died(Exception):
    """A process has ended instead of answering."""

    def __init__(self, death: Death) -> None:
        super().__init__(death.how)
        self.death = death


class Forked:
    """A worker process. It belongs to one event loop."""

    def __init__(self, parent: Parent, number: int, own: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.parent, self.number, self.served = parent, number, 0
        self.process: Process | None = None
        self.loaded: asyncio.Future[tuple[str, Any]] = loop.create_future()
        self.gone: asyncio.Future[Death] = loop.create_future()
        self.calls: dict[int, asyncio.Future[tuple[str, Any]]] = {}
        self.heeded: dict[int, asyncio.Future[None]] = {}  #: done when the process has seen the cancellation of a call
        self.is_retired = False
        self.silent = 0
        self._why = ""  #: why it was killed
        self._wrong = self._ordered = False
        self._link = Link(own, _ANSWER_BYTES, self._heard, self._broken)

    @property
    def is_ending(self) -> bool:
        """Return whether it takes no further calls."""
        return self.gone.done() or self.is_retired or bool(self._why)

    def ask(self, function: str, arguments: str, cpu_seconds: float | None) -> tuple[int, asyncio.Future[Any]]:
        """Begin a call; return its id, which cannot be guessed, and the future of its status and value."""
        self.served += 1
        number = secrets.randbits(62) + 1
        answer = self.calls[number] = self.loaded.get_loop().create_future()
        limit = "null" if cpu_seconds is None else repr(cpu_seconds)
        self._link.send(f'[{number},"{function}",{arguments},{limit}]')
        return number, answer

    def cancel(self, number: int) -> asyncio.Future[None]:
        """Cancel one of many calls; return a future that is done when the event loop of the process has seen it."""
        heeded: asyncio.Future[None] = self.loaded.get_loop().create_future()
        if number in self.calls:
            self.heeded[number] = heeded
            self._link.send(f"[{number},null,null,null]")
        else:
            heeded.set_result(None)
        return heeded

    def _heard(self, item: Any) -> None:
        try:
            number, status, value = item
            if number == 0 and status == "retire":
                self.is_retired = True
                return
            if status != "cancelling":
                answer = self.loaded if number == 0 and not self.loaded.done() else self.calls.pop(number)
                if not answer.done():
                    answer.set_result((str(status), value))
            if number in self.heeded and not (heeded := self.heeded.pop(number)).done():
                heeded.set_result(None)
        except (TypeError, ValueError, KeyError) as error:
            raise _frames.BrokenProtocol("an answer that was not asked for") from error

    def _broken(self, reason: str | None) -> None:
        self._wrong = reason is not None
        how = (
            "closed the descriptor of its socket, or wrote to it" if reason is None else f"broke the protocol: {reason}"
        )
        self._kill(f"was killed: it {how}")

    def _kill(self, why: str) -> None:
        self._why = self._why or why
        self.parent.tell("kill", self.number)

    def end(self, why: str) -> None:
        """Have the process killed on purpose."""
        self._ordered = True
        self._kill(why)

    async def kill(self, why: str = "was ended") -> Death:
        """Kill the process with everything that it has started, and wait for its end."""
        if not self.gone.done():
            self.end(why)
            try:
                who = f"the worker process {self.pid}, killed, to be gone"
                await self.parent.clock.wait_for(asyncio.shield(self.gone), _END_SECONDS, who)
            except DeadlineExceeded:  # the parent cannot run
                self.kill_here()
                self.bury(Death(why, ordered=True))
        return self.gone.result()

    def kill_here(self) -> None:
        """Kill it without the help of its parent."""
        if self.process is not None and Process.of(self.process.pid) == self.process:
            _tree.kill_tree(self.process.pid)

    @property
    def pid(self) -> int | None:
        """Return the process id, when it is known."""
        return None if self.process is None else self.process.pid

    def catch_up(self) -> None:
        """Handle what has arrived."""
        while self._link.read():
            pass

    def died(self, code: int, output: str, running: int) -> None:
        """Take the news that it has ended, after its last answers."""
        self.catch_up()
        how = f"ended with exit status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        why = self._why if self._why and code == -signal.SIGKILL else how
        self.bury(Death(why, _lines(output), running, wrong=self._wrong, ordered=self._ordered))

    def bury(self, death: Death) -> None:
        """Fail the calls that are open. Idempotent."""
        if self.gone.done():
            return
        self.gone.set_result(death)
        self._link.close()
        self.parent.workers.pop(self.number, None)
        for answer in (self.loaded, *self.calls.values()):
            if not answer.done():
                answer.set_exception(Died(death))
                answer.exception()  # mark it as retrieved: the caller may be gone
        for heeded in self.heeded.values():
            if not heeded.done():
                heeded.set_result(None)
        self.parent.ended(self, death)
        self.calls.clear()


class Parent:
    """The process that imports the code, and forks workers from it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        request: Mapping[str, Any],
        clock: Clock,
        *,
        here: bool,
        heartbeat_seconds: float,
        log: Path | None,
        ended: Callable[[Forked, Death], None],
    ) -> None:
        """Start the program and let it import the code if ``here``; an ``OSError`` if the program cannot be started."""
        self.name, self.clock, self.ended, self.workers = name, clock, ended, dict[int, Forked]()
        self.imports = here
        self._loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[tuple[Any, int]] = self._loop.create_future()  #: error, and number of threads
        self.gone: asyncio.Future[Death] = self._loop.create_future()
        self._why, self._ordered, self._silent, self._heartbeat_seconds = "", False, 0, heartbeat_seconds
        (own, other), (pipe, printing) = socket.socketpair(), os.pipe()
        try:
            arguments = [*command, str(other.fileno()), str(os.getpid())]
            options: dict[str, Any] = {"pass_fds": [other.fileno()], "start_new_session": True}
            options |= {"stdin": subprocess.DEVNULL, "stdout": printing, "stderr": subprocess.STDOUT}
            self._process = subprocess.Popen(arguments, **options)
        except BaseException:
            own.close()
            os.close(pipe)
            raise
        finally:
            other.close()
            os.close(printing)
        self.process = Process.of(self._process.pid)
        os.set_blocking(pipe, False)
        self._output = Output(pipe, None if log is None else str(log))
        self._loop.add_reader(pipe, self._read_output)
        self._link = Link(own, _ANSWER_BYTES, self._heard, lambda _: self._ended())
        self.tell("load", dict(request), here)
        self._timer = self._loop.call_later(heartbeat_seconds / _LOOKS, self._look)

    @property
    def is_ending(self) -> bool:
        """Return whether it forks no further workers."""
        return self.gone.done() or bool(self._why)

    def tell(self, *order: Any) -> None:
        """Send an order."""
        self._link.send(json.dumps(order))

    def fork(self, number: int, log: Path | None) -> Forked:
        """Fork worker ``number``; it loads, or has failed, when its ``loaded`` is done."""
        own, other = socket.socketpair()
        worker = self.workers[number] = Forked(self, number, own)
        with other:
            order = ["fork", number, None if log is None else str(log)]
            self._link.send_with(json.dumps(order), other.fileno())
        return worker

    def _heard(self, news: Any) -> None:
        what, *details = news
        if what == "loaded":
            if not self.loaded.done():
                self.loaded.set_result((details[0], details[1]))
            return
        worker = self.workers.get(details[0])
        if worker is not None and what == "forked":
            worker.process = Process.of(details[1])
        elif worker is not None and what == "died":
            worker.died(*details[1:])

    def _read_output(self) -> None:
        if not self._output.read() and self._process.poll() is not None:
            self._loop.remove_reader(self._output.pipe)

    def output(self) -> str:
        """Return the last lines that it printed, as the end of a message."""
        return _lines(self._output.tail.decode(errors="replace"))

    def _look(self) -> None:
        """Kill processes that cannot run for so long. They may be stopped, or wait for a device for ever."""
        self._timer = self._loop.call_later(self._heartbeat_seconds / _LOOKS, self._look)
        why = f"sent no heartbeat for {self._heartbeat_seconds:g} s and was killed (deadlines.heartbeat)"
        for worker in list(self.workers.values()):
            lives = worker.process is None or worker.process.can_run() or worker.gone.done()
            worker.silent = 0 if lives else worker.silent + 1
            if worker.silent > _LOOKS and not worker.is_ending:
                worker._kill(why)
                logging.getLogger("jackfield").warning("%s (%s) %s", self.name, worker.process, why)
        self._silent = 0 if self.process.can_run() else self._silent + 1
        if self._silent > _LOOKS and not self._why:
            self._why = why
            logging.getLogger("jackfield").warning("%s (%s) %s", self.name, self.process, why)
            _tree.kill_tree(self._process.pid)

    async def close(self, why: str = "was ended") -> Death:
        """Kill it, its workers and everything that they have started, and wait for the end. Idempotent."""
        if not self.gone.done():
            who = f"the processes of {self.name} to end"
            if not self._why:
                self._why, self._ordered = why, True
                if self.loaded.done():  # it kills the workers, waits for them and ends
                    self._link.end()
                    with suppress(DeadlineExceeded):
                        await self.clock.wait_for(asyncio.shield(self.gone), _CLOSE_SECONDS, who)
            if not self.gone.done():
                _tree.kill_tree(self._process.pid)
                with suppress(DeadlineExceeded):  # a process that the import has started may hold the socket
                    await self.clock.wait_for(asyncio.shield(self.gone), _END_SECONDS, who)
            self._ended()
        return self.gone.result()

    def _ended(self) -> None:
        """Bury the workers of a parent that has ended or closed its socket."""
        if self.gone.done():
            return
        for worker in list(self.workers.values()):
            worker.kill_here()
        with suppress(ProcessLookupError):
            _tree.kill_tree(self._process.pid)
        code = self._process.wait(_END_SECONDS)
        self._timer.cancel()
        self._link.close()
        self._loop.remove_reader(self._output.pipe)
        self._output.close()
        how = f"ended with exit status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        how = self._why if self._why and code == -signal.SIGKILL else how
        death = Death(how, self.output(), of_parent=True, ordered=self._ordered)
        self.gone.set_result(death)
        if not self.loaded.done():
            self.loaded.set_exception(Died(death))
            self.loaded.exception()
        if not self._ordered and not self._why:
            text = "the parent of the worker processes, %s, %s at %s; another one takes its place"
            logging.getLogger("jackfield").warning(text, self.process, how, self.name)
        for worker in list(self.workers.values()):
            worker.bury(death)


def _lines(output: str) -> str:
    lines = output.strip().splitlines()[-_OUTPUT_LINES:]
    return "; it printed:\n" + "\n".join(lines) if lines else ""
