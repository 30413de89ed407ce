"""The tools that CI runs: what they must notice, they notice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ci
import environment
import size
from packages import ROOT, closure, discover, third_party


def project(folder: Path, name: str, requires: list[str], **extras: list[str]) -> None:
    """Write the pyproject.toml of a package."""
    folder.mkdir(parents=True)
    lines = ["[project]", f'name = "{name}"', 'version = "1.0"', f"dependencies = {json.dumps(requires)}"]
    lines += ["[project.optional-dependencies]", *(f"{key} = {json.dumps(value)}" for key, value in extras.items())]
    (folder / "pyproject.toml").write_text("\n".join(lines), encoding="utf-8")


def test_packages_and_their_requirements_are_found(tmp_path: Path) -> None:
    """A new plugin's folder is enough: its siblings and what comes from outside follow from the pyproject files."""
    project(tmp_path / "core", "jackfield", ["attrs>=24"], train=["torch>=2.8"])
    project(tmp_path / "plugins/engines/new", "jackfield_engine.new", ["jackfield[train]>=0.1", "peft"])
    project(tmp_path / "plugins/rewards/light", "jackfield-reward-light", ["jackfield"])
    packages = discover(tmp_path)
    assert ["jackfield", "jackfield-engine-new", "jackfield-reward-light"] == list(packages)

    heavy = {"jackfield-engine-new": frozenset[str]()}
    assert {"jackfield": frozenset({"train"}), **heavy} == closure(packages, heavy)
    assert ["attrs>=24", "peft", "torch>=2.8"] == third_party(packages, heavy)
    assert ["attrs>=24"] == third_party(packages, {"jackfield-reward-light": frozenset()})


def test_two_packages_of_one_name_are_refused(tmp_path: Path) -> None:
    """Their wheels would overwrite each other."""
    project(tmp_path / "plugins/rewards/one", "jackfield-reward-same", [])
    project(tmp_path / "plugins/rewards/two", "jackfield_reward_same", [])
    with pytest.raises(SystemExit, match="jackfield-reward-same"):
        discover(tmp_path)


@pytest.mark.needs("flock")
def test_a_stage_ends_at_its_deadline_with_all_that_it_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stage that hangs is ended, and its descendants, too."""
    lock = tmp_path / "lock"
    command = ["sh", "-c", f"flock {lock} sleep 600 & wait"]
    assert not ci._run(command, 0.5)
    assert "not finished after" in capsys.readouterr().out
    assert 0 == subprocess.run(["flock", "--timeout", "20", lock, "true"], check=False).returncode


def test_a_failing_stage_fails_the_run_and_the_others_still_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The table names it."""
    seen: list[str] = []

    def stage(name: str, passes: bool, group: str = "") -> ci.Stage:
        return ci.Stage(name, "", lambda: seen.append(name) is None and passes, group)

    results = ci.run([stage("one", True, "checks"), stage("two", False, "checks"), stage("three", True)])
    assert [("one", True), ("two", False), ("three", True)] == [(each.stage.name, each.passed) for each in results]
    assert {"one", "two", "three"} == set(seen)
    assert re.search(r"^two +FAILED", capsys.readouterr().out, re.MULTILINE)


def test_nothing_goes_on_without_an_environment() -> None:
    """A stage that makes what the others need ends the run when it fails."""
    results = ci.run([ci.Stage("environment", "", lambda: False), ci.Stage("lint", "", lambda: True)])
    assert ["environment"] == [each.stage.name for each in results]


