"""The program that starts processes of model-written code, one test at a time. Only the standard library is needed.

It never runs the code itself, and never has expected values: a test with assertions goes by a descriptor from the
supervisor to the process of the tests. When its socket closes, it kills everything and ends.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jackfield_sandbox import _confinement, _programs
from jackfield_sandbox.wire import receive, send

_TAIL = 2000  #: bytes of the end of what the code prints as errors


def main() -> None:
    """Confine this process as its argument says, and serve tests."""
    channel, settings = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    with contextlib.suppress(EOFError, OSError):
        try:
            runner = Runner(channel, settings)
            if settings["level"] == "namespaces":
                _enter(channel, runner.readable)
            _confinement.control("subreaper", 1)
            _confinement.control("dumpable", 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # which the first process of a tree does not get from others
            send(channel, {"ready": True})
        except Exception as error:
            send(channel, {"error": f"{type(error).__name__}: {error}"})
            raise EOFError from error
        runner.serve()
    _confinement.kill_all(settings["level"] == "namespaces" and os.getpid() == 1)
    if settings["folder"]:  # also if the supervisor was killed
        remove_tree(Path(settings["folder"]))
    os._exit(0)


def _enter(channel: socket.socket, readable: list[str]) -> None:
    """Go on in new namespaces, as the first process of a new tree."""
    _confinement.unshare()
    send(channel, {"unshared": True})
    receive(channel)  # users are mapped
    if pid := os.fork():
        channel.close()
        os.waitpid(pid, 0)
        os._exit(0)
    _confinement.new_root(readable)


class Runner:
    """The processes of one response's code."""

    def __init__(self, channel: socket.socket, settings: dict[str, Any]) -> None:
        self._channel, self._settings, self._limits = channel, settings, settings["limits"]
        self._level, self._user = settings["level"], settings["user"]
        self.has_tree = self._level == "namespaces"
        self.readable = _confinement.readable_paths(settings["readable"])
        self._folder = Path("/tmp" if self.has_tree else settings["folder"]) / "run"
        self._inner_user = 1000 if self.has_tree and self._user is not None else self._user
        self._processes = self._limits["processes"] + 3  # with this one and that of the tests
        if self._level in ("limits", "filters") and self._user is None:
            self._processes += _confinement.threads_of(os.getuid())
        self._code = ""

    def serve(self) -> None:
        """Serve the supervisor until it closes the socket."""
        while True:
            message, descriptors = receive(self._channel)
            if "code" in message:
                self._code = message["code"]
            try:
                reply = self._run(message, *descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
                _confinement.kill_all(self.has_tree)
                self._clear()
            send(self._channel, reply)

    def _run(self, message: dict[str, Any], *descriptors: int) -> dict[str, Any]:
        self._prepare()
        file, code = str(self._folder / self._settings["program"]), self._code
        given = _file(message.get("stdin", ""))
        pipes = {name: os.pipe() for name in ("out", "err", "value")}
        null = os.open(os.devnull, os.O_RDWR)
        mine = {name: read for name, (read, _) in pipes.items()}
        out, err, value = (write for _, write in pipes.values())
        try:
            if message["do"] == "check":
                pid = self._check(descriptors[0], null, err)
            elif message["do"] == "call":
                work = functools.partial(_programs.call, code, file, message["name"], message["arguments"], value)
                pid = self._start(work, (null, null, err), value)
            elif message["do"] == "compile":
                pid = self._start(lambda: _compile(code, file), (null, null, err))
            elif command := self._limits["command"]:
                pid = self._start(lambda: os.execvp(command[0], [*command, file]), (given, out, err))
            else:
                pid = self._start(lambda: _programs.run_program(code, file), (given, out, err))
        finally:
            for descriptor in (given, null, out, err, value):
                os.close(descriptor)
        try:
            return self._wait(pid, mine, message["seconds"])
        finally:
            for descriptor in mine.values():
                os.close(descriptor)

    def _check(self, tests: int, null: int, err: int) -> int:
        """Start the code's process and that of its tests; return the id of the latter."""
        theirs, ours = socket.socketpair()
        file, longest = str(self._folder / self._settings["program"]), self._limits["output_bytes"]
        with theirs, ours:
            serve = functools.partial(_programs.serve, self._code, file, theirs)
            self._start(serve, (null, null, err), theirs.fileno())
            test = socket.socket(fileno=os.dup(tests))
            with test:
                judge = functools.partial(_programs.judge, test, ours, longest)
                return self._start(judge, (null, null, err), test.fileno(), ours.fileno(), is_trusted=True)

    def _prepare(self) -> None:
        if self.has_tree:
            _confinement.renew_tmp(self._limits["disk_bytes"])
        self._folder.mkdir(mode=0o700)
        file = self._folder / self._settings["program"]
        file.write_bytes(self._code.encode(errors="surrogatepass"))
        if self._user is not None:
            os.chown(file, self._inner_user, self._inner_user)
            os.chown(self._folder, self._inner_user, self._inner_user)

    def _clear(self) -> None:
        if not self.has_tree:
            remove_tree(self._folder)

    def _start(
        self, work: Callable[[], None], streams: tuple[int, int, int], *kept: int, is_trusted: bool = False
    ) -> int:
        """Start a confined process that has only these descriptors."""
        if pid := os.fork():
            return pid
        try:
            self._confine(streams, kept, is_trusted)
            work()
        except BaseException:
            traceback.print_exc()
        _programs.end_process(1)
        return 0

    def _confine(self, streams: tuple[int, int, int], kept: tuple[int, ...], is_trusted: bool) -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        for low, high in zip((2, *sorted(kept)), (*sorted(kept), 65536), strict=True):
            os.closerange(low + 1, high)
        os.chdir(self._folder)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (
            open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            for number in (1, 2)
        )
        if self._level != "none":
            _confinement.limit(self._limits, self._processes)
            _confinement.drop_rights(self._inner_user)
        if self._level == "filters":
            _confinement.filter_files(self.readable, [str(self._folder)])
        if self._level in ("filters", "namespaces"):
            _confinement.filter_calls(has_namespaces=self.has_tree)
        _confinement.control("dumpable", 0 if is_trusted else 1)

    def _wait(self, pid: int, pipes: dict[str, int], seconds: float) -> dict[str, Any]:
        """Wait for a process, read what it writes, and say how it ended."""
        limits = {"out": self._limits["output_bytes"], "err": None, "value": self._limits["output_bytes"]}
        data, began, end = {name: bytearray() for name in pipes}, time.monotonic(), "exit"
        with selectors.DefaultSelector() as selector:
            process = os.pidfd_open(pid)
            selector.register(process, selectors.EVENT_READ, "process")
            selector.register(self._channel, selectors.EVENT_READ, "channel")
            for name, descriptor in pipes.items():
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ, name)
            while end == "exit":
                ready = {key.data for key, _ in selector.select(max(seconds - (time.monotonic() - began), 0.0))}
                if "channel" in ready:
                    raise EOFError  # nobody waits for the answer
                for name in ready - {"process"}:
                    if not _drain(pipes[name], data[name], limits[name]):
                        selector.unregister(pipes[name])
                if any(limit is not None and len(data[name]) > limit for name, limit in limits.items()):
                    end = "output"
                elif "process" in ready:
                    break
                elif time.monotonic() - began >= seconds:
                    end = "time"
            os.close(process)
        if end == "exit":
            for name, descriptor in pipes.items():
                _drain(descriptor, data[name], limits[name])
        status = os.waitpid(pid, 0)[1] if end == "exit" else 0
        texts = {name: content.decode(errors="backslashreplace") for name, content in data.items()}
        return {"end": end, "status": os.waitstatus_to_exitcode(status), **texts}


def _drain(descriptor: int, data: bytearray, limit: int | None) -> bool:
    """Read what there is, up to a limit or only the end of it; return False at the end of the stream."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(16):  # one that prints without end must not hold this loop
            if limit is not None and len(data) > limit:
                break
            part = os.read(descriptor, 1 << 16)
            if not part:
                return False
            data += part
            if limit is None:
                del data[:-_TAIL]
    return True


def _file(text: str) -> int:
    """Return a descriptor from which a text can be read."""
    descriptor = os.memfd_create("stdin")
    data = text.encode(errors="surrogatepass")
    while data:
        data = data[os.write(descriptor, data) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _compile(code: str, file: str) -> None:
    compile(code, file, "exec")
    os._exit(0)


def remove_tree(folder: Path) -> None:
    """Remove a folder, though its owner may have taken away its own rights to it."""
    for place, folders, _ in os.walk(folder):
        for path in (os.path.join(place, name) for name in folders):
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
