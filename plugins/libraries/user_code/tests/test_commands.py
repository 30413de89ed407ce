"""Commands end with everything that they have started."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from jackfield_user_code.commands import CommandLimits, CommandResult, run_command

#: Starts a daemon in a session of its own, tells its id, and waits.
DAEMON = """
import os, sys, time
told, told_in = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.write(told_in, b"x")
    open(sys.argv[1], "w").write(str(os.getpid()))
    os.write(told_in, b"x")
    time.sleep(600)
os.read(told, 1), os.read(told, 1)
print("begun", flush=True)
if len(sys.argv) > 2:
    os.mkfifo(sys.argv[2] + ".lock")
    open(sys.argv[2], "w").write("begun")
    time.sleep(600)
"""


def run(*command: str, **options: object) -> CommandResult:
    return asyncio.run(run_command(command, **options))  # type: ignore[arg-type]


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; one that nobody waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_command_gets_its_input_and_environment_and_its_output_is_returned(tmp_path: Path) -> None:
    """Input, environment, folder, output and exit code are the command's."""
    code = "import os, sys; print(sys.stdin.read(), os.environ['A'], os.getcwd()); sys.exit(3)"
    found = run(sys.executable, "-c", code, stdin=b"in", env={"A": "env"}, cwd=tmp_path)
    assert CommandResult(code=3, output=f"in env {tmp_path}\n", errors="") == found


def test_a_command_that_does_not_read_or_writes_a_lot_does_not_hang() -> None:
    """A large input and a large output need no reader; only the output's end is kept."""
    code = "import sys; sys.stdout.write('x' * 10_000_000 + 'end'); sys.stderr.write('bad\\n')"
    found = run(sys.executable, "-c", code, stdin=b"y" * 10_000_000)
    assert (0, "end", 65536) == (found.code, found.output[-3:], len(found.output))
    assert "bad" == found.told


def test_a_missing_program_and_a_signal_are_exit_codes() -> None:
    """What a shell would tell is told."""
    found = run("/does/not/exist")
    assert 127 == found.code
    assert "cannot be started" in found.told
    assert 128 + signal.SIGKILL == run(sys.executable, "-c", "import os; os.kill(os.getpid(), 9)").code


def test_memory_is_limited() -> None:
    """A command that takes more than its memory fails, and not the machine."""
    found = run(sys.executable, "-c", "bytearray(2**30)", limits=CommandLimits(memory_bytes=2**29))
    assert 1 == found.code
    assert "MemoryError" in found.told


def test_a_daemon_that_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    """The daemon has a session and a parent of its own."""
    assert "begun\n" == run(sys.executable, "-c", DAEMON, str(tmp_path / "pid")).output
    assert not is_running(int((tmp_path / "pid").read_text()))


async def _begun(command: list[str], mark: Path) -> asyncio.Task[CommandResult]:
    """Run a command in a task, and return when it says that it has begun."""
    task = asyncio.create_task(run_command(command))
    while not mark.exists() or not mark.read_text():
        assert not task.done()
        await asyncio.sleep(0.01)
    return task


def test_a_cancelled_command_ends_with_its_daemon(tmp_path: Path) -> None:
    """Cancelling leaves no process, in whatever session."""

    async def cancel() -> None:
        command = [sys.executable, "-c", DAEMON, str(tmp_path / "pid"), str(tmp_path / "mark")]
        task = await _begun(command, tmp_path / "mark")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_command_ends_when_its_worker_is_killed(tmp_path: Path) -> None:
    """``kill -9`` of the process that runs the command leaves nothing."""
    code = (
        "import asyncio, sys; from jackfield_user_code.commands import run_command; "
        f"asyncio.run(run_command([sys.executable, '-c', {DAEMON!r}, *sys.argv[1:]]))"
    )

    async def kill() -> None:
        arguments = [str(tmp_path / "pid"), str(tmp_path / "mark")]
        worker = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *arguments)
        while not (tmp_path / "mark").exists():
            await asyncio.sleep(0.01)
        worker.send_signal(signal.SIGKILL)
        await worker.wait()
        pid = int((tmp_path / "pid").read_text())
        while is_running(pid):  # the launcher gets a signal, and then kills it
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(kill(), 30))
    assert os.path.exists(tmp_path / "pid")


def test_a_log_gets_the_output_of_each_command_and_is_bounded(tmp_path: Path) -> None:
    """Commands that fail and that are cancelled are in it; a long log is put aside."""
    log = tmp_path / "folder" / "commands.log"
    code = "import sys; print('out'); print('err', end='', file=sys.stderr); sys.exit(3)"
    run(sys.executable, "-c", code, log=log, name="first")
    assert "-- first: exit code 3\nout\nerr\n" == log.read_text()
    with log.open("a") as file:
        file.write("x" * (4 * 2**20))
    told = tmp_path / "told"
    os.mkfifo(told)

    async def cancelled() -> None:
        code = "import sys, time; print('begun', flush=True); open(sys.argv[1], 'w').close(); time.sleep(600)"
        command = (sys.executable, "-c", code, str(told))
        running = asyncio.create_task(run_command(command, log=log, name="second"))
        await asyncio.to_thread(lambda: told.open().close())
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert "begun" == log.read_text().splitlines()[-1]
    assert log.read_text().startswith("-- second: exit code ")
    assert Path(f"{log}.1").read_text().startswith("-- first")


def test_a_log_that_cannot_be_written_does_not_fail_a_command(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The result counts; a warning tells."""
    assert 0 == run(sys.executable, "-c", "print('out')", log=tmp_path, name="first").code
    assert str(tmp_path) in caplog.text
