"""What the tests of the fault matrix share: moments of a run, signals, and the table of results."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from jackfield.queue import effective_acks, read_ledger

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "grpo.yaml"
RESULTS = Path(__file__).with_name("results.json")
SIGNALS = ("KILL", "STOP", "TERM")
ROLES = ("replica", "rank", "agent", "reward", "storage unit", "controller", "explorer", "trainer")
RUNTIMES = ("inline", "ray", "distributed")
APART = "not a process of its own"
WORKS_ON = "works on: SIGTERM is for the run, whose processes end with it"
_DEADLINE = 240.0
PIPELINE = ("schedule.stream_mini_batches=true", "algorithm.mini_batches=2", "schedule.sync_offset=1")
ASYNC = ("schedule.mode=async", "schedule.max_staleness=2")


def check_once(folder: Path, groups: int, rollouts: int) -> None:
    """Each committed step has used as many groups as a batch has, and no group of a batch was used twice."""
    acks = effective_acks(read_ledger(folder)).get("trainer", {})
    last = max(entry["step"] for entry in read_ledger(folder) if entry["event"] == "commit")
    used = {key: step for key, step in acks.items() if step is not None and step <= last}
    assert last > 0
    assert dict.fromkeys(range(last + 1), groups * rollouts) == Counter(used.values())
    places = Counter(tuple(key.split("/")[1:3]) for key in used)
    assert {rollouts} == set(places.values()), places


def until(what: str, found: Callable[[], Any], seconds: float = _DEADLINE) -> Any:
    """What a look finds, once it finds something; looks again and again."""
    ends = time.monotonic() + seconds
    while not (answer := found()):
        assert time.monotonic() < ends, f"not seen after {seconds:g} s: {what}"
        time.sleep(0.05)
    return answer


def steps(folder: Path) -> list[dict[str, Any]]:
    """The steps that a run has done, as its metrics tell."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        return []
    lines = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line["kind"] == "step"]


def send(name: str, pid: int) -> None:
    """KILL, STOP, TERM or CONT."""
    os.kill(pid, getattr(signal, f"SIG{name}"))


def state(pid: int) -> str:
    """Of a process, as Linux says it: T is stopped, Z has ended, X is not there any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def lives(pid: int) -> bool:
    """Whether there is such a process, stopped or not."""
    return state(pid) not in "ZX"


def children(pid: int) -> dict[int, str]:
    """The processes that one has started, and their command lines."""
    found = {}
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                with suppress(FileNotFoundError, ProcessLookupError):  # the child has ended since
                    command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(child)] = command.strip()
    return found


def codes(text: str) -> list[str]:
    """The codes of the errors that a command has printed."""
    return re.findall(r"^(?:error: )?\[?([a-z]+(?:\.[a-z-]+)+)\]?", text, re.MULTILINE)


def seen(runtime: str, role: str, name: str, outcome: str) -> None:
    """Compare what a test has seen with the committed table; with JACKFIELD_WRITE_FAULTS=1, write it there."""
    assert runtime in RUNTIMES
    assert role in ROLES
    assert name in SIGNALS
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    if os.environ.get("JACKFIELD_WRITE_FAULTS"):
        results.setdefault(runtime, {}).setdefault(role, {})[name] = outcome
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    assert results[runtime][role][name] == outcome, f"the table of faults says something else of {role}, {name}"


def cells() -> Iterator[tuple[str, str, str]]:
    """Runtime, role and signal of every cell."""
    return ((runtime, role, name) for runtime in RUNTIMES for role in ROLES for name in SIGNALS)
