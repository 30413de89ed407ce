"""Discovery lists broken plugins with their error, does not affect others, and imports nothing."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc import ABI_VERSIONS
from jackfield.errors import PluginError
from jackfield.plugins import discover
from jackfield.plugins.manifest import check_abi

BREAKS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "abi_9": (lambda s: s.install("abi_9", abi="9.0"), "plugin.abi", "upgrade jackfield"),
    "abi_0": (lambda s: s.install("abi_0", abi="0.9"), "plugin.abi", "upgrade the plugin"),
    "newer": (lambda s: s.install("newer", abi="1.7"), "plugin.abi", "reward ABI 1.7 or later"),
    "broken": (lambda s: s.install("broken", manifest='name = "bro'), "plugin.manifest-invalid", "not TOML"),
    "latin": (
        lambda s: (s.folder / s.install("latin") / "plugin.toml").write_bytes(b'name = "\xff"'),
        "plugin.manifest-invalid",
        "not UTF-8",
    ),
    "unknown": (
        lambda s: s.install("unknown", extra='descriptoin = "x"'),
        "plugin.manifest-invalid",
        "did you mean 'description'?",
    ),
    "missing": (
        lambda s: (s.folder / s.install("missing") / "plugin.toml").unlink(),
        "plugin.manifest-missing",
        "plugin.toml",
    ),
    "no_package": (
        lambda s: s.install("no_package", value="nowhere_to_be_found:plugin.toml"),
        "plugin.manifest-missing",
        "nowhere_to_be_found",
    ),
    "nested": (
        lambda s: s.install("nested", value="fake_nested.inner:plugin.toml"),
        "plugin.manifest-invalid",
        "toplevel_package:file.toml",
    ),
    "climbing": (
        lambda s: s.install("climbing", value="fake_climbing:../plugin.toml"),
        "plugin.manifest-invalid",
        "toplevel_package:file.toml",
    ),
    "Bad Name": (lambda s: s.install("Bad Name", package="fake_bad_name"), "plugin.manifest-invalid", "lower-case"),
    "mismatch": (lambda s: s.install("mismatch", group="jackfield.agents"), "plugin.manifest-invalid", "disagree"),
    "typo": (
        lambda s: s.install("typo", group="jackfield.reward"),
        "plugin.manifest-invalid",
        "did you mean 'jackfield.rewards'?",
    ),
}


def rows(site: Any) -> dict[str, Any]:
    return {record.name: record for record in discover([str(site.folder)]).records()}


@pytest.mark.parametrize("name", list(BREAKS))
def test_each_break_is_shown_with_its_own_error_and_harms_no_other(site, name: str):
    site.install("good")
    break_it, code, message = BREAKS[name]
    break_it(site)
    found = rows(site)
    assert {"good", name} == set(found)
    assert ("ok", "broken") == (found["good"].as_dict()["status"], found[name].as_dict()["status"])
    assert found["good"].error is None
    assert code == found[name].error.code
    assert message in str(found[name].error)


def test_all_breaks_together_stay_apart(site):
    site.install("good")
    for break_it, _, _ in BREAKS.values():
        break_it(site)
    found = rows(site)
    assert {"good": None, **{name: code for name, (_, code, _) in BREAKS.items()}} == {
        name: record.error and record.error.code for name, record in found.items()
    }


def test_a_good_plugin_is_described(site):
    site.install("good", version="3.1", extra='[capabilities]\nbatching = "partial"')
    assert {
        "name": "good",
        "kind": "reward",
        "abi": "1.0",
        "distribution": "dist-fake-good",
        "version": "3.1",
        "status": "ok",
        "error": None,
        "capabilities": {"batching": "partial"},
        "description": "a fake",
    } == rows(site)["good"].as_dict()


def test_discovery_imports_no_plugin(site):
    package = site.install("bomb", modules={"__init__.py": "raise RuntimeError('imported')"})
    assert {r.name: r for r in discover().records()}["bomb"].error is None
    assert package not in sys.modules


def test_two_distributions_of_one_name_are_both_refused_and_named(site):
    site.install("twin", package="fake_one", distribution="dist-one", version="1.0")
    site.install("twin", package="fake_two", distribution="dist-two", version="2.0")
    site.install("good")
    twins = [record for record in discover([str(site.folder)]).records() if record.name == "twin"]
    assert ["dist-one", "dist-two"] == [record.distribution for record in twins]
    assert ["plugin.duplicate"] * 2 == [record.error.code for record in twins]
    assert "dist-one 1.0, dist-two 2.0" == twins[0].error.found
    assert rows(site)["good"].error is None


def test_one_name_in_two_kinds_is_no_duplicate(site):
    site.install("same", kind="reward", package="fake_reward")
    site.install("same", kind="agent", package="fake_agent")
    assert ["agent", "reward"] == [record.kind for record in discover([str(site.folder)]).records()]


def test_a_broken_distribution_keeps_its_own_error_beside_a_twin(site):
    site.install("twin", package="fake_one", abi="9.0")
    site.install("twin", package="fake_two")
    codes = {record.error.code for record in discover([str(site.folder)]).records()}
    assert {"plugin.abi", "plugin.duplicate"} == codes


def test_a_distribution_found_twice_on_the_path_counts_once(site, tmp_path: Path):
    site.install("good", version="1.0")
    other = tmp_path / "other"
    other.mkdir()
    type(site)(other).install("good", version="2.0")
    records = discover([str(other), str(site.folder)]).records()
    assert [("2.0", None)] == [(record.version, record.error) for record in records]


def test_a_damaged_line_of_an_entry_point_file_is_shown_and_harms_no_other(site):
    site.install("good")
    info = next(site.folder.glob("*.dist-info")) / "entry_points.txt"
    info.write_text(info.read_text() + "no equals sign\n# a comment\n\n[console_scripts]\nx = y\n")
    found = rows(site)
    assert {"good", "no equals sign"} == set(found)
    assert found["good"].error is None
    assert "plugin.manifest-invalid" == found["no equals sign"].error.code


def test_a_distribution_without_metadata_is_shown_as_unknown(site):
    site.install("good")
    (next(site.folder.glob("*.dist-info")) / "METADATA").unlink()
    assert "good" in rows(site)


def test_an_editable_install_is_found_through_its_finder(site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The sources are elsewhere; only the import system's finders know where."""
    package = site.install("edited")
    elsewhere = tmp_path / "sources"
    elsewhere.mkdir()
    (site.folder / package).rename(elsewhere / package)

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> Any:
            from importlib.machinery import PathFinder

            return PathFinder.find_spec(name, [str(elsewhere)]) if name == package else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert {record.name: record for record in discover().records()}["edited"].error is None


