"""The checks of the structure, and what pytest makes of them: each refuses the fault that it is for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from jackfield_conformance.runner import Certificate, Run

#: Runs the checks on a plugin that has these files in the place of healthy ones.
Checks = Callable[[Mapping[str, str]], Certificate]

MANIFEST = """
name = "sample"
kind = "reward"
abi = "1.0"
object = "sample_plugin.agent:Agent"
config = "sample_plugin.config:Config"
"""

AGENT = """
from jackfield.abc.reward import RewardAgent, ScoreResult

class Agent(RewardAgent):
    async def compute_score(self, request):
        return ScoreResult(score=float(request.ground_truth in request.solution_str))
"""

CONFIG = """
import attrs

@attrs.frozen(kw_only=True)
class Config:
    scale: float = 1.0
"""

HEALTHY = {"plugin.toml": MANIFEST, "agent.py": AGENT, "config.py": CONFIG, "fixture.py": ""}
FIXTURE = '\n[conformance]\nfixture = "sample_plugin.fixture:small"\n'


#: The outcomes of the checks that look at a healthy plugin from outside.
STRUCTURE = dict.fromkeys(["PKG-004", *(f"REW-{number:03d}" for number in range(1, 10))], "PASSED")


def install(site: Path, files: Mapping[str, str]) -> None:
    """Lay out an installed distribution ``sample`` by hand: as pip leaves it."""
    package = site / "sample_plugin"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, text in files.items():
        (package / name).write_text(text, encoding="utf-8")
    info = site / "sample-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sample\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[jackfield.rewards]\nsample = sample_plugin:plugin.toml\n", encoding="utf-8"
    )


def conformance(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the suite in ``folder`` with what ``folder/site`` holds installed."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    command += ["--pyargs", "jackfield_conformance", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder / "site"), "COLUMNS": "200"}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=50, check=False)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checks]:
    """Installs a plugin of these files and runs the checks in this process; children see it, too."""
    site = tmp_path / "site"
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(str(site))

    def do(files: Mapping[str, str]) -> Certificate:
        install(site, {**HEALTHY, **files})
        made = Run.of("reward:sample", tmp_path / "checks")
        for check in made.checks:
            made.execute(check)
        return made.certificate()

    ray = sys.modules.get("ray")
    yield do
    for name in [name for name in sys.modules if name.partition(".")[0] == "sample_plugin"]:
        del sys.modules[name]
    sys.modules.pop("ray", None)  # a damaged plugin puts a stand-in there
    if ray is not None:
        sys.modules["ray"] = ray


def outcome(certificate: Certificate, id: str) -> str:
    """How one check ended."""
    return next(each.status for each in certificate.outcomes if each.check.id == id)


def outcomes(output: str) -> dict[str, str]:
    """Check id to outcome, from the lines of a verbose run."""
    return dict(re.findall(r"::([A-Z]{3}-\d{3}) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)", output))


def structure_of(output: str) -> dict[str, str]:
    """The outcomes of the checks below 010."""
    return {id: outcome for id, outcome in outcomes(output).items() if int(id[4:]) < 10}


def test_healthy_plugin_passes(tmp_path: Path) -> None:
    """The plugin that the other tests damage is sound itself, in structure and behaviour."""
    install(tmp_path / "site", HEALTHY)
    done = conformance(tmp_path, "--plugin", "reward:sample")
    assert STRUCTURE == structure_of(done.stdout), done.stdout
    assert "PASSED" == outcomes(done.stdout)["REW-012"]
    assert "conformance of reward:sample, ABI 1.0, from sample 1.0" in done.stdout


@pytest.mark.parametrize(
    ("check", "file", "old", "new", "says"),
    [
        ("REW-001", "plugin.toml", 'kind = "reward"', 'kind = "engine"', "plugin.manifest-invalid"),
        ("REW-001", "plugin.toml", 'abi = "1.0"', 'abi = "1.0"\ncolour = "red"', "colour"),
        ("REW-002", "plugin.toml", 'abi = "1.0"', 'abi = "9.0"', "plugin.abi"),
        ("REW-003", "agent.py", "async def", "def", "plugin.sync-async"),
        ("REW-003", "agent.py", "compute_score", "score", "plugin.abstract-method"),
        ("REW-003", "agent.py", "from jackfield", "raise OSError('no licence')\nfrom jackfield", "no licence"),
        ("REW-004", "config.py", "frozen", "define", "plugin.config-class"),
        ("REW-004", "config.py", "import attrs", "import attrs, sys; sys.modules['ray'] = sys", "also imported ray"),
        ("REW-005", "config.py", "= 1.0", "= attrs.field(default=0.0, validator=attrs.validators.gt(0))", "scale"),
        ("REW-006", "plugin.toml", "\nname", "\ncapabilities.flight = 'full'\nname", "['flight']"),
        ("REW-007", "plugin.toml", "\nname", "\ncapabilities.post_process = 'full'\nname", "Agent lacks it"),
        (
            "REW-007",
            "agent.py",
            "    async",
            "    def post_process_scores(self, scores):\n        return scores\n\n    async",
            'write post_process = "full"',
        ),
        ("REW-009", "config.py", " = 1.0", "", "name a function in the manifest"),
    ],
)
def test_each_check_refuses_its_fault(run: Checks, check: str, file: str, old: str, new: str, says: str) -> None:
    """A fault fails its own check, with a message that names it, and none that comes before."""
    damaged = HEALTHY[file].replace(old, new, 1)
    assert HEALTHY[file] != damaged
    certificate = run({file: damaged})
    failed = [each.check.id for each in certificate.outcomes if each.status == "failed"]
    assert check == min(failed), certificate.report()
    assert says in certificate.report()
    assert "none" == certificate.level


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("from jackfield.trainer.trainer import Trainer", "agent.py:2 imports jackfield.trainer.trainer.Trainer"),
        ("def late():\n    import jackfield.compose.run", "agent.py:3 imports jackfield.compose.run"),
    ],
    ids=["at the top", "late"],
)
def test_reaching_into_the_runtime_is_a_warning_with_its_line(run: Checks, statement: str, found: str) -> None:
    """The plugin passes, and its report names file, line and module; the healthy one has no warning."""
    certificate = run({"agent.py": f"\n{statement}\n{AGENT}"})
    assert "passed" == outcome(certificate, "PKG-004"), certificate.report()
    (warning,) = (each.message for each in certificate.outcomes if each.check.id == "PKG-004")
    assert warning.startswith(f"sample_plugin/{found}")
    assert "WARNING PKG-004" in certificate.report()
    assert "none" != certificate.level


def test_what_plugins_may_import_is_no_warning(run: Checks) -> None:
    certificate = run({"agent.py": f"import jackfield.clock\nfrom jackfield.abc import reward\n{AGENT}"})
    assert [""] == [each.message for each in certificate.outcomes if each.check.id == "PKG-004"]


EXCEPTION = '[conformance.exceptions]\n{id} = {{reason = "{reason}", review = "{review}"}}\n'


@pytest.mark.parametrize(
    ("id", "reason", "review", "says"),
    [
        ("REW-999", "why not", "2999-01-01", "there is no such check"),
        ("REW-003", "why not", "2999-01-01", "checks of the structure allow no exception"),
        ("REW-022", " ", "2999-01-01", "the reason is empty"),
        ("REW-022", "why not", "2020-01-01", "the review was due on 2020-01-01"),
        ("REW-032", "why not", "2999-01-01", "the exception is stale, the check does not apply"),
    ],
)
def test_exceptions_out_of_order_are_refused(run: Checks, id: str, reason: str, review: str, says: str) -> None:
    """An exception needs a check that applies, a reason, and a date of review that has not passed."""
    certificate = run({"plugin.toml": MANIFEST + EXCEPTION.format(id=id, reason=reason, review=review)})
    assert "failed" == outcome(certificate, "REW-008"), certificate.report()
    assert f"{id}: {says}" in certificate.report()


def test_a_stale_exception_fails(run: Checks) -> None:
    """An exception is a strict expected failure: a check that passes must lose its exception."""
    certificate = run({"plugin.toml": MANIFEST + EXCEPTION.format(id="REW-022", reason="why", review="2999-01-01")})
    assert "failed" == outcome(certificate, "REW-022")
    assert "remove the exception, it is stale" in certificate.report()


def test_an_exception_is_an_expected_failure(tmp_path: Path) -> None:
    """A check that fails as the manifest says does not fail the plugin; the report and the level show it."""
    agent = AGENT.replace("return", "request.extra_info['seen'] = True\n        return")
    text = MANIFEST + EXCEPTION.format(id="REW-022", reason="requests grow", review="2999-01-01")
    install(tmp_path / "site", {**HEALTHY, "plugin.toml": text, "agent.py": agent})
    done = conformance(tmp_path, "--plugin", "reward:sample")
    assert "XFAIL" == outcomes(done.stdout)["REW-022"], done.stdout
    assert "EXEMPT REW-022: Scoring a request does not change it." in done.stdout
    assert "exception, review 2999-01-01: requests grow" in done.stdout
    assert "level: partial" in done.stdout
    assert 0 == done.returncode


def test_a_fixture_that_raises_is_named(run: Checks) -> None:
    """What goes wrong in the plugin's fixture is told with its place in the manifest."""
    fixture = "def small(folder):\n    raise OSError('no tiny model')\n"
    certificate = run({"plugin.toml": MANIFEST + FIXTURE, "fixture.py": fixture})
    assert "failed" == outcome(certificate, "REW-009")
    assert "OSError: no tiny model" in certificate.report()
    assert "fix: correct sample_plugin.fixture:small" in certificate.report()
    assert "not_run" == outcome(certificate, "REW-010")


