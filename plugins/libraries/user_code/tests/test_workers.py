"""Worker processes against user code that hangs, crashes, prints, forks and eats memory. Real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from jackfield.clock import Clock
from jackfield.errors import RunError
from jackfield_pools import alive, until_gone
from jackfield_pools import pool as worker
from jackfield_user_code import UserCodePool, WorkerLimits, hold

USER_CODE = """
import asyncio, os, subprocess, sys, time

print("printed at import")
counter = 0

def add(a, b=0, scale=1):
    return (a + b) * scale

def count():
    global counter
    counter += 1
    return [counter, os.getpid()]

async def later(a):
    await asyncio.sleep(0)
    return a

def loop():
    print("printed in a loop")
    while True:
        pass

def sleep_with_child(file):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(file, "w") as out:
        out.write(str(child.pid))
    time.sleep(600)

def die_with_child(file):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(file, "w") as out:
        out.write(str(child.pid))
    os._exit(7)

def shout():
    print("{\\"value\\": \\"forged\\"}", flush=True)
    os.write(1, b"{\\"value\\": \\"forged\\"}\\n")
    os.system("echo from a shell")
    return ["in", sys.stdin.read()]

def die():
    os.write(2, b"last words\\n")
    os._exit(3)

def leave():
    sys.exit(4)

def segfault():
    os.kill(os.getpid(), 11)

def fail():
    raise ValueError("broken on purpose")

def garble():
    raise RuntimeError("\\udcff bad")

def hog():
    return len(bytearray(8 << 30))

def burn():
    while True:
        pass

def limits():
    import resource
    return [resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_AS)]

def thing():
    return {"thing": object()}

def scalar():
    import numpy
    return {"score": numpy.float32(0.5), "n": numpy.int64(3)}

def large(n):
    return "x" * n

class Scorer:
    def __init__(self, base=0):
        self.base = base
        self.calls = 0
    def compute_score(self, a):
        self.calls += 1
        return self.base + a, self.calls
    def __call__(self, a):
        return -a

instance = Scorer(5)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "user_code.py"
    path.write_text(USER_CODE)
    return path


def pid_of(pool: UserCodePool) -> int | None:
    """The process of a pool that has at most one."""
    assert len(pool.pids) <= 1
    return pool.pids[0] if pool.pids else None


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_functions_classes_instances_and_coroutines_are_called(file: Path) -> None:
    async def main() -> None:
        async with worker(file, "add", keywords={"scale": 10}) as adder:
            assert pid_of(adder) is None, "starts with the first call"
            assert 30 == (await adder.call({"a": 1, "b": 2}, 30)).value
        async with worker(file, "Scorer", method="compute_score", keywords={"base": 7}) as scorer:
            assert [[8, 1], [9, 2]] == [(await scorer.call({"a": a}, 30)).value for a in (1, 2)]
        async with worker(file, "instance", method="compute_score") as scorer:
            assert [6, 1] == (await scorer.call({"a": 1}, 30)).value
        async with worker(file, "later") as later:
            assert ["a", "b"] == [(await later.call({"a": a}, 30)).value for a in "ab"]
        module = UserCodePool("json:dumps", keywords={"indent": None})
        assert "[1]" == (await module.call({"obj": [1]}, 30)).value
        await module.close()

    run(main())


def test_an_endless_loop_is_killed_at_the_deadline_and_replaced(file: Path) -> None:
    async def main() -> None:
        async with worker(file, "loop") as looping:
            await looping.start()
            first = pid_of(looping)
            assert first is not None
            result = await looping.call({}, 0.3)
            assert "timeout" == result.status
            assert "user_code.py:loop to answer" in (result.error or "")
            assert "printed in a loop" in (result.error or "")
            assert not alive(first)
            await looping.start()
            assert pid_of(looping) not in (None, first)

    run(main())


def test_grandchildren_die_with_a_worker_that_is_killed(file: Path, tmp_path: Path) -> None:
    async def main() -> None:
        pipe = tmp_path / "pid"
        os.mkfifo(pipe)
        async with worker(file, "sleep_with_child") as parent:
            call = asyncio.create_task(parent.call({"file": str(pipe)}, 60))
            grandchild = int(await asyncio.to_thread(pipe.read_text))
            assert alive(grandchild)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until_gone(grandchild)

    run(main())


def test_grandchildren_die_with_a_worker_that_ends_by_itself(file: Path, tmp_path: Path) -> None:
    async def main() -> None:
        note = tmp_path / "pid"
        async with worker(file, "die_with_child") as parent:
            result = await parent.call({"file": str(note)}, 60)
            assert "exit status 7" in (result.error or "")
            await until_gone(int(note.read_text()))

    run(main())


