"""The pytest plugin: ``--plugin KIND:NAME`` makes each check of the kind a test.

The entry point ``pytest11`` loads it in every pytest of an environment that has jackfield-conformance, so importing it
must stay cheap. Without ``--plugin`` it only shows the table of the plugins that :func:`jackfield_conformance.certify`
has checked.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from jackfield_conformance.registry import Check, Outcome
    from jackfield_conformance.runner import Run  # noqa: F401

_PACKAGE = "jackfield_conformance"
_FOLDER = Path(__file__).parent
_ENTRY = _FOLDER / "conformance.py"  #: the file that stands for the checks when pytest collects the package
_RUN = pytest.StashKey["Run"]()
_TEMPORARY = pytest.StashKey["tempfile.TemporaryDirectory[str]"]()
_WORKERS = pytest.StashKey[list[Mapping[str, Any]]]()  #: certificates made by workers of pytest-xdist
_NO_PLUGIN = "name the plugin to check: --plugin KIND:NAME"
_OUTPUT = "jackfield_certificates"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--plugin``, ``--tier`` and ``--certificate``."""
    group = parser.getgroup("jackfield", "Jackfield conformance")
    group.addoption("--plugin", metavar="KIND:NAME", help="the installed plugin to check, for example engine:fsdp")
    group.addoption(
        "--tier",
        dest="jackfield_tiers",
        action="append",
        default=[],
        choices=("base", "capability", "stress", "gpu"),
        help="run this tier of checks, too, beside base and capability; repeatable",
    )
    group.addoption("--certificate", metavar="FILE", help="write the JSON certificate here")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Ignore the configuration of the current folder: ``conftest.py``, ``addopts`` and ini values.

    It must not influence whether a plugin keeps its contract. ``pythonpath``, ``-p`` in ``addopts`` and
    ``required_plugins`` stay in effect, because pytest has already applied them.
    """
    known = early_config.known_args_namespace
    if _PACKAGE not in known.file_or_dir:
        return
    if not getattr(known, "plugin", None):
        raise pytest.UsageError(_NO_PLUGIN)
    if getattr(known, "inifilename", None):
        return  # -c FILE requests this configuration
    known.noconftest = True
    given = [str(argument) for argument in early_config.invocation_params.args]
    args[:] = [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *given]
    for name in ("_inicfg", "_inicache"):  # there is no public way; if the names change, the ini values stay
        getattr(early_config, name, {}).clear()


def pytest_configure(config: pytest.Config) -> None:
    """Find the plugin that ``--plugin`` names."""
    asked = config.getoption("--plugin")
    if asked is None:
        return
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("the checks of one plugin run in one process: leave --numprocesses out")
    from jackfield.errors import PluginNotFound
    from jackfield_conformance.runner import DEFAULT_TIERS, Run

    config.stash[_TEMPORARY] = tempfile.TemporaryDirectory(prefix="jackfield-conformance-", ignore_cleanup_errors=True)
    try:
        tiers = (*DEFAULT_TIERS, *config.getoption("jackfield_tiers"))
        config.stash[_RUN] = Run.of(asked, Path(config.stash[_TEMPORARY].name), tiers)
    except (ValueError, PluginNotFound) as error:
        raise pytest.UsageError(f"--plugin: {error}") from None
    if config.getoption("--certificate"):
        Path(config.getoption("--certificate")).unlink(missing_ok=True)  # an earlier one


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what the checks wrote."""
    temporary = config.stash.get(_TEMPORARY, None)
    if temporary is not None:
        temporary.cleanup()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return the line of the header that names the checked plugin."""
    run = config.stash.get(_RUN, None)
    if run is None:
        return None
    record = run.record
    return f"conformance of {record.kind}:{record.name}, ABI {record.abi}, from {record.distribution} {record.version}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect only the entry of this package, whatever ``python_files`` says."""
    if _FOLDER in collection_path.parents:
        return collection_path != _ENTRY
    return None


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the checks for the entry file."""
    if file_path != _ENTRY:
        return None
    if _RUN not in parent.config.stash:
        raise pytest.UsageError(_NO_PLUGIN)
    collector: pytest.Collector = _Checks.from_parent(parent, path=file_path)
    return collector


class _Checks(pytest.File):
    """All checks of a kind."""

    def collect(self) -> Iterable[pytest.Item]:
        run = self.config.stash[_RUN]
        for check in run.checks:
            # the path of this package would tell a reader nothing
            node = f"{run.record.kind}:{run.record.name}::{check.id}"
            yield _CheckItem.from_parent(self, name=check.id, nodeid=node, check=check)


class _CheckItem(pytest.Item):
    """One check as a test."""

    def __init__(self, *, check: Check, **options: Any) -> None:
        super().__init__(**options)
        self.check = check
        # each check has its own deadline; pytest-timeout is the last resort
        self.add_marker(pytest.mark.timeout(check.deadline_seconds + 30))

    def runtest(self) -> None:
        outcome = self.config.stash[_RUN].execute(self.check)
        if outcome.status == "failed":
            raise _Broken(self.check, outcome)
        if outcome.status == "exempt":
            pytest.xfail(outcome.message.splitlines()[0])
        if outcome.status != "passed":
            pytest.skip(f"{outcome.status.replace('_', ' ')}: {outcome.message}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, _Broken):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"{self.check.id}: {self.check.invariant}"


class _Broken(Exception):
    """Raised for a failed check, which is shown without pytest's traceback."""

    def __init__(self, check: Check, outcome: Outcome) -> None:
        super().__init__(f"{check.id}: {check.invariant}.\n{outcome.message}\nsee {check.page}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the certificate, also of a failure; the level gives the exit code. Pass on a pytest-xdist worker's."""
    run = session.config.stash.get(_RUN, None)
    file = session.config.getoption("--certificate")
    if run is not None and run.outcomes:
        certificate = run.certificate()
        if certificate.level == "none":
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if file:
            Path(file).write_text(json.dumps(certificate.as_dict(), indent=2) + "\n", encoding="utf-8")
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_OUTPUT] = json.dumps(list(_certificates()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Keep the certificates of a pytest-xdist worker, for the table at the end."""
    node.config.stash.setdefault(_WORKERS, []).extend(json.loads(getattr(node, "workeroutput", {}).get(_OUTPUT, "[]")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the report of the plugin; or, in a plugin's own tests, the table plugin × level."""
    run = config.stash.get(_RUN, None)
    if run is not None and run.outcomes:
        terminalreporter.section("conformance")
        terminalreporter.write_line(run.certificate().report())
    certificates = [*_certificates(), *config.stash.get(_WORKERS, [])]
    if certificates:
        from jackfield_conformance.runner import level_table

        terminalreporter.write_line("conformance, checks passed of those that apply:")
        for line in level_table(certificates):
            terminalreporter.write_line(line)


def _certificates() -> Iterator[Mapping[str, Any]]:
    runner = sys.modules.get("jackfield_conformance.runner")  # not imported: nothing was certified
    if runner is not None:
        yield from (certificate.as_dict() for certificate in runner.RUNS)
