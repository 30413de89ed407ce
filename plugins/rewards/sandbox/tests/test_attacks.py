"""Code that attacks what isolates it, at each level that this machine allows."""

from __future__ import annotations

import json
import os
import platform
import socket
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from jackfield.abc.reward import ScoreResult

Run = Callable[..., list[ScoreResult]]

#: Code prints "held" if it could not do what it must not. With `facts` it gets the test's port, process and folder.
_ATTEMPT = """
import json, os, signal, socket, sys
facts = json.loads(input())
def attempt(function):
    try:
        return function()
    except (OSError, UnicodeError):
        return False
print("reached" if attempt(lambda: {0}) else "held")
"""

#: By name: the expression, and the levels that do not forbid it to a user that is not the code's own.
_REACHES: dict[str, tuple[str, set[str]]] = {
    "the network": ("socket.create_connection(('127.0.0.1', facts['port']), 5)", {"limits"}),
    "a Unix socket": ("socket.socket(socket.AF_UNIX).connect(facts['path']) is None", {"limits"}),
    "the environment": ("any('SECRET' in name for name in os.environ)", set()),
    "another environment": (
        "any(b'=' in open(f'/proc/{pid}/environ', 'rb').read() for pid in facts['pids'])", set(),
    ),
    "files of others": ("open(facts['folder'] + '/written', 'w')", {"limits"}),
    "files of the system": ("open('/usr/written', 'w')", set()),
    "data of others": ("open(facts['folder'] + '/truth').read() == 'truth'", {"limits"}),
    "a signal": ("os.kill(facts['pids'][0], 0) is None", set()),
    "a signal to the parent": ("os.getppid() > 1 and os.kill(os.getppid(), 0) is None", set()),
    "tracing": ("__import__('ctypes').CDLL(None).ptrace(0x4206, facts['pids'][0], 0, 0) == 0", set()),
}  # fmt: skip


def test_what_code_must_not_reach(run: Run, isolated: dict[str, Any], level: str, shared_folder: str) -> None:
    """The same attempts without isolation would reach all of it: see the last test of this file."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        samples = _samples(server, local, shared_folder)
        results = run([*samples.values()], **isolated)
    reached = {name for name, result in zip(samples, results, strict=True) if result.score != 1.0}
    # as an ordinary user, the weakest level has no other user for the code
    own = {"another environment", "a signal", "a signal to the parent", "tracing"} if os.geteuid() else set()
    expected = {name for name, (_, open_to) in _REACHES.items() if level in open_to}
    assert expected | (own if level == "limits" else set()) == reached, [each.explanation for each in results]


def _samples(server: socket.socket, local: socket.socket, folder: str) -> dict[str, tuple[str, Any]]:
    path = os.path.join(folder, "socket")
    local.bind(path)
    os.chmod(path, 0o777)
    local.listen(64)
    facts = {"port": server.getsockname()[1], "folder": folder, "pids": [os.getpid()], "path": path}
    tests = {"inputs": [json.dumps(facts)], "outputs": ["held"]}
    return {name: (_ATTEMPT.format(code), tests) for name, (code, _) in _REACHES.items()}


@pytest.fixture
def shared_folder() -> Any:
    """A folder that everyone may write to, with a file that everyone may read."""
    import shutil
    import tempfile

    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o777)
    with open(os.path.join(folder, "truth"), "w") as file:
        file.write("truth")
    yield folder
    shutil.rmtree(folder)


#: Code that takes too much, and what the explanation says of it.
_GREEDY = {
    "processes": ("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", "longer"),
    "threads": (
        "import threading\nstop = threading.Event()\nall = [threading.Thread(target=stop.wait) for _ in range(99)]\n"
        "try:\n    [each.start() for each in all]\nfinally:\n    stop.set()", "can't start new thread",
    ),
    "memory": ("x = bytearray(10**9)", "MemoryError"),
    "shared memory": ("import mmap\nx = mmap.mmap(-1, 10**9)", "Cannot allocate memory"),
    "a file": ("f = open('big', 'wb')\nwhile True:\n    f.write(bytes(10**6))", "OSError"),
    "an endless loop": ("while True:\n    pass", "longer"),
    "a signal handler": ("import signal\nsignal.signal(15, signal.SIG_IGN)\nsignal.pause()", "longer"),
    "output": ("import os\nwhile True:\n    os.write(1, bytes(10**6))", "wrote more"),
    "errors": ("import os\nwhile True:\n    os.write(2, bytes(10**6))", "longer"),
    "files in memory": (
        "import os\nfor n in range(200):\n    os.write(os.memfd_create('x'), bytes(9 * 10**6))",
        "Operation not permitted",
    ),
    "descriptors": ("f = [open('/dev/null') for _ in range(10**4)]", "Too many open files"),
}  # fmt: skip


def test_what_code_must_not_take(run: Run, isolated: dict[str, Any], level: str) -> None:
    """Each limit ends the code, and the others get their scores."""
    greedy = {name: each for name, each in _GREEDY.items() if level != "limits" or name != "files in memory"}
    samples = [(code, {"inputs": [""], "outputs": ["x"]}) for code, _ in greedy.values()]
    fair = ("print('x')", {"inputs": [""], "outputs": ["x"]})
    limits = {"seconds": 1.0, "memory_bytes": 4 * 10**8, "disk_bytes": 10**7, "processes": 8, "workers": 4}
    *results, last = run([*samples, fair], **isolated, **limits)
    found = dict(zip(greedy, results, strict=True))
    assert dict.fromkeys(greedy, 0.0) == {name: each.score for name, each in found.items()}
    wrong = [each.explanation for name, each in found.items() if _GREEDY[name][1] not in str(each.explanation)]
    assert [] == wrong
    assert ("ok", 1.0) == (last.status, last.score)


def test_all_files_together_are_limited_in_namespaces(run: Run, isolated: dict[str, Any], level: str) -> None:
    """Other levels limit each file alone."""
    code = "for n in range(100):\n    open(str(n), 'wb').write(bytes(10**6))\nprint('x')"
    [result] = run([(code, {"inputs": [""], "outputs": ["x"]})], **isolated, disk_bytes=10**7)
    assert float(level != "namespaces") == result.score


#: Code whose end leaves something behind.
_LEAVES = {
    "a daemon": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 99)
                time.sleep(1000)
            os._exit(0)
        print("x")
        """,
    "a thread": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\nprint('x')",
    "files": "import os\nos.makedirs('a/b/c')\nos.chmod('a/b', 0)\nos.chmod('a', 0)\nprint('x')",
    "a link": "import os\nos.symlink('/usr', 'usr')\nprint('x')",
}


