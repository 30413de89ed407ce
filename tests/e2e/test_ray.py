"""The same configuration in a Ray cluster: the same losses, no tensor in the controller, and workers that die."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("ray")

from .conftest import QUICKSTART, Run, metrics
from .test_bad_input import marked
from .test_kill import DONE, check_equal, check_ledger, kill_again_and_again
from .test_lost_units import check_retried
from .test_modes import GRADED
from .test_modes import steps as by_step

pytestmark = pytest.mark.timeout(600)

GUIDE = QUICKSTART.parent / "guides" / "ray_runtime.yaml"  #: what the guide shows
SCRIPT = Path(__file__).with_name("ray_run.py")
#: Neither tokens nor losses depend on what a replica computes beside other requests.
SAME = ("algorithm.old_log_probs=engine", "rollout.batch_invariant=true")
OURS = ("policy/loss", "policy/ratio", "grad_norm", "lr", "reward/mean", "response_tokens/mean")

#: How often a run is killed as a whole; ten times take too long for CI.
KILLS = int(os.environ.get("JACKFIELD_RAY_KILLS", "1"))


@attrs.frozen
class Ended:
    """How a run ended."""

    code: int
    stderr: str
    folder: Path


RayRun = Callable[..., Ended]


@pytest.fixture(scope="module")
def ray_run(
    made: Path, tmp_path_factory: pytest.TempPathFactory, ray_environment: dict[str, str], ray_interpreters: str
) -> RayRun:
    """Do a run in a process of its own, in the folder of its name. It ends well, unless it kills itself; then nothing
    is left but the cluster that it has joined.
    """
    runs = tmp_path_factory.mktemp("runs")
    workers: dict[str, set[int]] = defaultdict(set)

    def do(
        name: str,
        *overrides: str,
        kill: dict[str, list[str]] | None = None,
        scale: Sequence[tuple[int, int, int]] = (),
        moment: tuple[str, int] | None = None,
    ) -> Ended:
        folder = runs / name
        small = [
            f"name={name}", f"folder={folder}", f"model.path={made / 'model'}", f"data.train={made / 'problems'}.jsonl",
            "data.groups_per_batch=4", "data.rollouts_per_group=4", "sampling.max_new_tokens=6", "schedule.steps=4",
            "evaluation.every=0", "observe.progress=false", "observe.curve=false", "observe.report_to=[]",
            f"cluster={GUIDE.read_text()}", "cluster.ray.object_store_bytes=200000000", ray_interpreters,
            *SAME, *GRADED,
        ]  # fmt: skip
        kills = json.dumps({"workers": kill or {}, "scale": scale, "all": moment})
        command = [sys.executable, str(SCRIPT), kills, str(QUICKSTART / "grpo.yaml"), *small, *overrides]
        mark = {"JACKFIELD_TEST_MARK": uuid.uuid4().hex}
        ended = subprocess.run(
            command, env={**ray_environment, **mark}, capture_output=True, text=True, timeout=500, check=False
        )
        if (folder / "workers.json").is_file():
            noted = json.loads((folder / "workers.json").read_text())
            workers[name].update(worker["pid"] for worker in noted.values())
        for noted in re.findall(r"^processes ([\d ]+)$", ended.stderr, re.MULTILINE):
            workers[name].update(map(int, noted.split()))
        if moment is None or ended.returncode != -signal.SIGKILL:
            assert 0 == ended.returncode, ended.stderr[-3000:]
            assert [] == [pid for pid in workers[name] if lives(pid)], "workers outlive their run"
            assert [] == list(marked(*mark.values())), "a part of the run's own cluster outlives it"
        return Ended(ended.returncode, ended.stderr, folder)

    return do


def lives(pid: int) -> bool:
    """Whether a worker with this number lives; somebody else may have it by now."""
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.fixture(scope="module")
def joined(ray_run: RayRun, ray_cluster: str) -> Path:
    """The folder of a run in a cluster that is there: two ranks and a replica take turns, with all hand-overs.

    A second replica is added and removed again. Meanwhile workers without state are killed, and the second replica,
    which is started again.
    """
    kill = {"step 1": ["agent worker 0"], "step 2": ["rollout replica 1"], "step 3": ["reward worker 0"]}
    scale = [(1, 2, 1), (3, 1, 4)]
    settings = ("cluster.replicas=1", "cluster.offload=true", "cluster.metrics_port=0", "deadlines.drain=0")
    ended = ray_run("joined", "--address", ray_cluster, *settings, "profile=step:2", kill=kill, scale=scale)
    for replicas in ([0, 1], [0]):
        assert f"scaled to replicas {replicas}, Prometheus reads {replicas}\n" in ended.stderr
    assert "rollout replica 1 died and is started again" in ended.stderr
    assert "the run goes on after" not in ended.stderr
    assert "constructor arguments" not in ended.stderr, "Ray fears for actors that are to be started again"
    return ended.folder


def test_a_run_in_a_cluster_is_the_inline_run(small_run: Run, joined: Path) -> None:
    """The controller cannot import torch or numpy: no tensor passes it. Deaths of stateless workers do not show."""
    _, expected = small_run("inline", *GRADED, *SAME, "schedule.steps=4")
    check_close(expected, joined, steps=4)
    # they take turns on the device: a version is compared at the turn after the step that made it
    assert all(line["log_prob_check/replica/mean"] < 1e-4 for line in by_step(metrics(joined))[1:])
    for name in ("log_prob_check/rollout", "log_prob_check/train_mode"):  # two ranks count every token once
        compared = [line for line in by_step(metrics(joined)) if f"{name}/mean" in line]
        assert [1, 2] == [line["step"] for line in compared]
        assert all(line[f"{name}/max"] < 1e-4 for line in compared)
        assert all(line[f"{name}/tokens"] == pytest.approx(16 * line["response_tokens/mean"]) for line in compared)
    workers = json.loads((joined / "workers.json").read_text())
    names = {"the actor engine, rank 1", "rollout replica 0", "agent worker 0", "reward worker 0"}
    assert names <= set(workers)
    assert "rollout replica 1" not in workers
    synced = [line["replicas"] for line in metrics(joined) if line["kind"] == "weights"]
    assert [1, 2, 2] == synced[:3]
    assert not (joined / "samples" / "failed.jsonl").exists(), "a request was lost"


def test_each_rank_traces_its_own_process_in_the_profiled_step_only(joined: Path) -> None:
    assert ["step-2"] == [folder.name for folder in (joined / "profile").iterdir()]
    files = {file.name: file for file in (joined / "profile" / "step-2").iterdir()}
    assert ["actor-0.json.gz", "actor-1.json.gz", "controller.html"] == sorted(files)
    for rank in (0, 1):
        trace = json.loads(gzip.decompress(files[f"actor-{rank}.json.gz"].read_bytes()))["traceEvents"]
        assert {f"actor {rank}: train"} == {each["name"] for each in trace if each["name"].endswith(": train")}
    assert "_run_once" in files["controller.html"].read_text(encoding="utf-8"), "the event loop is in every stack"


def test_every_step_trains_on_a_full_batch_though_storage_units_are_killed(ray_run: RayRun, ray_cluster: str) -> None:
    """They are processes of the controller, which goes on: only their rows are lost, by name, and made anew."""
    kill = {"next_batch 0": ["storage unit 0"], "advantages 1": ["storage unit 1"], "reward 2": ["storage unit 2"]}
    places = ("cluster.replicas=1", "cluster.ray.engine_ranks=1", "transfer_queue={name: zmq, units: 4}")
    small = ("schedule.steps=3", "data.groups_per_batch=3", "data.rollouts_per_group=2", "checkpoint.every=1")
    ended = ray_run("units", "--address", ray_cluster, *places, *small, kill=kill)
    assert 3 == ended.stderr.count("killed storage unit")
    assert "died" not in ended.stderr, "no worker did"
    check_retried(ended.folder, by_step(metrics(ended.folder)), prompts=3, runs=2)


def check_close(expected: list[dict[str, Any]], folder: Path, *, steps: int) -> None:
    """Losses and what else is trained on are those of the inline run."""
    lines = by_step(metrics(folder))
    assert steps == len(lines)
    for ours, theirs in zip(lines, by_step(expected)[:steps], strict=True):
        for name in OURS:
            assert theirs[name] == pytest.approx(ours[name], abs=1e-5), (ours["step"], name)


def test_workers_that_die_are_named_and_the_run_ends_as_if_they_had_not(ray_run: RayRun, joined: Path) -> None:
    """A replica of a run's own cluster is started again; else the run goes on from its newest checkpoint.

    The final weights are the same, bit for bit.

    Here ranks and replica have places of their own, and weights are sent as deltas. Only who died has a new process.
    """
    kill = {
        "checkpoint 1": ["rollout replica 0"],
        "checkpoint 2": ["the actor engine, rank 0"],
        "checkpoint 3": ["the actor engine, rank 1"],
    }
    places = ("cluster.placement=separate", "cluster.replicas=1", "cluster.ray.num_cpus=3")
    ended = ray_run("recovered", *places, "checkpoint.every=1", "weights.kind=delta", kill=kill)
    assert "rollout replica 0 died and is started again" in ended.stderr
    assert ["seconds/load_weights" in line for line in by_step(metrics(ended.folder))] == [False, True, False, False]
    for step in (2, 3):
        (name,) = kill[f"checkpoint {step}"]
        (died,) = [line for line in ended.stderr.splitlines() if line.endswith(f"the run goes on after step {step}")]
        assert died.startswith(f"{name} died ({name}, process "), "with its number and host"
    assert 2 == ended.stderr.count("the run goes on after")
    check_equal(joined, ended.folder, besides=("replicas", "log_prob_check/replica", "log_prob_check/rollout"))


LONG = (
    *("sampling.max_new_tokens=100", "sampling.ignore_eos=true", "schedule.sync_offset=1", "cluster.replicas=2"),
    *("cluster.ray.engine_ranks=1", "observe.samples_per_step=16", "reward.expected='.*s'", "checkpoint.every=0"),
)


@pytest.mark.parametrize(
    "settings",
    [
        ("schedule.partial_rollout=true", "cluster.offload=true"),
        ("cluster.placement=separate", "cluster.ray.num_cpus=3", "weights.in_turns=true"),
    ],
    ids=["interrupted for training", "beside training, in turns"],
)
def test_responses_continue_with_new_weights_in_a_cluster(
    ray_run: RayRun, ray_cluster: str, settings: Sequence[str]
) -> None:
    """Each has its whole budget, and some have tokens of two versions."""
    where = () if "cluster.ray.num_cpus=3" in settings else ("--address", ray_cluster)
    ended = ray_run("-".join(settings[0].split("=")), *where, *LONG, *settings)
    rows = [json.loads(line) for line in (ended.folder / "samples" / "train.jsonl").read_text().splitlines()]
    assert 4 * 16 == len(rows)
    assert {100} == {len(row["response_ids"]) for row in rows}
    spans = {(row["tags"]["weight_version_min"], row["tags"]["weight_version_max"]) for row in rows}
    assert any(oldest < newest for oldest, newest in spans), spans
    assert not (ended.folder / "samples" / "failed.jsonl").exists(), "a request was lost"
    assert [2] * 4 == [line["replicas"] for line in metrics(ended.folder) if line["kind"] == "weights"]
    assert all(line["log_prob_check/replica/mean"] < 1e-4 for line in by_step(metrics(ended.folder))[1:])


@pytest.mark.timeout(600 + 120 * KILLS)
def test_a_run_that_is_killed_at_random_moments_is_bitwise_the_uninterrupted_one(
    ray_run: RayRun, ray_cluster: str, joined: Path
) -> None:
    """The same command, in a cluster that stays. Ranks and replica take turns, without further hand-overs.

    ``JACKFIELD_RAY_KILLS=10 pytest -rP`` kills ten times and shows where.
    """

    def start(folder: Path, *settings: str, kill: tuple[str, int] | None = None, file: str = "") -> dict[str, Any]:
        ended = ray_run(str(folder), *settings, moment=kill)
        saved = sorted(path.name for path in ended.folder.glob("checkpoints/step_*"))
        print(f"killed at {kill}" if ended.code else "finished", "with", saved or "no checkpoint")
        return {"killed": True} if ended.code else DONE

    settings = ("--address", ray_cluster, "cluster.replicas=1", "checkpoint.every=1")
    for finished in kill_again_and_again(start, Path("killed"), settings, seed=10, kills=KILLS, last=240):
        folder = joined.parent / finished
        check_equal(joined, folder, besides=("replicas", "log_prob_check/replica", "log_prob_check/rollout"))
        check_ledger(folder, prompts=4)
        assert not list(folder.rglob("*.partial"))