def test_a_disk_that_will_be_full_is_said_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is installed on it."""
    monkeypatch.setattr(ci, "ROOT", tmp_path)
    monkeypatch.setattr(ci, "DISK_GIB", 2**40)
    monkeypatch.setattr(environment, "install_servers", lambda: pytest.fail("began to install"))
    assert not ci._environment({})
    assert f"GiB of disk in {tmp_path}" in capsys.readouterr().out


def test_the_algorithm_reference_is_checked() -> None:
    """`tools/algorithm_reference.py --check` passes for the page that is committed."""
    done = subprocess.run([sys.executable, ROOT / "tools" / "algorithm_reference.py", "--check"], check=False)
    assert 0 == done.returncode


def test_uv_is_told_where_pip_finds_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv reads none of pip's settings; what is said to uv itself stands."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    settings = tmp_path / "pip.conf"
    settings.write_text(
        "[global]\nfind-links = /from/the/file\nextra-index-url =\n    http://one/simple\n    http://two/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels/one /wheels/two")
    monkeypatch.setenv("PIP_INDEX_URL", "http://mirror/simple")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://said/to/uv")
    found = environment.installer_settings()
    assert "/wheels/one,/wheels/two" == found["UV_FIND_LINKS"]
    assert "http://one/simple http://two/simple" == found["UV_INDEX"]
    assert "UV_DEFAULT_INDEX" not in found


@pytest.mark.needs("git")
@pytest.mark.parametrize(
    ("target", "refused"), [("b/there", False), ("/tmp/there", True), ("../outside", True), ("b/../../outside", True)]
)
def test_a_link_that_leaves_the_repository_is_refused(tmp_path: Path, target: str, refused: bool) -> None:
    """Whether it is absolute or climbs out; one to a place inside may be committed."""
    (tmp_path / "a").symlink_to(target)
    for command in (["init", "--quiet"], ["add", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    check = [sys.executable, str(ROOT / "tools" / "check_links.py"), str(tmp_path)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert (int(refused), refused) == (done.returncode, f"a link to {target}" in done.stdout)


@pytest.mark.timeout(300)
def test_one_session_counts_the_tests_of_several_interpreters(tmp_path: Path) -> None:
    """Also a test that fails, a process that says nothing, and what is left to the night; costs are kept."""
    (tmp_path / "test_good.py").write_text(
        "import pytest\ndef test_good(): pass\n@pytest.mark.nightly\ndef test_matrix(): pass\n"
    )
    (tmp_path / "test_bad.py").write_text("def test_bad(): assert 1 == 2\n")
    files = {sys.executable: ["test_good.py", "test_bad.py"], "/bin/false": ["test_silent.py"]}
    units = [
        {
            "name": f"{number}",
            "python": python,
            "files": [str(tmp_path / name) for name in names],
            "marks": "not nightly",
            "deadline": 60.0,
        }
        for number, (python, names) in enumerate(files.items())
    ]
    (tmp_path / "units.json").write_text(json.dumps(units))
    command = [sys.executable, "-m", "pytest", "-p", "jackfield_units", f"--units={tmp_path / 'units.json'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stdout.splitlines()[-1]
    assert 1 == done.returncode
    assert re.search("2 failed, 1 passed, 1 deselected in", last), done.stdout + done.stderr
    assert "assert 1 == 2" in done.stdout
    assert "1 ended with 1" in done.stdout
    costs = json.loads((tmp_path / "costs.json").read_text())
    assert {"test_good", "test_bad"} <= {name.partition("::")[2] for name in costs}
    assert all({"seconds", "processor_seconds"} == set(cost) for cost in costs.values())


def test_a_machine_without_room_says_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stage of the other interpreters passes, and names them."""
    monkeypatch.setattr(ci, "ROOT", tmp_path)
    monkeypatch.setattr(ci, "INTERPRETERS_GIB", 2**40)
    monkeypatch.setenv(ci.LEFT_OUT, "")
    monkeypatch.delenv(ci.LEFT_OUT)
    (result,) = ci.run([ci.Stage("interpreters", "", ci._interpreters)])
    assert result.passed
    assert result.left_out.startswith("vllm, veomni, torchao, sglang, trackers, clients, agents, data_juicer: ")
    assert "vllm veomni torchao sglang trackers clients agents data_juicer" == os.environ[ci.LEFT_OUT]
    assert "interpreters left out" in capsys.readouterr().out


def size_of(folder: Path, **texts: str) -> list[size.Room]:
    """The rooms of a core of these modules, and of nothing else."""
    (folder / "src" / "jackfield").mkdir(parents=True)
    for name, text in texts.items():
        (folder / "src" / "jackfield" / f"{name}.py").write_text(text)
    files = tuple(size._read(path) for path in sorted(folder.rglob("*.py")))
    return [size.Room("jackfield", files), size.Room("plugins/*", ()), size.Room("conformance/", ())]


def test_sizes_are_held_to_their_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many lines, a file that is too long, and a circle each have a line."""
    monkeypatch.setattr(size, "ROOT", tmp_path)
    one = "from jackfield.two import b\n_c = 1\ndef a() -> None: ...\n"
    found = size_of(tmp_path, one=one, two="def b() -> None:\n    import jackfield.one\n" + "#\n" * 400)
    both = [
        "src/jackfield/two.py: 402 lines, at most 400",
        "these files import each other: jackfield.one jackfield.two",
    ]
    assert both == size.problems(found, {"ceiling": {"core": 405, "core+plugins+conformance": 405}})
    limits = {"ceiling": {"core": 404, "core+plugins+conformance": 405}}
    assert ["core: 405 lines, at most 404", *both] == size.problems(found, limits)
    assert (405, 0, 2) == (found[0].lines, found[0].classes, found[0].names)


def test_bytecode_is_shared_with_files_that_are_the_same_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same release is one file with several names; another version, or a package that is not there, is not."""
    ours, same, other = (tmp_path / each / "lib/python3.11/site-packages" for each in (".venv", ".tox/a", ".tox/b"))
    for folder in (ours / "pkg" / "__pycache__", same / "pkg", other / "pkg"):
        folder.mkdir(parents=True)
    (ours / "pkg" / "module.py").write_text("A = 1\n")
    (ours / "pkg" / "__pycache__" / "module.cpython-311.pyc").write_bytes(b"compiled")
    os.link(ours / "pkg" / "module.py", same / "pkg" / "module.py")
    (other / "pkg" / "module.py").write_text("A = 1\n")
    monkeypatch.setattr(environment, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert [1, 0] == [environment.link_bytecode(), environment.link_bytecode()]
    assert b"compiled" == (same / "pkg" / "__pycache__" / "module.cpython-311.pyc").read_bytes()
    assert not (other / "pkg" / "__pycache__").exists()
