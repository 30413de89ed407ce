"""Certificates are written by ``plugins check`` and shown by ``plugins list`` while they are valid."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from jackfield.plugins import discover
from jackfield_conformance.certificates import FORMAT, find_certification, plugin_digest
from jackfield_conformance.commands import keep

SCORING = """
from jackfield.abc.reward import RewardAgent, ScoreResult

class Agent(RewardAgent):
    async def compute_score(self, request):
        return ScoreResult(score=float(request.ground_truth in request.solution_str))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of certificates in these tests, for this process and its children."""
    place = tmp_path / "certificates"
    monkeypatch.setenv("JACKFIELD_CERTIFICATES", str(place))
    return place


def certificate(name: str = "good", **changes: Any) -> dict[str, Any]:
    """Return the content of a certificate of the plugin as it is installed now."""
    record = discover().resolve(name)
    assert record.manifest is not None
    return {
        "format": FORMAT,
        "kind": record.kind,
        "plugin": record.name,
        "distribution": record.distribution,
        "abi": record.abi,
        "level": "full",
        "date": "2026-11-21T10:11:12+00:00",
        "versions": {"plugin": record.version, "jackfield-conformance": "0.1.0"},
        "digest": plugin_digest(record.manifest),
        **changes,
    }


def found(name: str = "good") -> str | None:
    certification = find_certification(discover().resolve(name))
    if certification is None or certification.stale:
        return None
    return f"{certification.source} {certification.level} {certification.date}"


def test_a_certificate_of_what_is_installed_counts(site, folder: Path) -> None:
    site.install("good")
    assert found() is None
    assert folder / "reward-good.json" == keep(certificate())
    assert "local full 2026-11-21" == found()


@pytest.mark.parametrize(
    "changes",
    [
        {"plugin": "other"},
        {"kind": "agent"},
        {"distribution": "another-one"},
        {"versions": {"plugin": "0.0.9"}},
        {"abi": "0.9"},
        {"digest": "0" * 64},
        {"digest": None},
        {"format": FORMAT + 1},
        {"level": "none"},
        {"level": "excellent"},
        {"versions": "0.1.0"},
    ],
)
def test_a_certificate_of_something_else_does_not(site, folder: Path, changes: dict[str, Any]) -> None:
    site.install("good")
    folder.mkdir()
    (folder / "reward-good.json").write_text(json.dumps(certificate(**changes)))
    assert found() is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}'])
def test_a_damaged_certificate_certifies_nothing(site, folder: Path, text: str) -> None:
    site.install("good")
    folder.mkdir()
    (folder / "reward-good.json").write_text(text)
    assert found() is None


def test_a_plugin_that_was_changed_is_not_certified_any_more(site, folder: Path) -> None:
    """A changed, added or removed file counts as a change, a compiled file does not."""
    package = site.folder / site.install("good")
    keep(certificate())
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "plugin.cpython-311.pyc").write_bytes(b"compiled")
    assert found() is not None
    (package / "more.py").write_text("")
    assert found() is None
    (package / "more.py").unlink()
    assert found() is not None
    (package / "plugin.py").write_text(SCORING)
    assert found() is None


def test_a_broken_plugin_is_not_certified(site, folder: Path) -> None:
    package = site.folder / site.install("good")
    keep(certificate())
    (package / "plugin.toml").write_text("name =")
    assert found() is None


@pytest.mark.parametrize("file", ["certificate.json", "reward.certificate.json"])
def test_a_certificate_that_the_wheel_brings_along_counts(site, folder: Path, file: str) -> None:
    """It is written before the wheel is built, and its digest does not include itself."""
    package = site.folder / site.install("good")
    shipped = certificate(level="base")
    (package / file).write_text(json.dumps(shipped))
    assert "shipped base 2026-11-21" == found()
    keep(certificate())
    assert "local full 2026-11-21" == found()
    keep(certificate(level="none"))
    assert found() is None


def test_check_certifies_and_list_shows_it(site, folder: Path, tmp_path: Path) -> None:
    """Exit code 0, a certificate in two places, its date in the table and its fields in JSON."""
    site.install("good", modules={"plugin.py": SCORING})
    file = tmp_path / "mine.json"
    done = site.cli("plugins", "check", "good", "--certificate", str(file))
    assert 0 == done.returncode, done.stdout + done.stderr
    assert f"certificate: {file}" in done.stdout
    made = json.loads(file.read_text())
    assert made == json.loads((folder / "reward-good.json").read_text())
    assert ("good", "reward", "dist-fake-good", "full") == tuple(
        made[name] for name in ("plugin", "kind", "distribution", "level")
    )
    assert {"plugin", "jackfield", "jackfield-conformance", "python", "torch"} == set(made["versions"])
    assert {"id", "tier", "outcome", "seconds", "invariant", "page", "message"} == set(made["checks"][0])
    assert made["counts"]["passed"] == sum(each["outcome"] == "passed" for each in made["checks"])
    rows = {row["name"]: row for row in json.loads(site.cli("plugins", "list", "--json").stdout)}
    shown = {"date": made["date"][:10], "level": "full", "source": "local", "conformance": "0.1.0", "stale": ""}
    assert shown == rows["good"]["certified"]
    line = next(line for line in site.cli("plugins", "list").stdout.splitlines() if line.startswith("good"))
    assert f"ok      {made['date'][:10]} (full)" in line


def test_a_stale_certificate_is_not_ok(site, folder: Path) -> None:
    """If the plugin has changed since the checks, list and doctor report it with a fix; a new check resolves it."""
    package = site.folder / site.install("good", modules={"plugin.py": SCORING})
    keep(certificate())
    rows = {row["name"]: row for row in json.loads(site.cli("plugins", "list", "--json").stdout)}
    assert ("ok", None) == (rows["good"]["status"], rows["good"]["stale_certificate"])
    (package / "plugin.py").write_text(SCORING + "# changed\n")
    rows = {row["name"]: row for row in json.loads(site.cli("plugins", "list", "--json").stdout)}
    assert ("stale", None) == (rows["good"]["status"], rows["good"]["certified"])
    assert "full" == rows["good"]["stale_certificate"]["level"]
    table = site.cli("plugins", "list").stdout
    assert "stale" in next(line for line in table.splitlines() if line.startswith("good"))
    assert "2026-11-21" in table
    assert "`jackfield plugins check good --kind reward`" in table
    examined = json.loads(site.cli("plugins", "doctor", "good", "--json").stdout)
    assert ["stale"] == [plugin["status"] for plugin in examined["plugins"]]
    assert "STALE" in site.cli("plugins", "doctor", "good").stdout
    assert 0 == site.cli("plugins", "check", "good").returncode
    rows = {row["name"]: row for row in json.loads(site.cli("plugins", "list", "--json").stdout)}
    assert ("ok", "full") == (rows["good"]["status"], rows["good"]["certified"]["level"])


def test_check_names_the_broken_invariant(site, folder: Path) -> None:
    """Exit code 1, the invariant in a sentence, and the page; the certificate that was there does not count."""
    site.install("good")
    keep(certificate())
    deaf = SCORING.replace("return Score", "request.extra_info['x'] = 1\n        return Score")
    (site.folder / "fake_good" / "plugin.py").write_text(deaf)
    done = site.cli("plugins", "check", "good")
    assert 1 == done.returncode, done.stdout + done.stderr
    assert "FAILED REW-022: Scoring a request does not change it." in done.stdout
    assert "changed by compute_score: ['extra_info']" in done.stdout
    assert "see docs/plugins/reward.md#requests" in done.stdout
    assert found() is None


def test_check_prints_the_certificate_as_json(site, folder: Path) -> None:
    """Only that is on stdout, also for a plugin whose manifest is refused."""
    site.install("good", abi="9.0")
    done = site.cli("plugins", "check", "good", "--kind", "reward", "--json")
    assert 1 == done.returncode, done.stderr
    made = json.loads(done.stdout)
    assert "none" == made["level"]
    assert "failed" == next(each["outcome"] for each in made["checks"] if each["id"] == "REW-002")


@pytest.mark.parametrize("as_json", [False, True])
def test_check_that_cannot_run_exits_2(site, folder: Path, as_json: bool) -> None:
    done = site.cli("plugins", "check", "absent", *(["--json"] if as_json else []))
    assert 2 == done.returncode
    assert "plugin.not-found" in (done.stdout if as_json else done.stderr)


def test_check_without_the_suite_there_says_how_to_get_it(site, folder: Path, tmp_path: Path) -> None:
    """The plugin's own interpreter lacks jackfield-conformance, which is here."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    site.install("good", extra=f'[env]\npython = "{python}"')
    done = site.cli("plugins", "check", "good")
    assert 2 == done.returncode
    assert "[plugin.check]" in done.stderr
    assert f"{python} -m pip install jackfield-conformance" in done.stderr


