"""Bad plugins, all installed at once: each is refused with its own error, quickly, and harms no other."""

from __future__ import annotations

import json
import resource
from typing import Any

import pytest

SYNC = """
from jackfield.abc.reward import RewardAgent
class Agent(RewardAgent):
    def compute_score(self, request):
        return None
"""
INCOMPLETE = """
from jackfield.abc.reward import RewardAgent
class Agent(RewardAgent):
    pass
"""

AGENT = """
from jackfield.abc.agent import AgentLoopBase
class Agent(AgentLoopBase):
    async def run(self, sampling_params, **fields):
        raise AssertionError("no run begins")
"""

#: Name to how it is installed, whether ``plugins list`` sees the fault, and the code of its error.
BAD: dict[str, tuple[dict[str, Any], bool, str]] = {
    "too_new": ({"abi": "9.0"}, True, "plugin.abi"),
    "no_toml": ({"manifest": "name = "}, True, "plugin.manifest-invalid"),
    "no_abi": (
        {"manifest": 'name = "no_abi"\nkind = "reward"\nobject = "a:A"\nconfig = "a:C"\n'},
        True,
        "plugin.manifest-invalid",
    ),
    "raises": ({"modules": {"plugin.py": "raise RuntimeError('boom')"}}, False, "plugin.import"),
    "incomplete": ({"modules": {"plugin.py": INCOMPLETE}}, False, "plugin.abstract-method"),
    "sync": ({"modules": {"plugin.py": SYNC}}, False, "plugin.sync-async"),
    "twin": ({"distribution": "twin-one"}, True, "plugin.duplicate"),
}

CONFIG = """
name: refused
model: {{path: nowhere}}
data: {{train: nowhere.jsonl}}
algorithm: {{name: grpo}}
engine: {{name: some_engine}}
rollout: {{name: some_rollout}}
agent: {{name: some_agent}}
reward: {{name: {name}}}
"""


@pytest.fixture
def crowd(site):
    """Every bad plugin beside a good one."""
    site.install("good")
    for kind in ("engine", "rollout"):  # named by the configuration, and never imported: the bad ones are refused first
        site.install(f"some_{kind}", kind=kind)
    site.install("some_agent", kind="agent", modules={"plugin.py": AGENT})
    for name, (options, _, _) in BAD.items():
        site.install(name, **options)
    site.install("twin", package="fake_other_twin", distribution="twin-two")
    return site


def processor_seconds() -> float:
    """Return the processor time of the commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_list_shows_each_with_its_error_and_the_good_one_unharmed(crowd) -> None:
    before = processor_seconds()
    done = crowd.cli("plugins", "list", "--kind", "reward", "--json")
    seconds = processor_seconds() - before
    assert 0 == done.returncode, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert "ok" == rows["good"]["status"]
    expected = {name: code if seen else None for name, (_, seen, code) in BAD.items()}
    found = {name: rows[name]["error"] and rows[name]["error"]["code"] for name in BAD}
    assert expected == found
    assert seconds < 6, "two seconds are the promise, of processor time: how busy the machine is does not count"


@pytest.mark.parametrize("name", BAD)
def test_run_refuses_each_with_its_own_error(crowd, name: str, tmp_path) -> None:
    """The exit code is 1, there is one error with its code and a fix, and no run is started."""
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(name=name))
    before = processor_seconds()
    done = crowd.cli("run", str(file), f"folder={tmp_path / 'run'}")
    seconds = processor_seconds() - before
    assert 1 == done.returncode, done.stdout + done.stderr
    assert f"[{BAD[name][2]}]" in done.stderr
    assert "Traceback" not in done.stderr
    assert "fix:" in done.stderr
    assert not (tmp_path / "run").exists()
    assert seconds < 6, "two seconds are the promise, of processor time: how busy the machine is does not count"


def test_two_of_a_name_are_both_named(crowd) -> None:
    done = crowd.cli("plugins", "list", "--kind", "reward")
    assert 2 == sum(line.startswith("twin ") for line in done.stdout.splitlines())
    assert "found: twin-one 0.1.0, twin-two 0.1.0" in done.stdout