def test_prints_do_not_reach_the_protocol(file: Path) -> None:
    """Nothing that user code prints, writes to descriptor 1 or reads from standard input touches the answers."""

    async def main() -> None:
        async with worker(file, "shout") as shouting:
            for _ in range(3):
                result = await shouting.call({}, 30)
                assert ["in", ""] == result.value

    run(main())


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("die", "died", ["ended with exit status 3", "last words"]),
        ("segfault", "died", ["killed by SIGSEGV"]),
        ("leave", "failed", ["SystemExit: 4"]),
        ("fail", "failed", ["ValueError: broken on purpose", "in fail", "user_code.py"]),
        ("hog", "failed", ["MemoryError"]),
        ("thing", "failed", ["not JSON", "builtins.object"]),
    ],
)
def test_a_failure_says_what_happened_and_the_next_call_works(
    file: Path, name: str, status: str, words: list[str]
) -> None:
    async def main() -> None:
        async with worker(file, name, limits=WorkerLimits(memory_bytes=2 << 30)) as failing:
            for _ in range(2):
                result = await failing.call({}, 30)
                assert status == result.status
                assert all(word in (result.error or "") for word in words), result.error
            assert "_child.py" not in (result.error or ""), "our own frames are left out"

    run(main())


def test_exceptions_leave_the_process_alive(file: Path) -> None:
    async def main() -> None:
        async with worker(file, "fail") as failing:
            await failing.start()
            first = pid_of(failing)
            await failing.call({}, 30)
            await failing.call({}, 30)
            assert first == pid_of(failing)

    run(main())


def test_limits_hold_in_the_process(file: Path) -> None:
    async def main() -> None:
        async with worker(file, "limits", limits=WorkerLimits(memory_bytes=3 << 30)) as limited:
            assert [[0, 0], [3 << 30, 3 << 30]] == (await limited.call({}, 30)).value
        async with worker(file, "burn", limits=WorkerLimits(cpu_seconds=0.1)) as burning:
            result = await burning.call({}, 50)
            assert "killed by SIGXCPU" in (result.error or "")

    run(main())


def test_scalars_of_numpy_are_numbers(file: Path) -> None:
    pytest.importorskip("numpy")

    async def main() -> None:
        async with worker(file, "scalar") as scalar:
            assert {"score": 0.5, "n": 3} == (await scalar.call({}, 30)).value

    run(main())


def test_large_answers_arrive_and_endless_ones_do_not(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with worker(file, "large") as large:
            assert 3_000_000 == len((await large.call({"n": 3_000_000}, 30)).value)
        monkeypatch.setattr("jackfield_user_code._parent._ANSWER_BYTES", 100_000)
        async with worker(file, "large") as large:
            result = await large.call({"n": 3_000_000}, 30)
            assert (result.error or "").startswith("[worker.answer]")
            assert "xx" == (await large.call({"n": 2}, 30)).value

    run(main())


def test_arguments_that_are_not_json_are_refused(file: Path) -> None:
    async def main() -> None:
        async with worker(file, "add") as adder:
            result = await adder.call({"a": object()}, 30)
            assert "failed" == result.status
            assert "not JSON" in (result.error or "")

    run(main())


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("{file}:nothing", "nothing"),
        ("{folder}/missing.py:add", "missing.py"),
        ("no_such_module_here:add", "No module named"),
        ("{folder}/raising.py:add", "ValueError: at import"),
        ("{folder}/leaving.py:add", "exit status 9"),
        ("{folder}/hanging.py:add", "waited 0.5 s"),
    ],
)
def test_code_that_cannot_be_loaded_is_an_error_with_a_reason(
    file: Path, tmp_path: Path, target: str, words: str
) -> None:
    (tmp_path / "raising.py").write_text("raise ValueError('at import')")
    (tmp_path / "leaving.py").write_text("import os; os._exit(9)")
    (tmp_path / "hanging.py").write_text("import signal; signal.pause()")
    seconds = 0.5 if "hanging" in target else 30.0

    async def main() -> None:
        where = target.format(file=file, folder=tmp_path)
        failing = UserCodePool(where, limits=WorkerLimits(start_seconds=seconds))
        with pytest.raises(RunError) as caught:
            await failing.start()
        assert "worker.start" == caught.value.code
        assert words in str(caught.value)
        assert pid_of(failing) is None

    run(main())


def test_wrong_targets_and_interpreters_are_refused() -> None:
    with pytest.raises(RunError) as caught:
        UserCodePool("only.a.module")
    assert "worker.start" == caught.value.code

    async def main() -> None:
        with pytest.raises(RunError) as caught:
            await UserCodePool("json:dumps", python="/no/python").start()
        assert "worker.start" == caught.value.code

    run(main())


def test_a_cancelled_call_leaves_nothing_running(file: Path) -> None:
    async def main() -> None:
        async with worker(file, "loop") as looping:
            await looping.start()
            pid = pid_of(looping)
            assert pid is not None
            call = asyncio.create_task(looping.call({}, 60))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert not alive(pid)
            assert pid_of(looping) is None

    run(main())


def test_a_process_that_was_killed_while_idle_is_replaced(file: Path) -> None:
    async def main() -> None:
        async with worker(file, "count") as counting:
            _, pid = (await counting.call({}, 30)).value
            os.kill(pid, signal.SIGKILL)
            assert counting._slots[0].process is not None
            await Clock().wait_for(asyncio.shield(counting._slots[0].process.gone), 20, "the end of the process")
            number, other = (await counting.call({}, 30)).value
            assert (1, True) == (number, other != pid)

    run(main())