def test_a_plugin_in_a_zip_archive_is_found(site, tmp_path: Path):
    site.install("zipped")
    archive = tmp_path / "plugins.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in site.folder.rglob("*"):
            file.write(path, path.relative_to(site.folder))
    assert [None] == [record.error for record in discover([str(archive)]).records()]


def test_several_manifests_in_one_package(site):
    package = site.install("both", kind="transfer_queue", package="fake_both", value="fake_both:transfer_queue.toml")
    folder = site.folder / package
    text = (folder / "plugin.toml").read_text()
    (folder / "transfer_queue.toml").write_text(text)
    (folder / "checkpoint_engine.toml").write_text(text.replace("transfer_queue", "checkpoint_engine"))
    entries = next(site.folder.glob("*.dist-info")) / "entry_points.txt"
    entries.write_text(
        entries.read_text() + "[jackfield.checkpoint_engines]\nboth = fake_both:checkpoint_engine.toml\n"
    )
    records = discover([str(site.folder)]).records()
    assert [("transfer_queue", None), ("checkpoint_engine", None)] == [(r.kind, r.error) for r in records]


@pytest.mark.parametrize("abi", ["1.0", "1.3", "1.10"])
def test_same_major_and_no_newer_minor_is_accepted(abi: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ABI_VERSIONS, "engine", "1.10")
    check_abi("engine", abi, "plugin")


@pytest.mark.parametrize(("abi", "code"), [("1.11", "plugin.abi"), ("2.0", "plugin.abi")])
def test_a_newer_minor_or_another_major_is_refused(abi: str, code: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ABI_VERSIONS, "engine", "1.10")
    with pytest.raises(PluginError) as caught:
        check_abi("engine", abi, "plugin")
    assert (code, abi) == (caught.value.code, caught.value.found)


def test_the_host_version_is_that_of_the_kind():
    for kind, version in ABI_VERSIONS.items():
        check_abi(kind, version, "plugin")


def test_the_built_in_plugins_come_through_the_same_door():
    mine = {(r.kind, r.name): r.error for r in discover().records() if r.distribution == "jackfield"}
    assert {
        ("transfer_queue", "memory"): None,
        ("checkpoint_engine", "in_process"): None,
    } == mine
