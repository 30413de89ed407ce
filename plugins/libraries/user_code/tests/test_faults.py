"""What a user's function may do to its process, and what becomes of its sample: the table ``faults.json``.

The documentation shows the table. Each fault happens between two honest samples, which keep their scores.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from jackfield_pools import alive, pool, until_gone
from jackfield_user_code import WorkerLimits

USER_CODE = """
import asyncio, ctypes, os, signal, sys, threading, time

async def later(deed, value, folder):
    return await honest(value) if deed == "honest" else globals()[deed](folder)

async def honest(value):
    await asyncio.sleep(0.05)
    return value

def call(deed, value, folder):
    return value if deed == "honest" else globals()[deed](folder)

def raises(_):
    raise ValueError("the answer is odd")

def exits(_):
    sys.exit(3)

def exits_at_once(_):
    os._exit(3)

def segfaults(_):
    ctypes.string_at(0)

def aborts(_):
    os.abort()

def allocates(_):
    kept = []
    while True:
        kept.append(bytearray(1 << 20))

def daemonises(folder):
    told, telling = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            stay(folder, telling)
        os._exit(0)
    os.wait()
    return float(os.read(told, 1))

def stays(folder):
    told, telling = os.pipe()
    if os.fork() == 0:
        stay(folder, telling)
    return float(os.read(told, 1))

def returns_twice(_):
    return 1.0 if os.fork() else -1.0

def stay(folder, telling):
    with open(os.path.join(folder, "pid"), "w") as out:
        out.write(str(os.getpid()))
    os.write(telling, b"1")
    time.sleep(600)

def prints(_):
    block = b"spam and eggs...\\n" * 61_681  # a MiB
    for _ in range(1024):
        os.write(1, block)
    return 1.0

def loops(_):
    while True:
        pass

def hangs_in_c(_):
    ctypes.PyDLL(None).pause()  # which keeps the lock of the interpreter

def ignores_signals(_):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Event().wait()

def closes_descriptors(_):
    os.closerange(3, 256)
    return 1.0

def writes_to_descriptors(_):
    for descriptor in range(3, 256):
        try:
            os.write(descriptor, b"[[1, 1.0]]")
        except OSError:
            pass
    return 1.0

def freezes(_):
    os.kill(os.getpid(), signal.SIGSTOP)

def kills_its_parent(_):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
"""

#: What a function does, and its deadline in seconds where that is what ends it.
FAULTS: dict[str, tuple[str, float]] = {
    "raises": ("it raises an exception", 60),
    "exits": ("it calls sys.exit", 60),
    "exits_at_once": ("it calls os._exit", 60),
    "segfaults": ("it reads address 0", 60),
    "aborts": ("it aborts", 60),
    "allocates": ("it allocates memory without end", 60),
    "daemonises": ("it leaves a daemon in a session of its own", 60),
    "stays": ("it forks, and the child stays", 60),
    "returns_twice": ("it forks, and the child returns, too", 60),
    "prints": ("it prints a gigabyte", 60),
    "loops": ("it loops for ever", 0.3),
    "hangs_in_c": ("it hangs in C and keeps the interpreter's lock", 0.3),
    "ignores_signals": ("it ignores signals and waits for ever", 0.3),
    "closes_descriptors": ("it closes all descriptors", 60),
    "writes_to_descriptors": ("it writes to all descriptors", 60),
    "freezes": ("it stops its process", 0.3),
    "kills_its_parent": ("it kills the process that it was forked from, again and again", 60),
}
#: It cannot be known which of many calls was it, and those that are there twice fail with it.
_OTHERS = "failed, and perhaps others"
_LOG_BYTES = 5 * 2**20
_TABLE: list[dict[str, str]] = json.loads(Path(__file__).with_name("faults.json").read_text(encoding="utf-8"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "faults.py"
    path.write_text(USER_CODE)
    return path


async def outcome(file: Path, fault: str, function: str) -> dict[str, str]:
    """Score a fault between honest samples; return its row of the table."""
    what, seconds = FAULTS[fault]
    options: dict[str, Any] = {"limits": WorkerLimits(memory_bytes=1 << 30), "logs": str(file.parent / "log")}
    async with pool(file, function, **options) as workers:
        arguments = {"deed": fault, "value": 0.0, "folder": str(file.parent)}
        before = await workers.call({**arguments, "deed": "honest", "value": 1.0}, 60)
        [first] = workers.pids
        found, after = await asyncio.gather(
            workers.call(arguments, seconds), workers.call({**arguments, "deed": "honest", "value": 2.0}, 60)
        )
        assert [("ok", 1.0), ("ok", 2.0)] == [(each.status, each.value) for each in (before, after)]
        assert found.value in ((None,) if found.status != "ok" else (1.0,))
        kept = [first] == list(workers.pids)
        assert kept == alive(first)
    left = file.parent / "pid"
    if left.exists():
        await until_gone(int(left.read_text()))
    assert _LOG_BYTES > max(each.stat().st_size for each in file.parent.glob("log-*"))
    status = "failed" if found.status == "died" else found.status
    return {"fault": what, "function": fault, "status": status, "process": "is kept" if kept else "is replaced"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_its_own_sample(file: Path, fault: str) -> None:
    [expected] = [row for row in _TABLE if row["function"] == fault]
    found = asyncio.run(outcome(file, fault, "call"))
    assert {**found, "among many": expected["among many"]} == expected


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", [row["function"] for row in _TABLE if row["among many"] != _OTHERS])
def test_a_fault_among_many_calls_costs_its_own_sample(file: Path, fault: str) -> None:
    """The same in a process that makes many calls: the honest sample is in flight with it."""
    [expected] = [row for row in _TABLE if row["function"] == fault]
    assert expected["among many"] == asyncio.run(outcome(file, fault, "later"))["status"]


def test_the_table_has_all_faults() -> None:
    assert list(FAULTS) == [row["function"] for row in _TABLE]
