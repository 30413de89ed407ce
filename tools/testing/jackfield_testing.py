"""What the tests of all packages share: where the data is, and when a test may be skipped.

A pytest plugin; the root ``pyproject.toml`` puts this folder on the path and loads it in every run, in the
environments of single packages, too.

``@pytest.mark.needs("postgres")`` skips a test where the tool is missing. Under ``CI=true`` a missing tool that CI
installs is a failure; only hardware that CI lacks, and the shared data, may be missing there. Any other skip fails
under ``CI=true``: a check that did not run must not read as one that passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Coroutine, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from jackfield.errors import JackfieldError
from jackfield_commands import CommandServer
from jackfield_servers import PostgresServer, RedisServer, postgres_programs, redis_program

DATA_VARIABLE = "JACKFIELD_DATA"
LEFT_OUT_VARIABLE = "JACKFIELD_LEFT_OUT"  #: tools that tools/ci.py has no room for, separated by spaces
ROOT = Path(__file__).resolve().parent.parent.parent


def _cuda() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@contextlib.contextmanager
def refused(code: str | tuple[str, ...], *names: object) -> Iterator[pytest.ExceptionInfo[JackfieldError]]:
    """Expect an error of Jackfield by its code, or one of several; the error names everything in ``names``."""
    with pytest.raises(JackfieldError) as caught:
        yield caught
    assert caught.value.code in (code if isinstance(code, tuple) else (code,)), str(caught.value)
    missing = [str(name) for name in names if str(name) not in str(caught.value)]
    assert [] == missing, str(caught.value)


def _may(*command: str) -> bool:
    """Whether a command is there, and this user may do it."""
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


#: A network namespace with a cable in it, for a moment.
_CABLE = """
ip netns add probe-$$ || exit 1
ip link add cable netns probe-$$ type veth peer name other netns probe-$$; code=$?
ip netns delete probe-$$; exit $code
"""


#: Where `make interpreters` puts torchao, which makes each import of transformers slower where it is installed.
TORCHAO = ROOT / "environments" / "torchao"

#: Where `make interpreters` puts SmolLM2-135M-Instruct, in bfloat16.
SMOLLM2 = ROOT / "environments" / "smollm2"

#: Where `make interpreters` puts the libraries of trackers.
TRACKERS = ROOT / "environments" / "trackers"

#: Tools that CI has installed by the time the tests run. Python packages are named ``module:NAME``.
TOOLS: dict[str, Callable[[], bool]] = {
    "agents": lambda: agents_python() is not None,
    "cc": lambda: shutil.which("cc") is not None,
    "clients": lambda: clients_python() is not None,
    "data_juicer": lambda: data_juicer_python() is not None,
    "flock": lambda: shutil.which("flock") is not None,
    "git": lambda: shutil.which("git") is not None,
    "node": lambda: shutil.which("node") is not None,
    "postgres": lambda: postgres_programs() is not None,
    "redis": lambda: redis_program() is not None,
    "sglang": lambda: sglang_python() is not None,
    "smollm2": lambda: (SMOLLM2 / "config.json").exists(),
    "torchao": lambda: (TORCHAO / "torchao" / "__init__.py").exists(),
    "trackers": lambda: (TRACKERS / "bin" / "python").exists(),
    "veomni": lambda: veomni_python() is not None,
    "vllm": lambda: vllm_python() is not None,
}


def clients_python() -> Path | None:
    """The interpreter of clients of OpenAI's API: ``JACKFIELD_CLIENTS_PYTHON``, or that of ``make interpreters``."""
    return _python("clients")


def agents_python() -> Path | None:
    """The interpreter that has verifiers and OpenEnv: ``JACKFIELD_AGENTS_PYTHON``, or that of ``make interpreters``."""
    return _python("agents")


def data_juicer_python() -> Path | None:
    """The interpreter that has Data-Juicer: ``JACKFIELD_DATA_JUICER_PYTHON``, or that of ``make interpreters``."""
    return _python("data_juicer")


def veomni_python() -> Path | None:
    """The interpreter in which tests run VeOmni: ``JACKFIELD_VEOMNI_PYTHON``, or that of ``make interpreters``."""
    return _python("veomni")


def vllm_python() -> Path | None:
    """The interpreter in which tests run vLLM: ``JACKFIELD_VLLM_PYTHON``, or that of ``make interpreters``."""
    return _python("vllm")


def sglang_python() -> Path | None:
    """The interpreter that has SGLang's types: ``JACKFIELD_SGLANG_PYTHON``, or that of ``make interpreters``."""
    return _python("sglang")


