"""Tests of workers' own interpreters: which worker gets which one, and how environments are made."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

from jackfield.cli import main
from jackfield.compose.checks import interpreters
from jackfield.config import RunConfig, make_config
from jackfield.errors import ConfigError, JackfieldError, PluginError
from jackfield.plugins import discover
from jackfield.plugins import interpreters as plugin_interpreters
from jackfield.plugins.interpreters import EnvironmentSettings, create_environment, environment_python
from jackfield_testing import refused

#: Uses only plugins of the core; a rollout server is not found unless a test asks for it.
PLAIN = {"model": {"path": "nowhere"}, "reward": "function", "agent": "none", "engine": "none"}


def config(*overrides: str) -> RunConfig:
    return make_config(PLAIN, overrides)


def test_weights_cross_processes_where_the_server_has_its_own() -> None:
    own = "cluster.interpreters={rollout: /elsewhere/bin/python}"
    assert "in_process" == config().checkpoint_engine.name
    assert "shared" == config(own).checkpoint_engine.name
    assert "nccl" == config(own, "cluster.name=ray").checkpoint_engine.name
    assert "file" == config(own, "checkpoint_engine=file").checkpoint_engine.name
    with pytest.raises(ConfigError) as caught:
        config(own, "checkpoint_engine=in_process")
    assert "in_process with cluster.interpreters.rollout" == caught.value.found
    with refused("config.invalid-value", "checkpoint_engine.name", "leave out cluster.name: ray"):
        config("cluster.name=ray", "checkpoint_engine=in_process")


def test_a_kind_that_has_no_worker_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        config("cluster.interpreters={tracker: python3}")
    assert ("config.invalid-value", "cluster.interpreters") == (caught.value.code, caught.value.where)
    assert all(kind in caught.value.message for kind in ("tracker", "engine", "rollout", "agent", "reward"))


def wheel(folder: Path, name: str, version: str = "1.0", summary: str = "nothing") -> str:
    """Build an empty wheel."""
    folder.mkdir(exist_ok=True)
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n"
        file.writestr(f"{info}/METADATA", metadata)
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return str(path)


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[str, str]:
    """Return wheels of ``tiny`` and ``other``."""
    return wheel(tmp_path, "tiny"), wheel(tmp_path, "other")


def found(folder: Path, *names: str) -> dict[str, str | None]:
    """Return the versions of distributions in an environment."""
    script = (
        "import importlib.metadata as m, json, sys\n"
        "def look(name):\n    try: return m.version(name)\n    except m.PackageNotFoundError: return None\n"
        "print(json.dumps({name: look(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [environment_python(folder), "-c", script, *names], capture_output=True, text=True, check=True, timeout=50
    )
    answer: dict[str, str | None] = json.loads(done.stdout)
    return answer


@pytest.mark.timeout(180)
@pytest.mark.parametrize("installer", ["pip", pytest.param("uv", marks=pytest.mark.needs("module:uv"))])
def test_an_environment_is_made_once_and_again_when_its_plan_changes(
    tmp_path: Path, tiny: tuple[str, str], monkeypatch: pytest.MonkeyPatch, installer: str
) -> None:
    """Extra packages are removed, only a new wheel is installed again, and a failure is named."""
    comes, other = tiny
    monkeypatch.setattr(plugin_interpreters, "requirement_as_installed", lambda name: [comes])
    monkeypatch.setattr("importlib.metadata.requires", lambda name: None)
    folder = tmp_path / "made"
    settings = EnvironmentSettings(requires=(other,), uninstall=("other",), installer=installer)

    def create(settings: EnvironmentSettings = settings) -> bool:
        return create_environment(settings, folder, ["tiny"], 120.0)

    assert create()
    assert {"tiny": "1.0", "other": None} == found(folder, "tiny", "other")
    assert not create()

    wheel(tmp_path, "tiny", summary="the same name and version, built again")
    (folder / "kept").touch()
    assert create()
    (metadata,) = (folder / "lib").glob("*/site-packages/tiny-1.0.dist-info/METADATA")
    assert "built again" in metadata.read_text()
    assert (folder / "kept").exists()
    assert not create()

    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(PluginError) as caught:
        create(attrs.evolve(settings, python=str(broken)))
    assert ("plugin.environment", str(folder)) == (caught.value.code, caught.value.where)
    assert "broken -m venv" in str(caught.value.expected)
    assert "exit code 3" in str(caught.value.found)
    assert not (folder / "jackfield-environment.json").exists()


def test_a_folder_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(PluginError) as caught:
        create_environment(EnvironmentSettings(), tmp_path, [], 10.0)
    assert "plugin.environment" == caught.value.code
    assert "years" == (tmp_path / "thesis.tex").read_text()


def test_a_missing_uv_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(PluginError) as caught:
        create_environment(EnvironmentSettings(installer="uv"), tmp_path, [], 1.0)
    assert ("plugin.environment", "environments.*.installer") == (caught.value.code, caught.value.where)


def test_the_deadline_ends_it(tmp_path: Path) -> None:
    with pytest.raises(PluginError) as caught:
        create_environment(EnvironmentSettings(), tmp_path / "late", [], 0.01)
    assert "no end within the deadline" == caught.value.found


def test_an_environment_that_is_not_described_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({**PLAIN, "environments": {"one": {}}}))
    done = CliRunner().invoke(main, ["env", "create", "two", str(file)])
    assert 1 == done.exit_code
    assert done.stderr.startswith("[config.invalid-value]")
    assert "expected: one of one" in done.stderr


def chosen(*overrides: str) -> dict[str, str] | JackfieldError:
    """Return the interpreters that kinds of workers get."""
    try:
        return interpreters(config(*overrides), discover())
    except JackfieldError as error:
        return error


def test_the_engine_stays_in_the_process_of_an_inline_run() -> None:
    """Only a rollout server can run in a separate process; the error says what else is possible."""
    error = chosen("cluster.interpreters={engine: /bin/sh}")
    assert isinstance(error, PluginError)
    assert ("plugin.interpreter", "cluster.interpreters.engine") == (error.code, error.where)
    assert "cluster.name: ray" in str(error.fix)


def test_an_environment_that_is_not_made_says_how(tmp_path: Path) -> None:
    error = chosen(f"environments={{own: {{folder: {tmp_path}}}}}", "cluster.interpreters={engine: own}")
    assert isinstance(error, PluginError)
    assert f"{tmp_path}/bin/python" == error.expected
    assert "jackfield env create own FILE" in str(error.fix)


def test_this_interpreter_is_none_of_its_own() -> None:
    """A worker whose interpreter is the running one stays in this process."""
    error = chosen(f"cluster.interpreters={{engine: {sys.executable}}}")
    assert isinstance(error, JackfieldError), "the rest of the configuration names plugins that nobody has"
    assert "plugin.not-found" == error.code
