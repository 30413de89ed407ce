"""New weights in the middle of a response: beside the engine, on its device, and with servers that keep no requests.

Each token has the version that made it, its log-prob is that version's, and the token budget is that of one request.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from transformers import AutoModelForCausalLM

from jackfield.abc.agent import AgentLoopOutput, AgentSequence
from jackfield.abc.rollout import PauseRequest
from jackfield.plugins import hookimpl
from jackfield.plugins.hooks import WeightsSynced
from jackfield_agent_single_turn.agent import SingleTurnAgent
from jackfield_reward_rules.reward import RulesReward
from jackfield_rollout_transformers.decoder import Sequence as Decoded
from jackfield_rollout_transformers.server import TransformersServer

from .conftest import Run
from .test_modes import GRADED, steps
from .test_process import python

__all__ = ["python"]  # a fixture

pytestmark = pytest.mark.timeout(180)

TOKENS, SAMPLES, BEFORE = 80, 8, 12
SMALL = (
    *("data.groups_per_batch=2", "data.rollouts_per_group=4", f"sampling.max_new_tokens={TOKENS}"),
    *("sampling.ignore_eos=true", "rollout.batch_invariant=true", "schedule.sync_offset=1", "optimizer.lr=0.01"),
    *("optimizer.warmup_steps=0", "checkpoint.every=0", *GRADED, "reward.expected='.*s'"),
)
WAIT_SECONDS = 60.0


class Moments:
    """Lets training begin when the second batch has some tokens, which get no more until training stops them."""

    def __init__(self) -> None:
        self.generating, self.stopped = threading.Event(), threading.Event()
        self.long = 0  #: samples that have reached ``BEFORE`` tokens
        self.sequences: list[AgentSequence] = []
        self.calls: list[str] = []  #: of the server

    def note(self, count: int) -> None:
        self.long += count == BEFORE
        if self.long > SAMPLES:  # of the second batch
            self.generating.set()
            assert self.stopped.wait(WAIT_SECONDS), "training waits for the rollouts"

    async def begun(self) -> None:
        """Wait for the second batch, once the first one is generated."""
        while self.long >= SAMPLES and not self.generating.is_set():
            await asyncio.sleep(0)


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> Iterator[Moments]:
    found = Moments()
    append, score, answer = Decoded.append, RulesReward.compute_score, SingleTurnAgent.run

    def note(self: Any, token: int, log_prob: float) -> bool:
        if "check" not in self.request.request_id and "probe" not in self.request.request_id:
            found.note(len(self.token_ids))
        return append(self, token, log_prob)

    async def late(self: Any, request: Any) -> Any:
        await found.begun()
        return await score(self, request)

    async def kept(self: Any, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        output = await answer(self, sampling_params, **fields)
        found.sequences += output.sequences
        return output

    def stopping(name: str) -> None:
        method = getattr(TransformersServer, name)

        async def call(self: Any, request: Any) -> Any:
            found.calls.append(name)
            if name in ("pause", "update_weights"):
                found.stopped.set()
            return await method(self, request)

        monkeypatch.setattr(TransformersServer, name, call)

    monkeypatch.setattr(Decoded, "append", note)
    monkeypatch.setattr(RulesReward, "compute_score", late)
    monkeypatch.setattr(SingleTurnAgent, "run", kept)
    for name in ("pause", "resume", "sleep", "wake_up", "update_weights"):
        stopping(name)
    yield found
    found.stopped.set()


def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give engine and replica devices of their own, whatever this machine has."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


def aborting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server keep no requests."""
    pause = TransformersServer.pause

    async def abort(self: Any, request: PauseRequest) -> Any:
        return await pause(self, attrs.evolve(request, mode="abort"))

    monkeypatch.setattr(TransformersServer, "pause", abort)


