"""The service around agents in real runs: named models, extra rollouts, retries, and what is refused beforehand."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield.errors import JackfieldError
from jackfield.queue import read_ledger

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(180), pytest.mark.needs("module:jackfield_agent_workflow")]

Run = Callable[..., tuple[Any, list[dict[str, Any]]]]

WORKFLOW = """
from jackfield_agent_workflow import Workflow

class Compared(Workflow):
    # The answer of the policy is right if it is that of the model before training, or has its length.
    failed = set()

    async def run(self, task):
        before = await self.models["start"].chat(task.messages, temperature=0.0, max_new_tokens=6)
        untrained = await self.models["policy"].chat(task.messages, temperature=0.0, max_new_tokens=2)
        reply = await self.model.chat(task.messages)
        if reply.text not in self.failed and len(reply.text) % 3 == 0:
            self.failed.add(reply.text)
            raise ConnectionError("the first time")
        self.metric("before_tokens", before.tokens)
        self.metric("untrained", len(untrained.text))
        self.reward(float(len(reply.text) % 2))
"""

#: Rollouts with these numbers fail, counted as they begin.
FAILING = """
from jackfield_agent_workflow import Workflow

class Failing(Workflow):
    begun, failing = 0, FAILED

    async def run(self, task):
        number, Failing.begun = self.begun, self.begun + 1
        if number in self.failing:
            raise ConnectionError("the shop is closed")
        reply = await self.model.chat(task.messages)
        self.reward(float(len(reply.text) % 2))
"""


@pytest.fixture
def workflow(tmp_path: Path) -> str:
    (tmp_path / "compared.py").write_text(WORKFLOW)
    return f"agent={{name: workflow, workflow: '{tmp_path / 'compared.py'}:Compared'}}"


@pytest.fixture
def start(made: Path) -> str:
    return f"models={{start: {{path: {made / 'model'}}}}}"


def steps(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == "step"]


def test_agents_ask_frozen_models_and_the_policy_and_failed_rollouts_are_run_again(
    small_run: Run, workflow: str, start: str
) -> None:
    service = "agent_service={retries: 3, extra_rollouts: 2, concurrency: 6, times_usual: 50}"
    result, lines = small_run("compared", workflow, start, service, "schedule.steps=2")
    assert 2 == result.steps
    found = steps(lines)
    assert all(line["agent/before_tokens/mean"] > 1 for line in found)
    assert any(line.get("agent/retries/mean", 0.0) > 0 for line in found)
    ends = [json.loads(line) for line in (result.folder / "samples" / "train.jsonl").read_text().splitlines()]
    assert {0, 1, 2, 3} >= {each["tags"]["rollout"] for each in ends}
    assert 0 < sum(line.get("dropped/rollouts", 0.0) for line in found) <= 2 * 4 * 2


@pytest.fixture
def failing(tmp_path: Path) -> Callable[[Any], str]:
    """The agent whose rollouts with these numbers fail, in the order in which they begin."""

    def agent(failed: str) -> str:
        (tmp_path / "failing.py").write_text(FAILING.replace("FAILED", failed))
        return f"agent={{name: workflow, workflow: '{tmp_path / 'failing.py'}:Failing'}}"

    return agent


def kept(folder: Path) -> list[Counter[str]]:
    """The number of samples that the trainer has taken, by group, for each step."""
    entries = [each for each in read_ledger(folder) if each["event"] == "ack" and each["consumer"] == "trainer"]
    return [Counter(key.rsplit("/", 3)[0] for key in entry["keys"]) for entry in entries]


def test_groups_that_have_lost_rollouts_go_on_with_those_that_are_enough(
    small_run: Run, failing: Callable[[str], str]
) -> None:
    """One rollout of each group of four raises: the steps have the other three, and nothing is made again."""
    result, lines = small_run("partial", failing("range(0, 32, 4)"), "data.minimum_rows=3", "schedule.steps=2")
    assert [[3, 3, 3, 3]] * 2 == [list(each.values()) for each in kept(result.folder)]
    assert [(12.0, 12, 0.0)] * 2 == [
        (line["samples"], line["generated/samples"], line["groups/retries"]) for line in steps(lines)
    ]


def test_a_group_with_too_few_rollouts_is_made_again(small_run: Run, failing: Callable[[str], str]) -> None:
    result, lines = small_run("again", failing("{0, 1, 4}"), "data.minimum_rows=3", "schedule.steps=1")
    assert [[3, 4, 4, 4]] == [sorted(each.values()) for each in kept(result.folder)]
    assert [1.0] == [line["groups/retries"] for line in steps(lines)]


def test_a_run_whose_groups_never_have_enough_rollouts_ends_with_what_the_agent_raised(
    small_run: Run, failing: Callable[[str], str]
) -> None:
    """The error names the exception and its line."""
    with pytest.raises(JackfieldError) as caught:
        small_run("never", failing("range(1000)"), "data.minimum_rows=3", "schedule.max_retries=1")
    assert "queue.batch-failed" == caught.value.code
    assert re.search(r"ConnectionError: the shop is closed \(.*failing\.py:10\)", caught.value.message)
    assert "was made again 1 times" in caught.value.message


def test_in_a_cluster_each_agent_worker_serves_the_frozen_model(
    small_run: Run, workflow: str, start: str, ray_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ray_environment.items():
        monkeypatch.setenv(name, value)
    cluster = "cluster={name: ray, ray: {num_cpus: 2, cpus_per_place: 0.5, agent_workers: 2}}"
    result, lines = small_run("cluster", workflow, start, cluster, "schedule.steps=1", "agent_service.retries=3")
    assert 1 == result.steps
    assert steps(lines)[0]["agent/before_tokens/mean"] > 1


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("models={policy: {path: x}}", "models.policy"),
        ("models={start: {}}", "models.start"),
        ("tools={calculator: {function: 'nowhere.py:add'}}", "tools"),
        ("agent_service.extra_rollouts=-1", "agent_service.extra_rollouts"),
        ("agent_service.times_usual=0.5", "agent_service.times_usual"),
        ("algorithm={name: remax}", "agent_service.extra_rollouts"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_the_first_step(
    small_run: Run, workflow: str, override: str, where: str
) -> None:
    extra = ["agent_service.extra_rollouts=1"] if "remax" in override else []
    with pytest.raises(JackfieldError) as caught:
        small_run("refused", workflow, override, *extra)
    assert str(caught.value.where).startswith(where), caught.value


def test_tools_of_an_agent_that_does_not_call_any_are_refused(small_run: Run) -> None:
    with pytest.raises(JackfieldError) as caught:
        small_run("refused", "tools={add: {function: 'operator:add'}}")
    assert "plugin.capability" == caught.value.code
