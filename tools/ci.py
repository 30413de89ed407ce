"""Everything that CI does, in stages with their times; `.ci/run` and `make test` run all of them.

    python3 tools/ci.py                 # everything
    python3 tools/ci.py lint types      # these stages, in the environment as it is
    python3 tools/ci.py --list          # the stages

    python3 tools/ci.py --nightly       # everything, with the tests that CI leaves to the night

Standard library only: the first stage makes the environment in which the others run. Each test runs once: a package's
own tests in an environment of its own, what concerns several packages in that of all wheels. One pool starts the test
files of all environments, the longest first, and pytest's summary of all of them ends the output.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import costs
import environment
from packages import ROOT, Package, discover, sources

PYTHON = str(environment.PYTHON)
SCRIPTS = environment.PYTHON.parent
DIST = ROOT / "dist"
WORKERS = 2  #: on two cores
DISK_GIB = 6  #: that a clean checkout fills
INTERPRETERS_GIB = 10  #: that the environments of vLLM, SGLang, clients and others fill beside it
LEFT_OUT = "JACKFIELD_LEFT_OUT"  #: names the tools whose tests this machine leaves out
INTERPRETERS = "vllm veomni torchao sglang trackers clients agents data_juicer"
UNITS = ROOT / "build" / "tests" / "units.json"
UNIT_SECONDS = 60.0  #: test files that are expected to take less share a process
TESTERS = 4  #: tests wait a third of their time, for processes that start, end or miss their deadline

TESTING = str(ROOT / "tools" / "testing")
COMPILING = "import importlib, jackfield_commands as tests; [*map(importlib.import_module, tests.IMPORTS)]"

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
    #: Returns whether it passed, or what it has left out.
    action: Callable[[], bool | str]
    #: Stages of the same group have no effect on each other and run side by side; their output is captured.
    group: str = ""
    by_name: bool = False  #: it runs only when it is named: a test does the same


@dataclasses.dataclass(frozen=True)
class Result:
    """How a stage ended."""

    stage: Stage
    passed: bool
    seconds: float
    left_out: str = ""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="STAGE", help="stages to run; default: all")
    parser.add_argument("--list", action="store_true", help="list the stages")
    parser.add_argument("--nightly", action="store_true", help="run the tests marked `nightly`, too")
    parser.add_argument(
        "--without-interpreters", action="store_true", help="leave out vLLM and SGLang, whose environments take 4 GB"
    )
    arguments = parser.parse_args()
    known = {stage.name: stage for stage in stages(discover(), arguments.nightly)}
    if arguments.without_interpreters:
        os.environ[LEFT_OUT] = INTERPRETERS
    if arguments.list:
        print("\n".join(f"{stage.name:12} {stage.describes}" for stage in known.values()))
        return
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"no such stage: {', '.join(unknown)} (known: {', '.join(known)})")
    chosen = [known[name] for name in arguments.names or (name for name in known if not known[name].by_name)]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process that a test starts would compile torch anew
    results = run(chosen)
    sys.exit(0 if all(result.passed for result in results) else 1)


def stages(packages: dict[str, Package], nightly: bool = False) -> list[Stage]:
    """All stages in their order."""
    ruff = [str(SCRIPTS / "ruff")]
    snapshot = [PYTHON, "-m", "jackfield_conformance.abi_snapshot", "check"]
    sphinx = [PYTHON, "-m", "sphinx", "-W", "--keep-going", "--quiet", "--no-color", "--fresh-env"]
    tox = [str(SCRIPTS / "tox"), "run-parallel", "--parallel", str(TESTERS), "--parallel-no-spinner", "--quiet"]
    pins = [PYTHON, "tools/constraints.py", "--check"]
    checks = [
        Stage("environments", "each package's own, with its wheel", _command(tox, 1800, {"JACKFIELD_MAKE_ONLY": "1"})),
        Stage("bytecode", "of what tests import", _command([PYTHON, "-c", COMPILING], 300, {"PYTHONPATH": TESTING})),
        Stage("interpreters", "environments of vLLM and SGLang for tests", _interpreters),
        Stage("size", "lines, classes and names against their ceilings", _command([PYTHON, "tools/size.py"], 60)),
        Stage("lint", "ruff: rules", _command([*ruff, "check", "."], 120)),
        Stage("format", "ruff: layout", _command([*ruff, "format", "--check", "."], 120)),
        Stage("links", "no link leaves the repository", _command([PYTHON, "tools/check_links.py"], 60)),
        Stage("imports", "who imports whom", _command([PYTHON, "tools/check_imports.py"], 180)),
        Stage("types", "mypy, strict", lambda: _types(packages)),
        Stage("abi", "contracts against their snapshots", _command(snapshot, 120)),
        Stage("references", "the generated pages are up to date", _references),
        Stage("constraints", "installed versions are pinned", _command(pins, 60)),
        Stage("benchmarks", "each answers --help", _benchmarks),
        Stage("docs", "Sphinx, warnings are errors", _command([*sphinx, "docs", "build/docs"], 300), by_name=True),
    ]
    return [
        Stage("environment", "servers for tests; tools and requirements in .venv", lambda: _environment(packages)),
        Stage("wheels", "all wheels into dist/ and .venv", lambda: _wheels(list(packages.values()))),
        *(dataclasses.replace(check, group="checks") for check in checks),
        Stage("tests", "all tests, each in its environment", lambda: _tests(packages, nightly)),
    ]


def _tests(packages: dict[str, Package], nightly: bool) -> bool:
    """Run the test files of all environments in one pool."""
    UNITS.parent.mkdir(parents=True, exist_ok=True)
    for file in [*UNITS.parent.glob("*.log"), *UNITS.parent.glob("*.jsonl")]:
        file.unlink()
    units = sorted(_units(packages, nightly), key=lambda unit: -unit["expected"])
    for number, unit in enumerate(units):
        unit["name"] = f"{number:03d}-{unit['name']}"
        del unit["expected"]
    UNITS.write_text(json.dumps(units, indent=1), encoding="utf-8")
    pytest = [PYTHON, "-m", "pytest", "-p", "jackfield_units", f"--units={UNITS}", "--places", str(TESTERS)]
    pytest += ["--override-ini", "console_output_style=classic", "--durations", "20"]
    print(f"{environment.link_bytecode()} files of bytecode are shared with the environments", flush=True)
    return _run(pytest, 10_800 if nightly else 5400)


def _units(packages: dict[str, Package], nightly: bool) -> list[dict[str, Any]]:
    """The files of each environment: a package's own, and for all others that of all wheels."""
    tested = {name: package for name, package in packages.items() if package.tests.is_dir()}
    own = [file for package in tested.values() for file in _test_files(package.tests)]
    shared = [file for file in own if "pytest.mark.shared_interpreter" in file.read_text(encoding="utf-8")]
    rest = [file for file in _test_files(ROOT / "tests") if file not in own]
    marks = [] if nightly else ["not nightly"]
    units = _chunks("together", PYTHON, rest, marks)
    units += _chunks("interpreters", PYTHON, shared, [*marks, "shared_interpreter"])
    for name, package in tested.items():
        python = str(ROOT / ".tox" / name / "bin" / "python")
        units += _chunks(name, python, _test_files(package.tests), [*marks, "not shared_interpreter"])
    return units


