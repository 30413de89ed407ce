"""Everything that CI does, in stages with their times; `.ci/run` and `make test` run all of them.

    python3 tools/ci.py                 # everything
    python3 tools/ci.py lint types      # these stages, in the environment as it is
    python3 tools/ci.py --list          # the stages

Standard library only: the first stage makes the environment in which the others run. Each test runs once: a package's
own tests in an environment of its own (stage `tox`), what concerns several packages in one pytest session over all of
them, whose summary ends the output.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import environment
from packages import ROOT, Package, discover, sources

__all__ = ["Result", "Stage", "stages"]

PYTHON = str(environment.PYTHON)
SCRIPTS = environment.PYTHON.parent
DIST = ROOT / "dist"
WORKERS = 2  #: on two cores
DISK_GIB = 12  #: that a clean checkout fills: environments, above all vLLM's
TESTERS = 3  #: tests wait a quarter of their time, for processes that start, end or miss their deadline

#: Tests use small tensors: threads of their own only get into each other's way, and nothing may look for a model hub.
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """One line of the final table."""

    name: str
    describes: str
    action: Callable[[], bool]
    #: Stages of the same group have no effect on each other and run side by side; their output is captured.
    group: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """How a stage ended."""

    stage: Stage
    passed: bool
    seconds: float


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="STAGE", help="stages to run; default: all")
    parser.add_argument("--list", action="store_true", help="list the stages")
    arguments = parser.parse_args()
    known = {stage.name: stage for stage in stages(discover())}
    if arguments.list:
        print("\n".join(f"{stage.name:12} {stage.describes}" for stage in known.values()))
        return
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"no such stage: {', '.join(unknown)} (known: {', '.join(known)})")
    chosen = [known[name] for name in arguments.names or known]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process that a test starts would compile torch anew
    results = run(chosen)
    sys.exit(0 if all(result.passed for result in results) else 1)


def stages(packages: dict[str, Package]) -> list[Stage]:
    """All stages in their order."""
    ruff = [str(SCRIPTS / "ruff")]
    snapshot = [PYTHON, "-m", "jackfield_conformance.abi_snapshot", "check"]
    sphinx = [
        PYTHON,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "--quiet",
        "--no-color",
        "--fresh-env",
        "docs",
        "build/docs",
    ]
    tox = [str(SCRIPTS / "tox"), "run-parallel", "--parallel", str(TESTERS), "--parallel-no-spinner"]
    tested = [name for name, package in packages.items() if package.tests.is_dir()]
    tested.sort(key=lambda name: _bytes(packages[name]), reverse=True)  # the long ones first
    tox += ["-e", ",".join(tested)]
    pytest = [PYTHON, "-m", "pytest", "--continue-on-collection-errors"]
    pytest += ["--numprocesses", str(TESTERS), "--dist", "loadfile"]  # a file's fixtures are made once
    pytest += ["--no-loadscope-reorder", "--durations", "30"]  # whole runs come first, and end beside the rest
    pytest += _left_to_the_session(packages)
    interpreters = Stage(
        "interpreters",
        "environments of vLLM and SGLang for tests",
        _command([sys.executable, "tools/environment.py", "interpreters"], 1200),
    )
    checks = [
        Stage("lint", "ruff: rules", _command([*ruff, "check", "."], 120)),
        Stage("format", "ruff: layout", _command([*ruff, "format", "--check", "."], 120)),
        Stage("links", "no link leaves the repository", _command([PYTHON, "tools/check_links.py"], 60)),
        Stage("imports", "who imports whom", _command([PYTHON, "tools/check_imports.py"], 180)),
        Stage("types", "mypy, strict", lambda: _types(packages)),
        Stage("abi", "contracts against their snapshots", _command(snapshot, 120)),
        Stage("references", "the generated pages are up to date", _references),
        Stage(
            "constraints", "installed versions are pinned", _command([PYTHON, "tools/constraints.py", "--check"], 60)
        ),
        Stage("benchmarks", "each answers --help", _benchmarks),
        Stage("docs", "Sphinx, warnings are errors", _command(sphinx, 300)),
    ]
    return [
        Stage("environment", "servers for tests; tools and requirements in .venv", lambda: _environment(packages)),
        Stage("wheels", "all wheels into dist/ and .venv", lambda: _wheels(list(packages.values()))),
        *(dataclasses.replace(check, group="checks") for check in [interpreters, *checks]),
        Stage("tox", "each package's tests against its wheel, alone", _command(tox, 2100)),
        Stage("session", "what concerns all packages together, against all wheels", _command(pytest, 3300)),
    ]


def _left_to_the_session(packages: dict[str, Package]) -> list[str]:
    """The tests that no package's own environment runs."""
    tests = [package.tests for package in packages.values() if package.tests.is_dir()]
    within = [f"--ignore={folder}" for folder in tests if folder.is_relative_to(ROOT / "tests")]
    shared = [
        str(file)
        for folder in tests
        for file in sorted(folder.rglob("test_*.py"))
        if "pytest.mark.shared_interpreter" in file.read_text(encoding="utf-8")
    ]
    return ["tests", *within, *shared]


def _bytes(package: Package) -> int:
    """How much there is of a package's tests, and of what they work with."""
    files = [file for file in package.folder.rglob("*.py") if package.source not in file.parents]
    return sum(file.stat().st_size for file in files)


