"""Several explorers with tasks, agents and sampling of their own fill the batches of one trainer."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from jackfield.queue import effective_acks, read_ledger
from jackfield_commands import CommandServer

from .test_collected import lines, ok, wait_until
from .test_modes import GRADED

pytestmark = pytest.mark.timeout(240)

Settings = Callable[..., list[str]]
#: An agent loop with two turns: it asks the task, and then something else.
TWO_TURNS = """
import itertools

import attrs

from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput, AgentSequence
from jackfield.abc.rollout import GenerateRequest, SamplingParams

numbers = itertools.count()


@attrs.frozen
class Config:
    pass


class Agent(AgentLoopBase):
    async def run(self, sampling_params, **fields):
        tokenizer = self.context.tokenizer
        tuples = {"stop": tuple(sampling_params["stop"]), "stop_token_ids": tokenizer.end_token_ids}
        sampling = SamplingParams(**{**sampling_params, **tuples})
        prompt, ids, mask, log_probs, versions = tokenizer.encode_chat(fields["messages"]), (), (), (), ()
        for turn in ((), tokenizer.encode_turn([{"role": "user", "content": "1+1="}])):
            ids, mask, log_probs = ids + turn, mask + (0,) * len(turn), log_probs + (0.0,) * len(turn)
            versions += (-1,) * len(turn)
            number = f"{self.context.request_prefix}/{next(numbers)}"
            asked = GenerateRequest(request_id=number, prompt_ids=prompt + ids, sampling=sampling)
            answer = await self.context.generate(asked)
            ids, mask = ids + answer.token_ids, mask + (1,) * len(answer.token_ids)
            log_probs, versions = log_probs + answer.log_probs, versions + answer.weight_versions
        sequence = AgentSequence(
            prompt_ids=prompt,
            response_ids=ids,
            response_mask=mask,
            response_log_probs=log_probs,
            weight_versions=versions,
        )
        return AgentLoopOutput(sequences=(sequence,), num_turns=2)
"""
SMALL = ("data.groups_per_batch=2", "data.rollouts_per_group=2", "sampling.max_new_tokens=4", *GRADED)


@pytest.fixture
def shared(quickstart_settings: Settings, tmp_path: Path) -> Callable[..., list[str]]:
    """``shared(*overrides)``: arguments of every role of one run."""
    weights = f"checkpoint_engine={{name: file, folder: {tmp_path / 'weights'}}}"
    return lambda *more: quickstart_settings("run", weights, "schedule.sync_offset=3", *SMALL, *more)


@pytest.fixture
def two_turns(tmp_path: Path) -> dict[str, str]:
    """The environment of a command that finds the agent ``two_turns``; the others do not know it."""
    package, info = tmp_path / "site" / "two_turns", tmp_path / "site" / "two_turns-0.1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    manifest = 'name = "two_turns"\nkind = "agent"\nabi = "1.0"\nobject = "two_turns:Agent"\n'
    (package / "__init__.py").write_text(TWO_TURNS)
    (package / "plugin.toml").write_text(f'{manifest}config = "two_turns:Config"\n')
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: two_turns\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[jackfield.agents]\ntwo_turns = two_turns:plugin.toml\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH")]))}


def test_explorers_with_different_tasks_agents_and_sampling_share_the_batches(
    jackfield: CommandServer,
    shared: Callable[..., list[str]],
    tmp_path: Path,
    made: Path,
    two_turns: dict[str, str],
) -> None:
    """Each batch is whole, has the tasks and the agent of one explorer, and is trained on once."""
    problems = [json.loads(line) for line in (made / "problems.jsonl").read_text().splitlines()]
    tasks = {}
    for name, chosen in {"many": problems[:40], "few": problems[40:50]}.items():
        tasks[name] = tmp_path / f"{name}.jsonl"
        tasks[name].write_text("".join(json.dumps(task) + "\n" for task in chosen))
    steps, wide = "schedule.steps=12", "rollout.max_batch_size=4"
    with ExitStack() as stack:
        controller = jackfield.start("queue", "serve", *shared())
        stack.callback(controller.wait)
        stack.callback(controller.send, signal.SIGTERM)
        wait_until(controller, lambda: "is served" in controller.out)
        explorers = [
            jackfield.start(
                *("run", "--role", "explore", *shared(steps, f"data.train={tasks[name]}", *own)), environment=found
            )
            for name, own, found in (
                ("many", ("data.share=0.75", "sampling.max_new_tokens=6"), {}),
                ("few", ("data.share=0.25", "sampling.max_new_tokens=3", "agent=two_turns", wide), two_turns),
            )
        ]
        ok(jackfield("run", "--role", "train", *shared(steps, "observe.samples_per_step=4")))
        for explorer in explorers:
            ok(explorer.wait())
    acks = effective_acks(list(read_ledger(tmp_path / "run")))["trainer"]
    assert dict.fromkeys(range(12), 4) == Counter(acks.values())
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples" / "train.jsonl").read_text().splitlines()]
    sources = Counter(row["tags"]["task"].partition(":")[0] for row in rows)
    assert {"many", "few"} == sources.keys()
    assert 48 == sources.total()
    turns = {(row["tags"]["task"].partition(":")[0], row["tags"]["turns"]) for row in rows}
    assert {("many", 1), ("few", 2)} == turns, "each explorer has an agent of its own"
    by_step = {row["step"]: set() for row in rows}
    for row in rows:
        by_step[row["step"]].add(row["tags"]["task"].partition(":")[0])
    assert all(len(found) == 1 for found in by_step.values()), "an explorer's tasks fill its batch"
    assert 12 == len(lines(tmp_path / "run"))


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ("data.rollouts_per_group=4", "data.rollouts_per_group"),
        ("schedule.sync_offset=2", "schedule.sync_offset"),
        ("sampling.temperature=0.5", "sampling.temperature"),
        ("model.path={other}", "model.path, tokenizer_config.json"),
    ],
)
def test_an_explorer_that_does_not_fit_is_refused_by_name(
    jackfield: CommandServer,
    shared: Callable[..., list[str]],
    tmp_path: Path,
    made: Path,
    setting: str,
    where: str,
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in (made / "model").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 77}))
    with ExitStack() as stack:
        controller = jackfield.start("queue", "serve", *shared())
        stack.callback(controller.wait)
        stack.callback(controller.send, signal.SIGTERM)
        wait_until(controller, lambda: "is served" in controller.out)
        trainer = jackfield.start("run", "--role", "train", *shared())
        stack.callback(trainer.wait)
        stack.callback(trainer.send, signal.SIGTERM)
        refused = jackfield("run", "--role", "explore", *shared(setting.format(other=other)))
    assert 1 == refused.code
    assert "this explorer does not fit the run" in refused.error
    assert where in refused.error