def _chunks(name: str, python: str, files: list[Path], marks: list[str]) -> list[dict[str, Any]]:
    """Units of one environment: a long file alone, short neighbours together."""
    seconds = costs.expected_seconds(files)
    chunks: list[list[Path]] = [[file] for file in files if seconds[file] >= UNIT_SECONDS]
    short: list[Path] = []
    for file in files:
        if seconds[file] >= UNIT_SECONDS:
            continue
        if sum(seconds[each] for each in short) + seconds[file] > UNIT_SECONDS:
            chunks.append(short)
            short = []
        short.append(file)
    chunks += [short] if short else []
    return [
        {
            "name": f"{name}-{chunk[0].stem}",
            "python": python,
            "files": [str(file.relative_to(ROOT)) for file in chunk],
            "marks": " and ".join(marks),
            "deadline": 2400.0,
            "expected": sum(seconds[file] for file in chunk),
        }
        for chunk in chunks
    ]


def _test_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("test_*.py"))


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
        outcome = stage.action()
    except SystemExit as error:
        print(error, flush=True)
        outcome = False
    left_out = outcome if isinstance(outcome, str) else ""
    return Result(stage, bool(outcome), time.monotonic() - started, left_out)


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
    if result.stage.name != "tests":
        print(f"--- {result.stage.name} {_word(result)} in {result.seconds:.1f} s", flush=True)


def _table(results: Sequence[Result], total: float) -> None:
    width = max(len(result.stage.name) for result in results)
    print(f"\n{'stage':{width}}  outcome   seconds")
    for result in results:
        print(f"{result.stage.name:{width}}  {_word(result):8}  {result.seconds:7.1f}  {result.left_out}".rstrip())
    print(f"{'so far':{width}}  {'':8}  {total:7.1f}", flush=True)


def _word(result: Result) -> str:
    if result.left_out:
        return "left out"
    return "passed" if result.passed else "FAILED"


def _environment(packages: dict[str, Package]) -> bool:
    if _free_gib() < DISK_GIB and not (ROOT / ".tox").exists():
        print(f"a clean checkout needs {DISK_GIB} GiB of disk in {ROOT}, and {_free_gib():.1f} GiB are free: make")
        print("room, or `make clean` in other checkouts; tests would fail for want of it, one by one")
        return False
    environment.install_servers()
    environment.make()
    environment.install_requirements(environment.everything(packages), "everything")
    return True


def _interpreters() -> bool | str:
    """Make what the tests of vLLM, VeOmni and SGLang need, or leave them out where there is no room for it."""
    missing = not (ROOT / "environments" / "vllm").exists()
    if LEFT_OUT not in os.environ and missing and _free_gib() < INTERPRETERS_GIB:
        os.environ[LEFT_OUT] = INTERPRETERS
        return f"{INTERPRETERS.replace(' ', ', ')}: {INTERPRETERS_GIB} GiB are needed, {_free_gib():.1f} GiB are free"
    if LEFT_OUT in os.environ:
        return f"{os.environ[LEFT_OUT].replace(' ', ', ')}: as asked for"
    return _run([sys.executable, "tools/environment.py", "interpreters"], 1200)


def _free_gib() -> float:
    return shutil.disk_usage(ROOT).free / 2**30


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
    paths = {"MYPYPATH": os.pathsep.join([*folders, "benchmarks", "tools/testing"])}
    return _run([PYTHON, "-m", "mypy", *folders, "benchmarks"], 600, paths)


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


def _command(
    command: Sequence[str], deadline: float, variables: dict[str, str] | None = None
) -> Callable[[], bool | str]:
    return lambda: _run(command, deadline, variables)


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
