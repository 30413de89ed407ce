"""The parent process that imports the code and forks workers, and what it kills with them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from jackfield_pools import alive, pool, until_gone
from jackfield_user_code import WorkerLimits

IMPORTS = """
import os
with open(__file__ + ".imports", "a") as notes:
    notes.write(f"{os.getpid()}\\n")
"""

USER_CODE = (
    IMPORTS
    + """
import random, signal, time
SIGNAL = 0

def meet(folder, total):
    import pathlib
    (pathlib.Path(folder) / str(os.getpid())).touch()
    while len(os.listdir(folder)) < total:
        time.sleep(0.001)
    return [os.getpid(), os.getppid(), random.random()]

def daemon(pipe):
    told, telling = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(pipe, "w") as out:
                out.write(str(os.getpid()))
            os.write(telling, b"!")
            time.sleep(600)
        os._exit(0)
    os.wait()
    os.read(told, 1)

def daemon_and_hang(pipe):
    daemon(pipe)
    signal.pause()

def daemon_and_die(pipe):
    daemon(pipe)
    os._exit(7)

def many_children():
    for _ in range(70):
        if os.fork() == 0:
            signal.pause()
    return os.getpid()

def pid():
    return os.getpid()

def spawn():
    import concurrent.futures, math, multiprocessing
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        return list(processes.map(math.sqrt, [4, 9]))

def descriptors():
    there = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd") if int(each) > 2]
    return [os.readlink(each) for each in there if os.path.lexists(each)]

def hang_once(note):
    try:
        os.close(os.open(note, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "again"
    os.kill(os.getppid(), SIGNAL)
    signal.pause()
"""
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "forks.py"
    path.write_text(USER_CODE)
    return path


def imports(file: Path) -> int:
    return len(Path(f"{file}.imports").read_text().splitlines())


async def meet(file: Path, folder: Path, **options: bool) -> list[list[float]]:
    """The processes of three calls that are executed at the same time."""
    folder.mkdir()
    async with pool(file, "meet", workers=3, **options) as workers:
        calls = [workers.call({"folder": str(folder), "total": 3}, 30) for _ in range(3)]
        return [each.value for each in await asyncio.gather(*calls)]


def test_the_code_is_imported_once_for_all_workers(file: Path, tmp_path: Path) -> None:
    found = asyncio.run(meet(file, tmp_path / "forked"))
    assert 1 == imports(file)
    assert (3, 1) == (len({pid for pid, _, _ in found}), len({parent for _, parent, _ in found}))
    assert 3 == len({number for _, _, number in found}), "each has its own random numbers"


def test_without_fork_each_worker_imports_it(file: Path, tmp_path: Path) -> None:
    asyncio.run(meet(file, tmp_path / "fresh", fork=False))
    assert 3 == imports(file)


def test_code_that_starts_threads_is_imported_by_each_worker(file: Path, tmp_path: Path) -> None:
    """A fork would lose them."""
    with file.open("a") as code:
        code.write("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n")
    asyncio.run(meet(file, tmp_path / "threads"))
    assert 1 + 3 == imports(file)


def test_threads_that_end_before_a_fork_forbid_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenBLAS of NumPy starts threads at its import."""
    pytest.importorskip("numpy")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "2")
    file.write_text("import numpy\n" + file.read_text())
    asyncio.run(meet(file, tmp_path / "numpy"))
    assert 1 == imports(file)


def test_a_worker_that_is_killed_is_replaced_without_an_import(file: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(file, "hang_once") as workers:
            await workers.start()
            [first] = workers.pids
            note = {"note": str(tmp_path / "note")}
            assert "timeout" == (await workers.call(note, 0.2)).status
            assert "again" == (await workers.call(note, 30)).value
            assert [first] != list(workers.pids)
            assert 1 == imports(file)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["daemon", "daemon_and_hang", "daemon_and_die"])
@pytest.mark.parametrize("fork", [True, False])
def test_daemons_end_with_their_worker(file: Path, tmp_path: Path, name: str, fork: bool) -> None:
    """Also in a session of their own, after the end of their own parent."""

    async def main() -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        async with pool(file, name, fork=fork) as workers:
            call = asyncio.create_task(workers.call({"pipe": str(pipe)}, 0.5))
            daemon = int(await asyncio.to_thread(pipe.read_text))
            expected = {"daemon": "ok", "daemon_and_hang": "timeout", "daemon_and_die": "died"}
            assert expected[name] == (await call).status
            if name == "daemon":
                assert alive(daemon), "it may be of use for later calls"
            else:
                assert not alive(daemon)
        await until_gone(daemon)

    asyncio.run(main())


def test_a_worker_with_many_children_is_replaced(file: Path) -> None:
    async def main() -> None:
        async with pool(file, "many_children") as workers:
            first = (await workers.call({}, 30)).value
            second = await workers.call({}, 30)
            assert ("ok", True) == (second.status, first != second.value)
            assert not alive(first)

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_parent_is_replaced_and_its_calls_are_made_again(
    file: Path, tmp_path: Path, number: signal.Signals
) -> None:
    file.write_text(file.read_text().replace("SIGNAL = 0", f"SIGNAL = {int(number)}"))

    async def main() -> None:
        async with pool(file, "hang_once") as workers:
            assert "again" == (await workers.call({"note": str(tmp_path / "note")}, 30)).value
            assert 2 == imports(file)

    asyncio.run(main())


def test_a_frozen_parent_is_killed(file: Path) -> None:
    """Calls go on meanwhile: the parent takes no part in them."""

    async def main() -> None:
        async with pool(file, "pid", limits=WorkerLimits(heartbeat_seconds=0.2)) as workers:
            first = (await workers.call({}, 30)).value
            assert workers._parent is not None
            os.kill(workers._parent.process.pid, signal.SIGSTOP)
            assert first == (await workers.call({}, 30)).value
            death = await asyncio.shield(workers._parent.gone)
            assert "sent no heartbeat for 0.2 s" in death.how
            await until_gone(first)
            assert first != (await workers.call({}, 30)).value

    asyncio.run(main())


def test_a_frozen_worker_is_killed_and_its_call_is_made_again(file: Path, tmp_path: Path) -> None:
    code = file.read_text().replace("signal.pause()\n", "os.kill(os.getpid(), signal.SIGSTOP)\n")
    file.write_text(code)

    async def main() -> None:
        async with pool(file, "hang_once", limits=WorkerLimits(heartbeat_seconds=0.2)) as workers:
            assert "failed" == (await workers.call({}, 30)).status
            assert "again" == (await workers.call({"note": str(tmp_path / "note")}, 30)).value

    asyncio.run(main())


def test_a_worker_may_use_processes_of_its_own(file: Path) -> None:
    async def main() -> None:
        async with pool(file, "spawn") as workers:
            result = await workers.call({}, 30)
            assert [2.0, 3.0] == result.value, result.error

    asyncio.run(main())


def test_a_worker_has_only_its_own_socket(file: Path, tmp_path: Path) -> None:
    """And neither the pipes nor the logs of others."""

    async def main() -> None:
        async with pool(file, "descriptors", workers=3, logs=str(tmp_path / "log")) as workers:
            results = await asyncio.gather(*(workers.call({}, 30) for _ in range(3)))
            for each in results:
                [only] = each.value
                assert only.startswith("socket:")

    asyncio.run(main())