@pytest.mark.parametrize("command", ["check good", "doctor", "new reward mine"])
def test_commands_for_authors_without_the_suite_say_how_to_get_it(site, command: str) -> None:
    """One error with its code and the line to give; the other commands need nothing."""
    hidden = "raise ModuleNotFoundError('hidden by the test', name='jackfield_conformance')\n"
    (site.folder / "jackfield_conformance.py").write_text(hidden)
    done = site.cli("plugins", *command.split())
    assert (2, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith("[plugin.requirement]")
    assert "-m pip install jackfield-conformance" in done.stderr
    assert 0 == site.cli("plugins", "list").returncode
    assert 0 == site.cli("plugins", "--help").returncode


def test_check_ends_at_its_deadline(site, folder: Path) -> None:
    site.install("good", modules={"plugin.py": "import threading; threading.Event().wait()"})
    done = site.cli("plugins", "check", "good", "--deadline", "4")
    assert 2 == done.returncode
    assert "[plugin.check]" in done.stderr


def test_the_current_folder_has_no_say(site, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pytest configuration and a module that shadows one of pytest's have no effect."""
    site.install("good", modules={"plugin.py": SCORING})
    here = tmp_path / "here"
    here.mkdir()
    (here / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\nrequired_plugins = none-such\n")
    (here / "conftest.py").write_text("raise RuntimeError('a conftest of somebody else')\n")
    (here / "_pytest.py").write_text("raise RuntimeError('a module of somebody else')\n")
    monkeypatch.chdir(here)
    done = site.cli("plugins", "check", "good", PYTEST_ADDOPTS="--no-such-option")
    assert 0 == done.returncode, done.stdout + done.stderr
    assert ["_pytest.py", "conftest.py", "pytest.ini"] == sorted(path.name for path in here.iterdir())
    shutil.rmtree(here)
