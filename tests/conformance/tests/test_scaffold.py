"""``jackfield plugins new`` writes a project that is whole, or nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jackfield.abc import ABI_VERSIONS, CONTRACTS, KINDS
from jackfield.errors import PluginError
from jackfield.plugins import discover
from jackfield.plugins.manifest import parse_manifest
from jackfield.plugins.registry import GROUPS
from jackfield_conformance.commands import write_scaffold


def project(kind: str, parent: Path) -> tuple[Path, Path]:
    """The project's folder and its import package."""
    folder = write_scaffold(kind, "first-try", parent)
    return folder, folder / "src" / f"jackfield_{kind}_first_try"


@pytest.mark.parametrize("kind", KINDS)
def test_the_project_is_whole(kind: str, tmp_path: Path) -> None:
    """Metadata and manifest agree with each other and with this host; nothing is left to be filled in."""
    folder, package = project(kind, tmp_path)
    assert tmp_path / f"jackfield-{kind}-first-try" == folder
    assert [folder.name] == [path.name for path in tmp_path.iterdir()]
    metadata = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"jackfield-{kind}-first-try".replace("_", "-") == metadata["name"]
    assert {GROUPS[kind]: {"first-try": f"{package.name}:plugin.toml"}} == metadata["entry-points"]
    content = (package / "plugin.toml").read_bytes()
    manifest = parse_manifest(content, source="plugin.toml", kind=kind, name="first-try")
    assert ABI_VERSIONS[kind] == manifest.abi
    for name in ("README.md", "CHANGELOG.md", ".github/workflows/ci.yml", "tests"):
        assert (folder / name).exists(), name
    assert (package / "py.typed").exists()
    for file in folder.rglob("*"):
        assert file.is_dir() or "{{" not in file.read_text(encoding="utf-8").replace("${{", "")
        assert not file.name.endswith(".template")


@pytest.mark.parametrize("kind", KINDS)
def test_the_implementation_is_the_authors_own(kind: str, tmp_path: Path) -> None:
    """It imports the contract and libraries, and neither the conformance suite nor another plugin."""
    _, package = project(kind, tmp_path)
    imported = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
    ours = {name.split(".")[0] for name in imported if name.startswith("jackfield_")}
    assert ours <= {package.name, "jackfield_huggingface"}
    assert any(name.startswith("jackfield.abc") for name in imported)


@pytest.mark.parametrize("kind", KINDS)
def test_the_implementation_keeps_the_rules_for_all_kinds(kind: str, tmp_path: Path) -> None:
    """``docs/plugins/index.md``: no pickle, no blocking wait, no thread of the run's, deadlines by the clock."""
    _, package = project(kind, tmp_path)
    found = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                found.add(f"{ast.unparse(node.value)}.{node.attr}")
            elif isinstance(node, ast.Call) and ast.unparse(node).startswith("asyncio.get_running_loop().run_in_exec"):
                found.add(f"run_in_executor of {ast.unparse(node.args[0])}")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found |= {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
    refused = {"asyncio.to_thread", "asyncio.wait_for", "asyncio.timeout", "time.sleep", "to_thread"}
    refused |= {"pickle", "cloudpickle", "marshal", "shelve", "torch.load", "torch.save", "run_in_executor of None"}
    assert set() == found & refused


@pytest.mark.parametrize("kind", KINDS)
def test_the_plugin_passes_its_gates(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Laid out as pip leaves it, it is found and its class fits the contract."""
    _, package = project(kind, tmp_path)
    info = package.parent / "first_try-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: first-try\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUPS[kind]}]\nfirst-try = {package.name}:plugin.toml\n")
    monkeypatch.syspath_prepend(str(package.parent))
    assert issubclass(discover().load(kind, "first-try").cls, CONTRACTS[kind])


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("", "my_plugin"),
        ("Judge", "judge"),
        ("LlamaJudge", "llama_judge"),
        ("3d", "d"),
        ("a b", "a_b"),
        ("a--b", "a_b"),
        ("../up", "up"),
        ("a/b", "a_b"),
        ("_a", "a"),
        ("a-", "a"),
        ("ä", "my_plugin"),
        ("a" * 41, "a" * 40),
        ("{{kind}}", "kind"),
    ],
)
def test_a_bad_name_is_refused_with_a_good_one(name: str, near: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError) as caught:
        write_scaffold("reward", name, tmp_path)
    assert "plugin.scaffold" == caught.value.code
    assert f"for example: {near}" == caught.value.fix
    assert [] == list(tmp_path.iterdir())
    assert write_scaffold("reward", near, tmp_path).is_dir()


@pytest.mark.parametrize("there", ["folder", "file", "link"])
def test_what_is_there_is_left_alone(there: str, tmp_path: Path) -> None:
    place = tmp_path / "jackfield-reward-mine"
    if there == "folder":
        place.mkdir()
    elif there == "file":
        place.write_text("mine")
    else:
        place.symlink_to(tmp_path / "nowhere")
    with pytest.raises(PluginError) as caught:
        write_scaffold("reward", "mine", tmp_path)
    assert ("plugin.scaffold", place) == (caught.value.code, caught.value.found)
    assert [place.name] == [path.name for path in tmp_path.iterdir()]
    assert place.is_symlink() or place.is_dir() or "mine" == place.read_text()


def test_an_interrupted_call_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stop)
    with pytest.raises(KeyboardInterrupt):
        write_scaffold("reward", "mine", tmp_path)
    assert [] == list(tmp_path.iterdir())


def jackfield(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from jackfield.cli import main; main(prog_name='jackfield')", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def test_the_command_writes_into_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    done = jackfield("plugins", "new", "reward", "mine")
    assert 0 == done.returncode, done.stderr
    assert "wrote jackfield-reward-mine/pyproject.toml" in done.stdout
    assert done.stdout.endswith(
        "next: pip install --editable jackfield-reward-mine && jackfield plugins check mine --kind reward\n"
    )
    assert (here / "jackfield-reward-mine" / "pyproject.toml").is_file()
    again = jackfield("plugins", "new", "reward", "mine")
    assert (1, "") == (again.returncode, again.stdout)
    assert "plugin.scaffold" in again.stderr
    assert 2 == jackfield("plugins", "new", "motor", "mine").returncode