def _python(name: str) -> Path | None:
    given = os.environ.get(f"JACKFIELD_{name.upper()}_PYTHON")
    python = Path(given or ROOT / "environments" / name / "bin" / "python")
    return python if python.exists() else None


#: Qwen3's tokenizer and chat template, which ``make interpreters`` downloads where npm is.
QWEN3_TOKENIZER = ROOT / "environments" / "qwen3_tokenizer"

#: What a machine of CI may lack: hardware, the rights of an administrator, and npm's packages.
HARDWARE: dict[str, Callable[[], bool]] = {
    "cuda": _cuda,
    "mount": lambda: _may("unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"),
    "network namespaces": lambda: _may("sh", "-c", _CABLE),
    "other users": lambda: os.geteuid() == 0,
    "qwen3": lambda: (QWEN3_TOKENIZER / "tokenizer_config.json").exists(),
}

_ALLOWED = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers, and let examples of Hypothesis take the time that a busy machine needs."""
    if find_spec("hypothesis") is not None:
        from hypothesis import settings

        settings.register_profile("jackfield", deadline=None)
        settings.load_profile("jackfield")
    config.addinivalue_line("markers", "needs(*tools): skip where a tool is missing; under CI=true fail instead")
    config.addinivalue_line("markers", "shared_interpreter: uses an interpreter that all tests of the session share")
    config.addinivalue_line("markers", "nightly: part of a full matrix; `make nightly` runs it, CI does not")
    config.addinivalue_line("markers", "needs_data(folder): skip where that folder of the shared data is missing")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Imports make what lives on: no search for garbage among it, neither meanwhile nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def in_ci() -> bool:
    """Whether this is a run of CI."""
    return os.environ.get("CI", "").lower() in {"1", "true"}


def data_root() -> Path:
    """The shared data: ``JACKFIELD_DATA``, or ``shared/data`` beside the repository."""
    given = os.environ.get(DATA_VARIABLE)
    return Path(given) if given else ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of shared data. A test that uses it is marked ``needs_data("gsm8k")``."""
    return data_root()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test in an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A running PostgreSQL for the whole session; a test that uses it is marked ``needs("postgres")``."""
    server = PostgresServer()
    with contextlib.closing(server):
        server.start()
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A running Redis for the whole session; a test that uses it is marked ``needs("redis")``."""
    server = RedisServer()
    with contextlib.closing(server):
        server.start()
        yield server


@pytest.fixture(scope="session")
def jackfield(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandServer]:
    """``jackfield("run", FILE)``: the command line, without its imports: see ``jackfield_commands``."""
    with CommandServer(tmp_path_factory.mktemp("commands")) as server:
        yield server


@pytest.fixture
def unused_port() -> int:
    """Where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, or fail, a test whose needs are not met."""
    for marker in item.iter_markers("needs_data"):
        folder = data_root() / marker.args[0]
        if not folder.is_dir():
            _skip(item, f"{folder} is missing (set {DATA_VARIABLE})")
    for marker in item.iter_markers("needs"):
        for tool in marker.args:
            _require(item, tool)


def _require(item: pytest.Item, tool: str) -> None:
    if tool in os.environ.get(LEFT_OUT_VARIABLE, "").split():
        _skip(item, f"left out on this machine: {tool}")
    if tool in HARDWARE:
        if not HARDWARE[tool]():
            _skip(item, f"needs {tool}")
        return
    if tool.startswith("module:"):
        there = find_spec(tool.removeprefix("module:")) is not None
    elif tool in TOOLS:
        there = TOOLS[tool]()
    else:
        known = ", ".join(sorted({*TOOLS, *HARDWARE}))
        raise pytest.UsageError(f"{item.nodeid} needs {tool!r}; known are module:NAME, {known} (tools/testing)")
    if not there:
        pytest.skip(f"needs {tool}")


def _skip(item: pytest.Item, reason: str) -> None:
    item.stash[_ALLOWED] = reason
    pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    """Under CI, a skip that is not allowed is a failure."""
    report: pytest.TestReport = yield
    if in_ci() and report.skipped and not hasattr(report, "wasxfail") and _ALLOWED not in item.stash:
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> object:
    """Under CI, a module that skips itself is a failure."""
    report: pytest.CollectReport = yield
    if in_ci() and report.skipped:
        _fail(report)
    return report


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = (
        f"{report.nodeid}: {reason}\n"
        "Under CI=true this skip is a failure: CI has the tools it needs. Install the tool in .ci/run and name it in\n"
        'tools/testing/jackfield_testing.py, or mark the test with needs("cuda") or needs_data(FOLDER) if it is\n'
        "hardware or shared data that is missing."
    )
