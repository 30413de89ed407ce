"""``jackfield run --address`` in a Ray cluster of two machines, which are two network namespaces on this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

from .conftest import QUICKSTART, Run
from .test_modes import GRADED
from .test_ray import SAME, check_close

TWO_NODES = QUICKSTART.parent / "guides" / "two_nodes.sh"


@pytest.mark.timeout(600)
@pytest.mark.needs("network namespaces")
def test_four_ranks_on_two_nodes_are_the_inline_run(
    small_run: Run, made: Path, tmp_path: Path, ray_environment: dict[str, str], ray_interpreters: str
) -> None:
    """The guide's script, and the real command. Gradients and weights cross from node to node. Without the token a
    process cannot join, and no process is left at the end.
    """
    settings = [
        "name=nodes", f"folder={tmp_path / 'nodes'}", f"model.path={made / 'model'}",
        f"data.train={made / 'problems'}.jsonl", "data.groups_per_batch=4", "data.rollouts_per_group=4",
        "sampling.max_new_tokens=6", "schedule.steps=2", "evaluation.every=0", "checkpoint.at_end=false",
        "observe.progress=false", "observe.curve=false", "observe.report_to=[]", "cluster.ray.engine_ranks=4",
        "cluster.placement=separate", ray_interpreters, *SAME, *GRADED,
    ]  # fmt: skip
    run = ["jackfield", "run", str(QUICKSTART / "grpo.yaml"), "--address", "10.213.7.1:6379"]
    stranger = 'RAY_AUTH_TOKEN=0123456789abcdef "$@"; test $? = 1 && exec "$@"'
    command = ["sh", str(TWO_NODES), "sh", "-c", stranger, "sh", *run, *settings]
    path = os.pathsep.join([str(Path(sys.executable).parent), ray_environment["PATH"]])
    # 5 places on 2 + 3 CPUs: the ranks are on both nodes, and the replica is not where the first rank is
    environment = {**ray_environment, "PATH": path, "FIRST_CPUS": "2", "SECOND_CPUS": "3"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as script:
        try:
            _, stderr = script.communicate(timeout=500)
        finally:
            left = end_namespaces(f"jackfield-{script.pid}-")
    assert 0 == script.returncode, stderr[-3000:]
    assert "[cluster.unavailable] the Ray cluster at 10.213.7.1:6379 cannot be joined" in stderr
    assert [] == left
    _, expected = small_run("inline", *GRADED, *SAME, "schedule.steps=2")
    check_close(expected, tmp_path / "nodes", steps=2)
    workers = json.loads((tmp_path / "nodes" / "workers.json").read_text())
    ranks = [workers[f"the actor engine, rank {rank}"]["node"] for rank in range(4)]
    assert {"10.213.7.1", "10.213.7.2"} == set(ranks)
    assert ranks[0] != workers["rollout replica 0"]["node"]


def end_namespaces(prefix: str) -> list[str]:
    """Network namespaces that were left, which are gone then, with what runs there."""

    def ip(*arguments: str) -> list[str]:
        return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout.split()

    left = [name for name in ip("netns", "list") if name.startswith(prefix)]
    for name in left:
        for pid in ip("netns", "pids", name):
            os.kill(int(pid), signal.SIGKILL)
        ip("netns", "delete", name)
    return left
