"""Processes that import an engine's libraries once and fork its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from jackfield.errors import WorkerLost
from jackfield.plugins.interpreters import environment_of
from jackfield_parity.subjects import Subject

_PROGRAM = Path(__file__).with_name("rank.py")
_GRACE_SECONDS = 5.0  #: for the other ranks, once one has failed
_KEPT = 2000  #: characters of a host's output in an error
#: Ranks meet on the loopback interface, and nothing is downloaded.
VARIABLES = {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Host:
    """A process of one engine plugin. Its ranks are in its process group, which is killed with it."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**environment_of(command[0]), **VARIABLES},
                start_new_session=True,
            )

    def run(self, plan: Path, outputs: Sequence[Path], seconds: float) -> list[int | None]:
        """Run a rank for each output file; return exit codes, None for a rank that did not end within ``seconds``.

        Once a rank has failed, the others have a few more seconds.
        """
        job = json.dumps({"plan": str(plan), "outputs": list(map(str, outputs))})
        codes: list[int | None] = [None] * len(outputs)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(job.encode() + b"\n")
            self._process.stdin.flush()
        ends, read, found = time.monotonic() + seconds, self._process.stdout.fileno(), b""
        while None in codes and (left := ends - time.monotonic()) > 0:
            if not select.select([read], [], [], left)[0]:
                break
            found += (more := os.read(read, 4096))
            if not more:
                said = self._log.read_text(encoding="utf-8", errors="replace")[-_KEPT:]
                message, fix = "the process of an engine's ranks died", "look at what it printed"
                details = {"expected": "a process that forks ranks", "found": f"{self._process.wait()}; {said}"}
                raise WorkerLost(message, where=str(plan), fix=fix, **details)
            *lines, found = found.split(b"\n")
            for rank, code in (map(int, line.split()) for line in lines):
                codes[rank] = code
                ends = min(ends, time.monotonic() + _GRACE_SECONDS) if code else ends
        return codes

    def close(self) -> None:
        """Kill the process and its ranks."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()


class Hosts:
    """One host per engine plugin and interpreter, which engines with other settings share."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._open, self._count = folder, dict[tuple[str, ...], Host](), 0

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._open.values():
            host.close()

    def of(self, subject: Subject, model_path: str) -> Host:
        """Return the host of an engine; one that is in doubt was dropped."""
        config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
        key = (subject.python, str(_PROGRAM), subject.record.name, str(config.get("model_type")), subject.preload or "")
        if key not in self._open:
            self._count += 1
            self._open[key] = Host(key, self._folder / f"host-{self._count}.txt")
        return self._open[key]

    def drop(self, host: Host) -> None:
        """Kill a host whose ranks did not all end well."""
        for key in [key for key, one in self._open.items() if one is host]:
            del self._open[key]
        host.close()