def run(chosen: Sequence[Stage]) -> list[Result]:
    """Run stages; the table of all but the last comes before the last, so that pytest's summary ends the output."""
    results: list[Result] = []
    started = time.monotonic()
    for position, stage in enumerate(chosen):
        if stage in [result.stage for result in results]:
            continue
        if position == len(chosen) - 1 and results:
            _table(results, time.monotonic() - started)
        if stage.group:
            results += _side_by_side([each for each in chosen if each.group == stage.group])
        else:
            _heading(stage)
            results.append(_timed(stage))
            _outcome(results[-1])
        if not results[-1].passed and stage.name in {"environment", "wheels"}:
            break  # nothing after it could tell more
    return results


def _timed(stage: Stage) -> Result:
    started = time.monotonic()
    try:
        passed = stage.action()
    except SystemExit as error:
        print(error, flush=True)
        passed = False
    return Result(stage, passed, time.monotonic() - started)


def _side_by_side(group: Sequence[Stage]) -> list[Result]:
    """Run a group's commands at the same time, and print each output whole."""
    with ThreadPoolExecutor(WORKERS) as pool:
        captured = {stage.name: pool.submit(_captured, stage) for stage in group}
        results = []
        for stage in group:
            result, output = captured[stage.name].result()
            _heading(stage)
            print(output.rstrip(), flush=True)
            _outcome(result)
            results.append(result)
    return results


def _captured(stage: Stage) -> tuple[Result, str]:
    lines: list[str] = []
    _sinks[threading.get_ident()] = lines
    result = _timed(stage)
    del _sinks[threading.get_ident()]
    return result, "".join(lines)


def _heading(stage: Stage) -> None:
    print(f"\n=== {stage.name}: {stage.describes}", flush=True)


def _outcome(result: Result) -> None:
    # After the last stage nothing may follow pytest's own summary.
    if result.stage.name != "session":
        print(f"--- {result.stage.name} {_word(result)} in {result.seconds:.1f} s", flush=True)


def _table(results: Sequence[Result], total: float) -> None:
    width = max(len(result.stage.name) for result in results)
    print(f"\n{'stage':{width}}  outcome  seconds")
    for result in results:
        print(f"{result.stage.name:{width}}  {_word(result):7}  {result.seconds:7.1f}")
    print(f"{'so far':{width}}  {'':7}  {total:7.1f}", flush=True)


def _word(result: Result) -> str:
    return "passed" if result.passed else "FAILED"


def _environment(packages: dict[str, Package]) -> bool:
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < DISK_GIB and not (ROOT / ".tox").exists():
        print(f"a clean checkout needs {DISK_GIB} GiB of disk in {ROOT}, and {free:.1f} GiB are free: make room, or")
        print("`make clean` in other checkouts; tests would fail for want of it, one by one, and say something else")
        return False
    environment.install_servers()
    environment.make()
    environment.install_requirements(environment.everything(packages), "everything")
    return True


def _wheels(packages: Sequence[Package]) -> bool:
    """Build each wheel once, from a clean dist/, and install them all."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    with ThreadPoolExecutor(WORKERS) as pool:
        outputs = list(pool.map(_build, packages))
    print("".join(outputs), end="", flush=True)
    missing = [package.name for package in packages if not package.wheel.is_file()]
    if missing:
        print(f"no wheel was built of {', '.join(missing)}", flush=True)
    built = [package.wheel for package in packages if package.wheel.is_file()]
    if built:
        environment.install_wheels(built)
    return not missing


def _build(package: Package) -> str:
    command = [PYTHON, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(DIST)]
    done = subprocess.run(
        command, cwd=package.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
    )
    return f"{package.wheel.name}\n" if done.returncode == 0 else f"{package.name}: {done.stdout}{done.stderr}\n"


def _types(packages: dict[str, Package]) -> bool:
    folders = sources(packages)
    paths = {"MYPYPATH": os.pathsep.join(folders)}
    return _run([PYTHON, "-m", "mypy", *folders], 600, paths)


def _benchmarks() -> bool:
    """Peers need not be installed for a benchmark to say what it does."""
    scripts = sorted((ROOT / "benchmarks").glob("[!_]*.py"))
    passed = [_run([PYTHON, str(script), "--help"], 60, quiet=True) for script in scripts]
    _write(f"{sum(passed)} of {len(scripts)} benchmarks answer --help\n")
    return all(passed)


def _references() -> bool:
    """Each tool that writes a page of the documentation says whether the committed page is what it would write."""
    scripts = sorted((ROOT / "tools").glob("*_reference.py"))
    passed = [_run([PYTHON, str(script), "--check"], 60) for script in scripts]
    return all(passed)


def _command(command: Sequence[str], deadline: float) -> Callable[[], bool]:
    return lambda: _run(command, deadline)


def _run(command: Sequence[str], deadline: float, variables: dict[str, str] | None = None, quiet: bool = False) -> bool:
    """Run a command in the root folder; end it, with all that it started, when the deadline (seconds) passes."""
    given = {**VARIABLES, **{name: os.environ[name] for name in VARIABLES if name in os.environ}, **(variables or {})}
    captured = quiet or threading.get_ident() in _sinks
    process = subprocess.Popen(
        list(command),
        cwd=ROOT,
        env={**os.environ, **given},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if captured else None,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output = ""
    try:
        output = process.communicate(timeout=deadline)[0] or ""
    except subprocess.TimeoutExpired:
        _write(f"not finished after {deadline:.0f} s: {' '.join(map(str, command))}\n")
    finally:
        _end(process)
    if captured and not (quiet and process.returncode == 0):
        _write(output)
    return process.returncode == 0


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and its descendants, if it is still there."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


#: Where the stages that run side by side write to, by thread.
_sinks: dict[int, list[str]] = {}


def _write(text: str) -> None:
    sink = _sinks.get(threading.get_ident())
    if sink is None:
        print(text, end="", flush=True)
    else:
        sink.append(text)


if __name__ == "__main__":
    main()
