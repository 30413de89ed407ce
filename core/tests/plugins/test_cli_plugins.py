"""``jackfield plugins list`` and ``doctor``, run as a person runs them."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from jackfield.cli import main
from jackfield.cli.commands import json_option
from jackfield.errors import RunError
from jackfield.plugins import discover

MISSING_METHOD = """
from jackfield.abc.reward import RewardAgent
class Agent(RewardAgent):
    pass
"""
SYNC = """
from jackfield.abc.reward import RewardAgent
class Agent(RewardAgent):
    def compute_score(self, request):
        return None
"""
SIGNATURE = """
from jackfield.abc.reward import RewardAgent
class Agent(RewardAgent):
    async def compute_score(self, data, truth):
        return None
"""

#: Fine for ``list``, which imports nothing; each with the code that ``doctor`` finds.
ILL_INSIDE: dict[str, tuple[dict[str, Any], str]] = {
    "raises": ({"modules": {"plugin.py": "raise RuntimeError('boom')"}}, "plugin.import"),
    "raises_early": ({"modules": {"__init__.py": "raise RuntimeError('boom')"}}, "plugin.import"),
    "exits": ({"modules": {"plugin.py": "import sys; sys.exit(0)"}}, "plugin.import"),
    "lacks": ({"modules": {"plugin.py": MISSING_METHOD}}, "plugin.abstract-method"),
    "sync": ({"modules": {"plugin.py": SYNC}}, "plugin.sync-async"),
    "signature": ({"modules": {"plugin.py": SIGNATURE}}, "plugin.signature"),
    "config": ({"modules": {"config.py": "class Config: pass"}}, "plugin.config-class"),
    "needs": ({"extra": '[env]\nrequires = ["quite-absent>=2"]'}, "plugin.requirement"),
    "module": ({"extra": '[env]\nmodules = ["quite_absent"]'}, "plugin.requirement"),
    "old": ({"extra": '[env]\nrequires = ["attrs<1"]'}, "plugin.requirement"),
    "hooks": ({"extra": 'hooks = "fake_hooks.hooks"', "modules": {"hooks.py": ""}}, "plugin.hooks"),
    "crashes": ({"modules": {"plugin.py": "import os; os.kill(os.getpid(), 11)"}}, "plugin.import"),
    "quits": ({"modules": {"plugin.py": "import os; os._exit(0)"}}, "plugin.import"),
    "elsewhere": ({"extra": '[env]\npython = "/absent/bin/python"'}, "plugin.interpreter"),
}


def listed(site: Any, *arguments: str) -> dict[str, Any]:
    result = site.cli("plugins", "list", "--json", *arguments)
    assert (0, "") == (result.returncode, result.stderr)
    return {row["name"]: row for row in json.loads(result.stdout)}


def diagnosed(site: Any, *arguments: str) -> tuple[int, dict[str, Any]]:
    result = site.cli("plugins", "doctor", "--json", *arguments)
    report = json.loads(result.stdout)
    return result.returncode, {plugin["name"]: plugin for plugin in report["plugins"]}


def test_list_shows_broken_plugins_beside_good_ones_and_exits_0(site):
    site.install("good")
    site.install("rotten", abi="9.0")
    rows = listed(site)
    assert {"name", "kind", "abi", "distribution", "status", "error"} <= set(rows["good"])
    assert ("ok", None, "1.0") == tuple(rows["good"][key] for key in ("status", "error", "abi"))
    assert ("broken", "plugin.abi", "9.0") == (
        rows["rotten"]["status"],
        rows["rotten"]["error"]["code"],
        rows["rotten"]["abi"],
    )


def test_list_as_text_is_a_table_with_the_errors(site):
    site.install("good")
    site.install("rotten", abi="9.0")
    result = site.cli("plugins", "list")
    assert 0 == result.returncode
    header, *lines = result.stdout.splitlines()
    good = next(line for line in lines if line.startswith("good"))
    assert ["good", "reward", "1.0", "dist-fake-good", "0.1.0", "ok", "a", "fake"] == good.split()
    assert header.index("STATUS") == good.index("ok")
    assert "code: plugin.abi" in result.stdout
    assert "upgrade jackfield" in result.stdout


def test_kind_selects(site):
    site.install("good")
    assert "good" not in listed(site, "--kind", "agent")
    assert "good" in listed(site, "--kind", "reward")


def test_an_unknown_kind_is_wrong_usage(site):
    result = site.cli("plugins", "list", "--kind", "motor")
    assert 2 == result.returncode
    assert "checkpoint_engine" in result.stderr


def test_list_is_quick_and_imports_no_plugin_and_nothing_heavy(site):
    """Half a second is the promise with ten plugins. Others may use the machine, so the least processor time of some
    runs counts, and twice the promise still passes."""
    for number in range(10):
        site.install(f"bomb_{number}", modules={"__init__.py": "raise RuntimeError('imported')"})
    program = """