def log_probs(old: Any, new: Any, sequence: AgentSequence, before: int, *, computed_again: bool) -> list[float]:
    """Return each token's log-prob by the version that made it.

    The new version uses the old one's keys and values, unless they are ``computed_again``.
    """
    tokens, prompt = list(sequence.response_ids), list(sequence.prompt_ids)
    with torch.no_grad():
        first = old(torch.tensor([[*prompt, *tokens[: before - 1]]]), use_cache=True)
        if computed_again:
            rest = new(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) + before - 1 :]
        else:
            inputs = torch.tensor([tokens[before - 1 : -1]])
            rest = new(inputs, past_key_values=first.past_key_values, use_cache=True).logits[0]
    logits = torch.cat((first.logits[0, len(prompt) - 1 :], rest))
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    return found


def models(made: Path, first: Path) -> tuple[Any, Any]:
    return tuple(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (made, first))


SHARED = ("schedule.partial_rollout=true", "cluster.threads=null")
CASES: Mapping[str, tuple[Sequence[Any], Sequence[str], bool, Sequence[str]]] = {
    "beside the engine": ((beside,), ("cluster.threads=1",), False, ["update_weights"]),
    "on its device": ((), SHARED, False, ["pause", "update_weights", "resume"]),
    "that sleeps": (
        (), (*SHARED, "cluster.offload=true"), True,
        ["pause", "sleep", "wake_up", "update_weights", "wake_up", "resume"],
    ),
    "that keeps nothing": ((aborting,), SHARED, True, ["pause", "update_weights", "resume"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_response_continues_with_new_weights(
    case: str, small_run: Run, made: Path, moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, settings, computed_again, calls = CASES[case]
    for change in changes:
        change(monkeypatch)
    _, lines = small_run("two", *SMALL, *settings, "schedule.steps=2")
    assert [0, 1] == [line["staleness/max"] for line in lines if line["kind"] == "step"]
    begin = moments.calls.index(calls[0])
    assert calls == [call for call in moments.calls[begin:] if call in calls][: len(calls)]
    mixed = moments.sequences[SAMPLES : 2 * SAMPLES]
    moments.long = -10 * SAMPLES  # do not wait any more
    one, _ = small_run("one", *SMALL, "schedule.steps=1")
    old, new = models(made / "model", one.model)
    cut = 0
    for sequence in mixed:
        assert (TOKENS, "length") == (len(sequence.response_ids), sequence.finish_reason)
        before = sequence.weight_versions.count(0)
        assert (0,) * before + (1,) * (TOKENS - before) == sequence.weight_versions
        if 0 < before < TOKENS:
            cut += 1
            expected = log_probs(old, new, sequence, before, computed_again=computed_again)
            assert expected == pytest.approx(list(sequence.response_log_probs), abs=1e-4)
            plain = log_probs(old, old, sequence, before, computed_again=True)
            assert plain[before:] != pytest.approx(expected[before:], abs=1e-2)
    assert cut, "no response has two versions"


class Updates:
    """Notes which replicas are updated at the same time, and the reports of weight syncs."""

    def __init__(self) -> None:
        self.running, self.together, self.reports = set[int](), list[set[int]](), list[WeightsSynced]()

    @hookimpl
    def weights_synced(self, event: WeightsSynced) -> None:
        self.reports.append(event)


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> Updates:
    found, update = Updates(), TransformersServer.update_weights

    async def noted(self: Any, request: Any) -> Any:
        found.running.add(self.context.replica)
        found.together.append(set(found.running))
        try:
            return await update(self, request)
        finally:
            found.running.remove(self.context.replica)

    monkeypatch.setattr(TransformersServer, "update_weights", noted)
    return found


TURNS = ("weights.in_turns=true", "cluster.threads=1", "schedule.sync_offset=1", *GRADED)


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ((), ["full"] * 3),
        (("weights.kind=delta",), ["full", "delta", "delta"]),
        (("model.lora={rank: 4}",), ["adapter"] * 3),
        (
            ("model.lora={rank: 4, use_dora: true, publish: merged}", "weights.kind=delta", "optimizer.name=muon"),
            ["full", "delta", "delta"],
        ),
    ],
    ids=["full", "delta", "adapter", "merged"],
)
def test_replicas_take_new_weights_in_turns(
    settings: Sequence[str], kinds: list[str], small_run: Run, updates: Updates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every turn ends with receipts and the probe's log-probs; no more than half of the replicas has one."""
    beside(monkeypatch)
    _, lines = small_run("turns", *TURNS, "cluster.replicas=3", *settings, hooks=[updates])
    assert kinds == [report.kind for report in updates.reports]
    assert [[0, 1, 2]] * 3 == [[receipt.replica for receipt in report.receipts] for report in updates.reports]
    turns = [each for each in updates.together if len(each) == 2 or 1 in each]
    assert [{0, 2}, {1}] * 3 == turns
    assert 3 == len(steps(lines))
    assert all(line["log_prob_check/replica/mean"] < 1e-4 for line in steps(lines))


class KillAfter:
    """Kills one replica's process after a stage of the second step."""

    def __init__(self, stage: str, python: str) -> None:
        self.stage, self.python, self.killed = stage, python, list[int]()

    @hookimpl
    def stage_ended(self, event: Any) -> None:
        if (event.name, event.step) == (self.stage, 1):
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            replicas = [int(pid) for pid in children if self.python in Path(f"/proc/{pid}/cmdline").read_text()]
            self.killed += replicas[:1]
            os.kill(replicas[0], signal.SIGKILL)


# asyncio leaves a connection open if its server is closed right after accepting it, as when the sender gives up here
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning")
def test_replicas_in_processes_of_their_own_take_turns_and_one_that_dies_is_left_out(
    small_run: Run, python: str, updates: Updates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes its place with the version that it has missed, and has turns again."""
    beside(monkeypatch)
    own = (f"cluster.interpreters={{rollout: {python}}}", "cluster.replicas=2", "weights.kind=delta")
    killer = KillAfter("update_actor", python)  # weights are sent next
    _, lines = small_run("own", *TURNS, *own, hooks=[updates, killer])
    assert (3, 1) == (len(steps(lines)), len(killer.killed))
    served = [[receipt.replica for receipt in report.receipts] for report in updates.reports]
    assert [0, 1] == served[0]
    assert len(served[1]) == 1


def test_a_replica_that_is_killed_while_its_requests_are_interrupted_loses_none(small_run: Run, python: str) -> None:
    """They are generated by its successor, which starts when training is over and has the new weights."""
    long = ("sampling.max_new_tokens=60", "sampling.ignore_eos=true", "schedule.sync_offset=1", *GRADED)
    own = (f"cluster.interpreters={{rollout: {python}}}", "schedule.partial_rollout=true", "cluster.threads=null")
    killer = KillAfter("advantages", python)
    result, lines = small_run("killed", *long, *own, hooks=[killer])
    assert (3, 1) == (len(steps(lines)), len(killer.killed))
    assert {60.0} == {line["response_tokens/mean"] for line in steps(lines)}
    assert not (result.folder / "samples" / "failed.jsonl").exists(), "a request was lost"


@pytest.mark.parametrize(
    "settings",
    [
        ("schedule.partial_rollout=true", "cluster.threads=null", "cluster.offload=true"),
        ("weights.in_turns=true", "cluster.threads=1", "cluster.replicas=2"),
    ],
    ids=["on the engine's device", "beside the engine"],
)
def test_asynchronous_training_gets_whole_responses_of_several_versions(
    settings: Sequence[str], small_run: Run, moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were not trained on in time are within the bound of the schedule, token by token."""
    if with_replicas_beside := "cluster.threads=1" in settings:
        beside(monkeypatch)
        moments.long = -(1 << 20)  # nothing is waited for
    small = [setting for setting in SMALL if not setting.startswith("schedule.")]
    how = ("schedule.mode=async", "schedule.max_staleness=2", "schedule.rollouts_in_flight=12", "schedule.steps=4")
    result, lines = small_run("async", *small, *how, *settings)
    assert 4 == len(steps(lines))
    assert max(line["staleness/max"] for line in steps(lines)) <= 2
    assert {float(TOKENS)} == {line["response_tokens/mean"] for line in steps(lines)}
    versions = [each.weight_versions for each in moments.sequences]
    assert with_replicas_beside or any(len(set(each)) > 1 for each in versions), "no response has two versions"
    assert all(list(each) == sorted(each) for each in versions), "a later token has older weights"
    assert not (result.folder / "samples" / "failed.jsonl").exists(), "a request was lost"
