"""Values of a run in a Ray cluster go straight from the workers that make them to those that need them, once each."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("ray")

from .conftest import QUICKSTART
from .counting import Seen, check_traffic, command, install, read
from .test_modes import GRADED

pytestmark = pytest.mark.timeout(600)

STEPS, GROUPS, RUNS = 2, 4, 4


@pytest.fixture(scope="module")
def seen(made: Path, tmp_path_factory: pytest.TempPathFactory, ray_environment: dict[str, str]) -> Seen:
    """Two ranks and two epochs. Nothing is shown, and no checkpoint is written."""
    folder = tmp_path_factory.mktemp("values")
    settings = [
        f"folder={folder / 'run'}", f"model.path={made / 'model'}", f"data.train={made / 'problems'}.jsonl",
        f"data.groups_per_batch={GROUPS}", f"data.rollouts_per_group={RUNS}", "sampling.max_new_tokens=8",
        f"schedule.steps={STEPS}", "evaluation.every=0", "observe.progress=false", "observe.curve=false",
        "observe.report_to=[]", "observe.samples_per_step=0", "checkpoint={every: 0, at_end: false}",
        "algorithm.old_log_probs=engine", "algorithm.epochs=2", "transfer_queue={name: counting, shared_from_bytes: 1}",
        "cluster={name: ray, threads: 1, ray: {num_cpus: 3, engine_ranks: 2, object_store_bytes: 200000000}}",
        *GRADED,
    ]  # fmt: skip
    words = command(folder / "traffic", "run", str(QUICKSTART / "grpo.yaml"), *settings)
    environment = ray_environment | install(folder)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert 0 == done.returncode, done.stderr[-3000:]
    workers = json.loads((folder / "run" / "workers.json").read_text())
    return read(folder / "run", folder / "traffic", {worker["pid"]: name for name, worker in workers.items()})


def test_the_controller_and_the_driver_carry_no_values(seen: Seen) -> None:
    """They put and get nothing, and no value is in a message to or from them, neither as bytes nor as numbers."""
    assert {"the actor engine, rank 0", "the actor engine, rank 1", "agent worker 0", "reward worker 0"} == {
        each.worker for each in seen.calls
    }
    check_traffic(seen, ("prompt_ids", "rollout_log_probs", "old_log_probs"), GROUPS * RUNS * STEPS)


def test_a_rank_reads_its_own_rows_once_and_not_what_it_wrote(seen: Seen) -> None:
    """Log-probs and two epochs use what was read once. Rank 0 reads for the advantages of all rows, too."""
    read = []
    for rank in ("the actor engine, rank 0", "the actor engine, rank 1"):
        got, put = seen.of(rank, "get"), seen.of(rank, "put")
        assert {1} == set(got.values()), got.most_common(3)
        assert not got.keys() & put.keys()
        read.append({key for key, _ in seen.of(rank, "get", "prompt_ids", "response_ids")})
        assert read[-1] == {key for key, _ in seen.of(rank, "put", "old_log_probs")}
        for column in ("prompt_ids", "response_ids"):
            assert read[-1] == {key for key, _ in seen.of(rank, "get", column)}
    assert not read[0] & read[1]
    assert GROUPS * RUNS * STEPS == len(read[0] | read[1])
    assert {key for key, _ in seen.of("the actor engine, rank 1", "get", "advantages")} == read[1]
    assert not seen.of("the actor engine, rank 0", "get", "advantages"), "the advantage worker is in its process"