def test_system_calls_that_are_refused(run: Run, isolated: dict[str, Any], level: str) -> None:
    """With EPERM, also by their numbers of another interface of the same kernel (x32)."""
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfor number in map(int, input().split()):\n"
        "    print(number, libc.syscall(number, 0, 0, 0, 0, 0) < 0 and ctypes.get_errno())"
    )
    refused, own = [425], 172  # io_uring_setup and getpid
    if platform.machine() == "x86_64":
        refused, own = [319, 425, 250, 248, 323, (1 << 30) + 39], 39
        refused += [41, 438, 308] if level == "filters" else []
    expected = "\n".join([f"{own} False", *(f"{number} 1" for number in refused)])
    numbers = " ".join(map(str, [own, *refused]))
    [found] = run([(code, {"inputs": [numbers], "outputs": [expected]})], **isolated)
    assert float(level != "limits") == found.score, found.explanation


def test_nothing_is_left(run: Run, isolated: dict[str, Any]) -> None:
    """The fixture waits for all processes, and looks for files."""
    tests = {"inputs": ["", ""], "outputs": ["x", "x"]}
    results = run([(textwrap.dedent(code), tests) for code in _LEAVES.values()], **isolated)
    assert [1.0] * len(_LEAVES) == [each.score for each in results], [each.explanation for each in results]


def test_a_test_finds_nothing_of_another(run: Run, isolated: dict[str, Any]) -> None:
    """Neither in its folder nor in memory."""
    code = "import glob\nprint(len(glob.glob('*')), 'seen' in globals())\nseen = 1\nopen('left', 'w').write(input())"
    tests = {"inputs": ["a", "b", "c"], "outputs": ["1 False"] * 3}
    assert [1.0] == [each.score for each in run([(code, tests)], **isolated)]


@pytest.mark.needs("other users")
def test_without_isolation_the_attempts_reach_everything(run: Run, shared_folder: str) -> None:
    """So that a level that forbids one of them is tested by it."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        samples = _samples(server, local, shared_folder)
        del samples["files of the system"]
        results = run([*samples.values()], isolation="none")
    reached = {name for name, result in zip(samples, results, strict=True) if result.score != 1.0}
    assert samples.keys() - {"the environment"} == reached