@pytest.mark.parametrize(("score", "expected"), [("0.5", "passed"), ("0.75", "failed")])
def test_a_fixture_gives_settings_and_examples(run: Checks, score: str, expected: str) -> None:
    """The instance is made from the fixture's settings, and its examples are what is scored."""
    example = f"{{'solution_str': '7', 'ground_truth': '7', 'score': {score}}}"
    fixture = f"def small(folder):\n    return {{'settings': {{'scale': 0.5}}, 'examples': [{example}]}}\n"
    agent = AGENT.replace("float(", "self.config.scale * float(")
    certificate = run({"plugin.toml": MANIFEST + FIXTURE, "fixture.py": fixture, "agent.py": agent})
    assert expected == outcome(certificate, "REW-010"), certificate.report()


def test_the_folder_that_pytest_is_started_in_has_no_say(tmp_path: Path) -> None:
    """Its conftest.py, its options, its patterns of names and its warnings as errors are not used."""
    install(tmp_path / "site", {**HEALTHY, "agent.py": AGENT + "import warnings\nwarnings.warn('noisy')\n"})
    (tmp_path / "conftest.py").write_text("raise RuntimeError('a conftest of somebody else')\n")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = -k nothing --no-such-option\npython_files = x_*.py\nfilterwarnings = error\n"
        "testpaths = site\nusefixtures = unknown\n"
    )
    done = conformance(tmp_path, "--plugin", "reward:sample")
    assert STRUCTURE == structure_of(done.stdout), done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name the plugin to check: --plugin KIND:NAME"),
        (["--plugin", "fsdp"], "expected KIND:NAME"),
        (["--plugin", "reward:no-such"], "plugin.not-found"),
        (["--plugin", "reward:function", "--numprocesses", "1"], "leave --numprocesses out"),
    ],
)
def test_usage_errors_say_what_to_do(tmp_path: Path, arguments: list[str], says: str) -> None:
    """Nothing is checked, and nothing passes, without a plugin."""
    done = conformance(tmp_path, *arguments)
    assert done.returncode != 0
    assert says in done.stdout + done.stderr
