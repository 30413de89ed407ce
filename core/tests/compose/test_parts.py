"""Packages of hooks register parts, and classes of the user listen to a run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from jackfield.algorithms import registry
from jackfield.algorithms.settings import describe
from jackfield.compose import parts
from jackfield.compose.parts import load_hooks, register_any, register_installed
from jackfield.errors import PluginError
from jackfield.plugins import HookManager, discover
from jackfield.plugins.hooks import StepEnded

LOSS = """
    from jackfield.plugins.hooks import hookimpl
    def doubled(log_probs, advantages, *, strength: float = 2.0):
        "A loss. [A paper]"
        return -strength * advantages * log_probs, {}
    @hookimpl
    def register_parts(register):
        register("loss", "doubled", doubled, scope="token")
"""


@pytest.fixture(autouse=True)
def own_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PARTS", dict(registry._PARTS))
    monkeypatch.setattr(parts, "_REGISTERED", {})


def install(folder: Path, name: str, code: str, **manifest: str) -> Path:
    """Lay out a package of hooks as pip leaves it."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(dedent(code), encoding="utf-8")
    fields = {"name": name, "kind": "hooks", "abi": "1.0", "hooks": name, **manifest}
    lines = [f'{key} = "{value}"\n' for key, value in fields.items()]
    (folder / name / "plugin.toml").write_text("".join(lines), encoding="utf-8")
    info = folder / f"{name}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[jackfield.hooks]\n{name} = {name}:plugin.toml\n")
    return folder


def test_its_parts_have_their_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path, "acme_losses", LOSS)))
    assert {} == register_installed(discover([str(tmp_path)]))
    found = describe(registry.part("loss", "doubled"))
    assert ("acme_losses 0.1.0", {"strength": 2.0}) == (found["origin"], found["options"])
    assert "jackfield" == describe(registry.part("loss", "ppo"))["origin"]


@pytest.mark.parametrize(
    ("code", "manifest", "error"),
    [
        ("import missing_library", {}, "plugin.import"),
        (LOSS.replace('"loss", "doubled"', '"los", "doubled"'), {}, "plugin.hooks"),
        (LOSS.replace('"doubled"', '"ppo"'), {}, "config.invalid-value"),
        (LOSS, {"abi": "2.0"}, "plugin.abi"),
        (LOSS, {"object": "a:B"}, "plugin.manifest-invalid"),
        (LOSS + "    @hookimpl\n    def step_ended(event): pass\n", {}, "plugin.hooks"),
    ],
)
def test_a_broken_one_is_left_out_with_its_reason(
    code: str, manifest: dict[str, str], error: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that names nothing of it is not affected."""
    name = f"acme_{abs(hash((code, *manifest)))}"
    sys.path.insert(0, str(install(tmp_path, name, code, **manifest)))
    try:
        with caplog.at_level(logging.WARNING):
            failed = register_installed(discover([str(tmp_path)]))
    finally:
        sys.path.remove(str(tmp_path))
    ((label, found),) = failed.items()
    assert error == found.code, str(found)
    assert [f"{label} is left out"] == [each.message.partition(":")[0] for each in caplog.records]


@pytest.mark.timeout(120)
def test_commands_see_it(tmp_path: Path) -> None:
    install(tmp_path, "acme_losses", LOSS)

    def command(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        program = [sys.executable, "-m", "jackfield", *arguments]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert 0 == done.returncode, done.stderr
        return done.stdout

    words = [line.split()[:6] for line in command("plugins", "list", "--kind", "hooks").splitlines()]
    assert ["acme_losses", "hooks", "1.0", "acme_losses", "0.1.0", "ok"] in words
    (row,) = [line for line in command("algorithms", "list", "--kind", "loss").splitlines() if " doubled " in line]
    assert "acme_losses 0.1.0" in row
    assert "origin: acme_losses 0.1.0" in command("algorithms", "show", "doubled")


def test_a_kind_that_no_part_has_is_refused() -> None:
    with pytest.raises(PluginError) as caught:
        register_any("los", "doubled", print)
    assert ("plugin.hooks", "los:doubled", "los") == (caught.value.code, caught.value.where, caught.value.found)


def test_a_users_class_listens_and_its_errors_name_it(tmp_path: Path) -> None:
    file = tmp_path / "my_hooks.py"
    file.write_text(
        "class Stop:\n    def step_ended(self, what):\n        self._seen(what)\n"
        "    def _seen(self, what):\n        if what.step == 2: raise ValueError('enough')\n"
    )
    manager = HookManager(load_hooks([f"{file}:Stop"]))
    manager.emit(StepEnded(step=1, metrics={}))
    with pytest.raises(PluginError) as caught:
        manager.emit(StepEnded(step=2, metrics={}))
    assert f"the hook step_ended failed in {file}:Stop.step_ended" == caught.value.message
    assert "ValueError: enough" == caught.value.found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("my_hooks.py", "my_hooks.py"),
        ("absent.py:Hooks", "FileNotFoundError"),
        ("my_hooks.py:Absent", "AttributeError"),
        ("my_hooks.py:Typo", "step_end (did you mean 'step_ended'?)"),
        ("my_hooks.py:Registers", "register_parts"),
        ("my_hooks.py:Nothing", "no method"),
        ("my_hooks.py:Needs", "TypeError"),
    ],
)
def test_a_class_that_cannot_listen_is_refused(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_hooks.py").write_text(
        "class Typo:\n    def step_end(self, event): pass\n"
        "class Registers:\n    def register_parts(self, register): pass\n"
        "class Nothing: pass\n"
        "class Needs:\n    def __init__(self, name): pass\n"
    )
    with pytest.raises(PluginError) as caught:
        load_hooks([text])
    assert ("plugin.hooks", f"observe.hooks, {text}") == (caught.value.code, caught.value.where)
    assert says in str(caught.value.found)