import json, sys
from click.testing import CliRunner
from jackfield.cli import main
output = CliRunner().invoke(main, ["plugins", "list", "--json"]).output
heavy = {"torch", "ray", "numpy", "transformers", "tensordict", "rich"} & set(sys.modules)
heavy |= {name for name in sys.modules if name.startswith("fake_")}
print(json.dumps([sorted(heavy), [row["status"] for row in json.loads(output) if "bomb" in row["name"]]]))
"""
    result = site.run("-c", program)
    assert 0 == result.returncode, result.stderr
    assert [[], ["ok"] * 10] == json.loads(result.stdout)
    best = float("inf")
    for _ in range(6):
        before = _seconds_of_children()
        assert 0 == site.cli("plugins", "list").returncode
        best = min(best, _seconds_of_children() - before)
        if best < 0.5:
            break
    assert best < 1.0


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_importing_jackfield_loads_nothing_heavy(site):
    program = "import jackfield, sys; print({'torch', 'ray', 'numpy', 'attrs', 'click'} & set(sys.modules))"
    assert "set()\n" == site.run("-c", program).stdout


def test_the_doctor_names_each_plugin_that_is_ill_inside_and_no_other(site):
    site.install("good", modules={"plugin.py": "print('{\"problems\": [{}]}')\n" + _good()})
    site.install("rotten", abi="9.0")
    for name, (options, _) in ILL_INSIDE.items():
        site.install(name, **options)
    names = ["good", "rotten", *ILL_INSIDE]
    assert dict.fromkeys([*ILL_INSIDE, "good"], "ok") == {
        name: row["status"] for name, row in listed(site, "--kind", "reward").items() if name in (*ILL_INSIDE, "good")
    }
    code, plugins = diagnosed(site, *names)
    assert 1 == code
    expected = {"good": [], "rotten": ["plugin.abi"], **{name: [c] for name, (_, c) in ILL_INSIDE.items()}}
    assert expected == {name: [p["code"] for p in plugin["problems"]] for name, plugin in plugins.items()}
    problems = [problem for plugin in plugins.values() for problem in plugin["problems"]]
    assert all(problem["fix"] for problem in problems)
    crashed = plugins["crashes"]["problems"][0]
    assert ("importing fake_crashes.plugin ended the interpreter", "killed by SIGSEGV") == (
        crashed["message"],
        crashed["found"],
    )


def test_a_plugin_without_its_engine_is_optional_unless_it_is_named(site, monkeypatch: pytest.MonkeyPatch):
    """What installing the plugin should have installed is a problem, and so is a version that does not fit."""
    absent = '[env]\nmodules = ["quite_absent"]\nrequires = ["quite-absent>=2"]'
    site.install("absent", extra=absent)
    site.install("torn", extra=absent)
    (metadata,) = site.folder.glob("dist_fake_torn*/METADATA")
    metadata.write_text(metadata.read_text() + "Requires-Dist: Quite_Absent>=2\n")
    site.install("old", extra='[env]\nrequires = ["attrs<1"]')
    site.install("pinned", extra='[env]\nrequires = ["quite-absent>=2", "attrs<1"]')  # the engine's own pins
    monkeypatch.setenv("PYTHONPATH", site.environment()["PYTHONPATH"])
    monkeypatch.syspath_prepend(site.folder)
    found = {record.name: record for record in discover().records("reward")}

    def doctor(*shown: str, named: bool = False) -> tuple[int, list[str]]:
        registry = SimpleNamespace(records=lambda _: map(found.get, shown), resolve=lambda name, _: found[name])
        monkeypatch.setattr("jackfield_conformance.commands.discover", lambda: registry)
        done = CliRunner().invoke(main, ["plugins", "doctor", "--json", *(shown if named else ())])
        return done.exit_code, [plugin["status"] for plugin in json.loads(done.stdout)["plugins"]]

    assert (0, ["optional", "optional"]) == doctor("absent", "pinned")
    assert (1, ["problem"]) == doctor("absent", named=True)
    assert (1, ["problem", "problem"]) == doctor("torn", "old")


def _good() -> str:
    return (
        "from jackfield.abc.reward import RewardAgent, ScoreResult\n"
        "class Agent(RewardAgent):\n"
        "    async def compute_score(self, request):\n"
        "        return ScoreResult(score=1.0)\n"
    )


def test_the_doctor_names_an_import_that_hangs(site):
    site.install("hangs", modules={"plugin.py": "import threading; threading.Event().wait()"})
    code, plugins = diagnosed(site, "hangs", "--deadline", "3")
    assert 1 == code
    problem = plugins["hangs"]["problems"][0]
    assert ("plugin.import", "importing fake_hangs.plugin did not end in time") == (problem["code"], problem["message"])
    assert "--deadline" in problem["fix"]


def test_a_thread_that_a_plugin_leaves_running_does_not_hold_the_doctor_up(site):
    thread = "import threading; threading.Thread(target=threading.Event().wait).start()\n"
    site.install("threads", modules={"plugin.py": thread + _good()})
    code, plugins = diagnosed(site, "threads", "--deadline", "50")
    assert (0, []) == (code, plugins["threads"]["problems"])
    assert plugins["threads"]["seconds"] < 40


def test_a_config_that_loads_torch_is_a_problem(site):
    (site.folder / "torch.py").write_text("")  # a stand-in: only the name counts
    site.install("heavy", modules={"config.py": "import attrs, torch\n@attrs.frozen\nclass Config: pass"})
    code, plugins = diagnosed(site, "heavy")
    assert (1, ["plugin.config-class"]) == (code, [problem["code"] for problem in plugins["heavy"]["problems"]])


def test_the_doctor_tries_a_plugin_in_its_own_interpreter(site, tmp_path: Path):
    """Its requirement is only met there."""
    other = tmp_path / "other"
    other.mkdir()
    inner = type(site)(other)
    info = other / "only_there-2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: only-there\nVersion: 2.1\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={other} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    extra = f'[env]\nrequires = ["only-there>=2"]\npython = "{python}"'
    site.install("roams", extra=extra)
    inner.install("roams", extra=extra)
    code, plugins = diagnosed(site, "roams")
    assert (0, str(python), []) == (code, plugins["roams"]["python"], plugins["roams"]["problems"])


def test_an_own_interpreter_that_lacks_the_plugin_says_so(site, tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    site.install("roams", extra=f'[env]\npython = "{python}"')
    code, plugins = diagnosed(site, "roams")
    assert (1, ["plugin.not-found"]) == (code, [problem["code"] for problem in plugins["roams"]["problems"]])


def test_extras_of_a_requirement_are_looked_at(site):
    info = site.folder / "base-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: base\nVersion: 1.0\nProvides-Extra: train\n"
        "Requires-Dist: attrs\nRequires-Dist: quite-absent>=3; extra == 'train'\n"
    )
    site.install("plain", extra='[env]\nrequires = ["base"]')
    site.install("fancy", extra='[env]\nrequires = ["base[train]", "never; python_version < \'3\'"]')
    _, plugins = diagnosed(site, "plain", "fancy")
    assert [] == plugins["plain"]["problems"]
    assert ["quite-absent>=3"] == [problem["expected"] for problem in plugins["fancy"]["problems"]]


def test_the_doctor_exits_0_when_all_is_fine_and_shows_versions(site):
    site.install("good")
    result = site.cli("plugins", "doctor", "good")
    assert 0 == result.returncode
    assert "ok      reward 'good' (dist-fake-good 0.1.0), ABI 1.0" in result.stdout
    assert f"Python {sys.version.split()[0]}" in result.stdout


def test_the_doctor_prints_fixes(site):
    site.install("lacks", modules={"plugin.py": MISSING_METHOD})
    result = site.cli("plugins", "doctor", "lacks")
    assert 1 == result.returncode
    assert "PROBLEM reward 'lacks'" in result.stdout
    assert "fix: define compute_score(request)" in result.stdout


@pytest.mark.parametrize("as_json", [False, True])
def test_the_doctor_exits_2_when_it_could_not_run(site, as_json: bool):
    result = site.cli("plugins", "doctor", "absent", *(["--json"] if as_json else []))
    assert 2 == result.returncode
    assert "plugin.not-found" in (result.stdout if as_json else result.stderr)


def test_the_doctor_looks_at_any_interpreter(site):
    result = site.cli("plugins", "doctor", "--json", "--python", sys.executable, "--python", "/absent/python")
    fine, missing = json.loads(result.stdout)["interpreters"]
    assert 1 == result.returncode
    assert ("ok", sys.executable) == (fine["status"], fine["path"])
    assert {"jackfield", "torch", "ray"} == set(fine["versions"])
    assert ["plugin.interpreter"] == [problem["code"] for problem in missing["problems"]]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """``jackfield fail [--json]`` raises an error of ours."""
    import click

    @click.command()
    @json_option
    def fail(as_json: bool) -> None:
        raise RunError("it broke", where="here", fix="mend it")

    monkeypatch.setitem(main.commands, "fail", fail)


@pytest.mark.usefixtures("failing")
def test_an_error_is_printed_on_stderr_with_exit_code_1():
    result = CliRunner().invoke(main, ["fail"])
    assert (1, "", "[run.failed] it broke at here\n  fix: mend it\n") == (
        result.exit_code,
        result.stdout,
        result.stderr,
    )


@pytest.mark.usefixtures("failing")
def test_an_error_with_json_is_an_object_on_stdout():
    result = CliRunner().invoke(main, ["fail", "--json"])
    assert 1 == result.exit_code
    assert ("run.failed", "mend it") == tuple(json.loads(result.stdout)["error"][key] for key in ("code", "fix"))


def test_help_imports_nothing_heavy(site):
    program = "import sys; from jackfield.cli import main\nmain(['--help'], standalone_mode=False)\n"
    result = site.run("-c", program + "print({'torch', 'ray', 'numpy', 'rich', 'attrs', 'yaml'} & set(sys.modules))")
    assert result.stdout.endswith("set()\n")
    for command in main.commands:
        assert f"  {command} " in result.stdout


def test_an_unknown_command_is_wrong_usage():
    assert 2 == CliRunner().invoke(main, ["rnu"]).exit_code
