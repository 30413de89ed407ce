"""One pytest session over many interpreters: the tests of each package in its own environment, in one summary.

A *unit* is some test files with the interpreter that runs them. The session starts ``--places`` units at a time, and a
few more while processors are idle, because tests wait for processes much of their time. Each unit is a pytest process
of its own (a fork of one that has imported torch: see ``jackfield_commands``), in the order of the file. The session
shows their reports as if it had run the tests::

    python -m pytest -p jackfield_units --units=build/tests/units.json

A process that ends without a report of how it went counts as a failure. The session writes the time of each test to
``costs.json`` beside the units; see ``tools/costs.py``. In a unit's process this module writes the reports down, and
adds the processor time of each test: unlike its duration, that does not depend on what else the machine does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest

from jackfield_commands import IMPORTS, CommandServer, ServerEnded

MORE = 4  #: units that run beside those of ``--places`` while they leave processors idle
BUSY = 90.0  #: percent of all processors from which no unit is added

#: Where a unit's process writes its reports; unset in the session that starts the units.
REPORTS = "JACKFIELD_TEST_REPORTS"


@dataclasses.dataclass(frozen=True)
class Unit:
    """Test files, and the interpreter that runs them."""

    name: str
    python: str
    files: list[str]
    marks: str  #: pytest's ``-m``
    deadline: float  #: seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options of the session."""
    group = parser.getgroup("units", "tests in several interpreters")
    group.addoption("--units", type=Path, help="JSON file with the units to run")
    group.addoption("--places", type=int, default=3, help="units that run at a time; more where processors are idle")


def pytest_configure(config: pytest.Config) -> None:
    """Write reports in a unit's process; start units in the session."""
    if config.option.units is not None:
        config.pluginmanager.register(Session(config), "jackfield-session")
    elif REPORTS in os.environ:
        config.pluginmanager.register(Reporter(config, Path(os.environ[REPORTS])), "jackfield-reporter")