def test_workers_die_with_a_killed_parent(file: Path, tmp_path: Path) -> None:
    """Also in the middle of an endless loop of user code: nobody is left to kill it."""
    program = tmp_path / "parent.py"
    program.write_text(
        f"""
import asyncio
from jackfield_user_code import UserCodePool

async def main():
    idle, busy = UserCodePool({f"{file}:count"!r}), UserCodePool({f"{file}:loop"!r})
    await idle.start()
    await busy.start()
    call = asyncio.create_task(busy.call({{}}, 600))
    await asyncio.sleep(0)
    print(*idle.pids, *busy.pids, flush=True)
    await call

asyncio.run(main())
"""
    )

    async def main() -> None:
        parent = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        with parent.stdout:
            pids = [int(word) for word in (await asyncio.to_thread(parent.stdout.readline)).split()]
        parent.kill()
        parent.wait(20)
        assert 2 == len(pids)
        for pid in pids:
            await until_gone(pid)

    run(main())


def test_a_pool_shares_calls_in_order_and_close_leaves_no_process(file: Path) -> None:
    async def main() -> None:
        pool = UserCodePool(f"{file}:count", workers=2)
        results = await asyncio.gather(*(pool.call({}, 60) for _ in range(12)))
        assert all(result.status == "ok" for result in results)
        pids = {result.value[1] for result in results}
        assert pids == set(pool.pids)
        assert 2 == len(pids)
        by_process = {pid: [value[0] for value in (r.value for r in results) if value[1] == pid] for pid in pids}
        assert all(numbers == sorted(numbers) for numbers in by_process.values()), "first come, first served"
        await pool.close()
        await pool.close()
        assert () == pool.pids
        assert not any(alive(pid) for pid in pids)

    run(main())


def test_a_call_that_waits_for_a_process_has_its_whole_deadline(file: Path) -> None:
    """The deadline counts execution: the call behind one that hangs for longer than it may take itself is scored."""

    async def main() -> None:
        pool = UserCodePool(f"{file}:large", workers=1)
        await pool.start()
        [pid] = pool.pids
        os.kill(pid, signal.SIGSTOP)
        hanging = asyncio.create_task(pool.call({"n": 1}, 0.5))
        await asyncio.sleep(0)
        queued = await pool.call({"n": 2}, 0.4)
        assert hanging.done()
        assert "timeout" == (await hanging).status
        assert ("ok", "xx") == (queued.status, queued.value)
        assert [pid] != list(pool.pids)
        await pool.close()

    run(main())


def test_a_cancelled_wait_for_a_worker_gives_its_place_back(file: Path) -> None:
    async def main() -> None:
        pool = UserCodePool(f"{file}:large", workers=1)
        calls = [asyncio.create_task(pool.call({"n": n}, 60)) for n in range(4)]
        await asyncio.sleep(0)
        calls[1].cancel()
        calls[2].cancel()
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert ["ok", "ok"] == [result.status for result in (done[0], done[3])]  # type: ignore[union-attr]
        assert all(isinstance(result, asyncio.CancelledError) for result in done[1:3])
        await pool.close()

    run(main())


def test_a_pool_of_code_that_cannot_start_yields_failures_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        pool = UserCodePool(f"{tmp_path}/missing.py:add")
        with pytest.raises(RunError):
            await pool.start()
        result = await pool.call({}, 30)
        assert "failed" == result.status
        assert "worker.start" in (result.error or "")
        await pool.close()

    run(main())


def test_an_error_whose_text_has_a_lone_surrogate_is_an_error_of_the_call(file: Path) -> None:
    async def main() -> None:
        async with worker(file, "garble") as made:
            first, pid = await made.call({}, 30.0), pid_of(made)
            assert "failed" == first.status
            assert "RuntimeError: \\udcff bad" in str(first.error)
            await made.call({}, 30.0)
            assert pid == pid_of(made), "the process lives"

    run(main())


def test_a_held_process_keeps_its_state_and_is_not_replaced(file: Path) -> None:
    """Others wait for the release; after a death its calls fail, and the next holder gets another process."""

    async def main() -> None:
        async with worker(file, "count") as pool:
            held = await hold(pool)
            first, second = [(await held.call({}, 30.0)).value for _ in range(2)]
            assert ([1, held.pid], [2, held.pid]) == (first, second)
            waiting = asyncio.create_task(hold(pool))
            await asyncio.sleep(0)
            assert not waiting.done()
            await held.release()
            again = await waiting
            assert [3, held.pid] == (await again.call({}, 30.0)).value
            assert "failed" == (await again.call({"a": object()}, 30.0)).status
            assert again.pid is not None
            os.kill(again.pid, signal.SIGKILL)
            await until_gone(again.pid)
            assert ["died", "died"] == [(await again.call({}, 30.0)).status for _ in range(2)]
            await again.release()
            other = await hold(pool)
            assert [1, other.pid] == (await other.call({}, 30.0)).value
            await other.release(kill=True)
            assert other.pid is not None
            assert not alive(other.pid)

    asyncio.run(main())
