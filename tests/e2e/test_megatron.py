"""The engine megatron in a run: the file of the engine fsdp, with another name of the engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jackfield_testing import ROOT

from .conftest import QUICKSTART, Run, metrics
from .test_modes import GRADED, steps

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

SAME = ("algorithm.old_log_probs=engine", "rollout.batch_invariant=true")
REDIRECTED = str(ROOT / "plugins" / "engines" / "megatron" / "tests" / "interpreter")  # torch.cuda is the CPU


@pytest.mark.parametrize(
    "settings",
    [
        ("engine={name: megatron}",),
        (
            "engine={name: megatron, tensor_parallel: 2}",
            "cluster={name: ray, threads: 1, ray: {num_cpus: 4, engine_ranks: 2, object_store_bytes: 200000000}}",
        ),
    ],
    ids=["one process", "two ranks under Ray"],
)
def test_the_same_file_trains_the_same_model_with_megatron(
    settings: tuple[str, ...], made: Path, tmp_path: Path, ray_environment: dict[str, str], small_run: Run
) -> None:
    """Losses, norms and rewards are those of fsdp."""
    _, wanted = small_run("fsdp", *SAME, *GRADED)
    more = [
        f"folder={tmp_path / 'megatron'}", f"model.path={made / 'model'}", f"data.train={made / 'problems'}.jsonl",
        "data.groups_per_batch=4", "data.rollouts_per_group=4", "sampling.max_new_tokens=6", "schedule.steps=3",
        "evaluation.every=0", "observe.progress=false", "observe.curve=false", "observe.report_to=[]",
        *settings, *SAME, *GRADED,
    ]  # fmt: skip
    command = [str(Path(sys.executable).with_name("jackfield")), "run", str(QUICKSTART / "grpo.yaml"), *more]
    environment = {**ray_environment, "PYTHONPATH": REDIRECTED, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert 0 == done.returncode, done.stderr[-3000:]
    found = steps(metrics(tmp_path / "megatron"))
    assert [1, 2, 3] == [line["step"] for line in found]
    for one, other in zip(steps(wanted), found, strict=True):
        for name in ("policy/loss", "grad_norm", "reward/mean"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