class Reporter:
    """Writes what a unit's process finds, one JSON object a line."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._file: TextIO = path.open("w", encoding="utf-8")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Measure the processor time of a test, its fixtures and the processes that it has waited for."""
        before = _processor_seconds()
        result = yield
        self._write({"nodeid": item.nodeid, "processor_seconds": round(_processor_seconds() - before, 2)})
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the report of one phase of a test."""
        self._write(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write the report of a file that could not be collected."""
        if report.failed or report.skipped:
            self._write(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Write which tests are left to the nightly run."""
        self._write({"nightly": [item.nodeid for item in items if item.get_closest_marker("nightly")]})

    def pytest_unconfigure(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, content: object) -> None:
        print(json.dumps(content, default=str), file=self._file, flush=True)


class Session:
    """Runs the units in the place of tests of its own."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        path: Path = config.option.units
        self._folder = path.parent
        self._units = [Unit(**unit) for unit in json.loads(path.read_text(encoding="utf-8"))]
        self._servers: dict[str, CommandServer] = {}
        self._starting = threading.Lock()
        self._running: set[str] = set()
        self._entering = threading.Lock()
        self._costs: dict[str, dict[str, float]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        """Collect nothing: the units do."""
        session.items = []
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all units, and show the reports of each when it has ended."""
        with ThreadPoolExecutor(self._config.option.places + MORE) as pool:
            try:
                started = {pool.submit(self._run_in_turn, unit): unit for unit in self._units}
                for done in as_completed(started):
                    self._show(session, started[done], *done.result())
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for server in self._servers.values():
                    server.close()
        self._save_costs()
        return True

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Show the conformance tables that the units' processes have printed."""
        for line in conformance_lines(self._folder / f"{unit.name}.log" for unit in self._units):
            terminalreporter.write_line(line)

    def _run_in_turn(self, unit: Unit) -> tuple[int, float]:
        """Run one unit as soon as there is a place, or as the running ones leave processors idle."""
        import psutil  # not in every unit's environment

        with self._entering:
            while len(self._running) >= self._config.option.places and psutil.cpu_percent(1.0) > BUSY:
                pass
            self._running.add(unit.name)
        try:
            return self._run(unit)
        finally:
            self._running.discard(unit.name)

    def _run(self, unit: Unit) -> tuple[int, float]:
        """Run one unit in a process of its own; its exit code and its seconds."""
        bin_folder = str(Path(unit.python).parent)
        variables = {
            REPORTS: str(self._folder / f"{unit.name}.jsonl"),
            "PATH": os.pathsep.join([bin_folder, os.environ["PATH"]]),
        }
        arguments = ["-p", "jackfield_units", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
        arguments += [
            "-W",
            "ignore:Module already imported so cannot be rewritten; anyio:pytest.PytestAssertRewriteWarning",
        ]
        arguments += ["-m", unit.marks, f"--config-file={self._config.inipath}", *unit.files]
        log = self._folder / f"{unit.name}.log"
        started = time.monotonic()
        try:
            command = self._server(unit.python).start(
                *arguments, program="pytest", environment=variables, folder=Path.cwd(), output=log
            )
        except ServerEnded as ended:
            return ended.code, time.monotonic() - started
        try:
            code = command.wait(unit.deadline).code
        except AssertionError:
            code = 1
            with log.open("a", encoding="utf-8") as file:
                print(f"\nnot finished after {unit.deadline:.0f} s", file=file)
        return code, time.monotonic() - started

    def _server(self, python: str) -> CommandServer:
        """Find the process whose forks run tests in an interpreter, or start it."""
        with self._starting:
            if python not in self._servers:
                alone = sum(unit.python == python for unit in self._units) == 1  # it imports what its tests need
                self._servers[python] = CommandServer(self._folder, python, () if alone else IMPORTS)
            return self._servers[python]

    def _show(self, session: pytest.Session, unit: Unit, code: int, seconds: float) -> None:
        """Hand the reports of a unit to pytest, and say what is missing."""
        hook, passed = self._config.hook, True
        for content in _read(self._folder / f"{unit.name}.jsonl"):
            if "$report_type" not in content:
                self._note(content)
                continue
            if isinstance(content.get("longrepr"), list):
                content["longrepr"] = tuple(content["longrepr"])
            report = hook.pytest_report_from_serializable(config=self._config, data=content)
            passed = passed and not report.failed
            if isinstance(report, pytest.CollectReport):
                hook.pytest_collectreport(report=report)
                continue
            if report.when == "setup":
                session.testscollected += 1
                hook.pytest_runtest_logstart(nodeid=report.nodeid, location=report.location)
            cost = self._costs.setdefault(report.nodeid, {"seconds": 0.0, "processor_seconds": 0.0})
            cost["seconds"] = round(cost["seconds"] + report.duration, 2)
            hook.pytest_runtest_logreport(report=report)
        if code not in (0, 5) and passed:  # 5: every test of the files belongs to another unit
            tail = (self._folder / f"{unit.name}.log").read_text(encoding="utf-8", errors="replace")[-4000:]
            hook.pytest_runtest_logreport(report=_failure(unit, f"{unit.name} ended with {code}:\n{tail}"))
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        reporter.ensure_newline()
        reporter.write_line(f"{unit.name}: {len(unit.files)} files in {seconds:.0f} s")

    def _save_costs(self) -> None:
        """Replace what is known of the files that have run."""
        path = self._folder / "costs.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        ran = {file for unit in self._units for file in unit.files}
        kept = {name: cost for name, cost in known.items() if name.partition("::")[0] not in ran}
        path.write_text(json.dumps({**kept, **self._costs}, indent=1, sort_keys=True), encoding="utf-8")

    def _note(self, content: dict[str, Any]) -> None:
        """Keep what is written beside the reports."""
        if "nightly" in content:
            left = [SimpleNamespace(nodeid=name) for name in content["nightly"]]
            self._config.hook.pytest_deselected(items=left)
            return
        cost = self._costs.setdefault(content["nodeid"], {"seconds": 0.0})
        cost["processor_seconds"] = content["processor_seconds"]


def conformance_lines(logs: Iterator[Path]) -> Iterator[str]:
    """The rows of the tables that ``jackfield-conformance`` prints at the end of a process, under one head."""
    head = False
    for log in logs:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        first = next((number for number, line in enumerate(lines) if line.startswith("conformance, checks")), None)
        if first is None:
            continue
        rows = lines[first : first + 2] if not head else []
        head = True
        yield from rows
        for line in lines[first + 2 :]:
            if line.startswith("=") or not line:
                break
            yield line


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):  # a killed process may leave half of one
                    yield json.loads(line)


def _failure(unit: Unit, text: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=f"{unit.files[0]}::{unit.name}",
        location=(unit.files[0], 0, unit.name),
        keywords={},
        outcome="failed",
        longrepr=text,
        when="call",
    )


def _processor_seconds() -> float:
    """Of this process, of its children that have ended, and of those that live with all that they have waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread, or a child, has ended meanwhile
            for child in (task / "children").read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return seconds


if __name__ == "__main__":
    sys.exit("this is a pytest plugin: python3 tools/ci.py tests")
