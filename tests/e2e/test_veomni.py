"""The engine veomni in a run: in an interpreter of its own under Ray, and refused elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jackfield.errors import JackfieldError
from jackfield_testing import veomni_python

from .conftest import QUICKSTART, Run, metrics
from .test_modes import GRADED, steps

pytestmark = [pytest.mark.needs("veomni"), pytest.mark.timeout(600)]

SAME = ("algorithm.old_log_probs=engine", "rollout.batch_invariant=true")


@pytest.mark.nightly
def test_the_same_file_trains_the_same_model_with_veomni(
    made: Path, tmp_path: Path, ray_environment: dict[str, str], small_run: Run
) -> None:
    """Two ranks in their own interpreter, with other versions: the losses are those of fsdp, and replicas agree."""
    _, wanted = small_run("fsdp", *SAME, *GRADED)
    settings = [
        f"folder={tmp_path / 'veomni'}", f"model.path={made / 'model'}", f"data.train={made / 'problems'}.jsonl",
        "data.groups_per_batch=4", "data.rollouts_per_group=4", "sampling.max_new_tokens=6", "schedule.steps=3",
        "evaluation.every=0", "observe.progress=false", "observe.curve=false", "observe.report_to=[]",
        "engine={name: veomni}",
        "cluster={name: ray, threads: 1, ray: {num_cpus: 4, engine_ranks: 2, object_store_bytes: 200000000}}",
        f"cluster.interpreters={{engine: {veomni_python()}}}",
        *SAME, *GRADED,
    ]  # fmt: skip
    command = [str(Path(sys.executable).with_name("jackfield")), "run", str(QUICKSTART / "grpo.yaml"), *settings]
    done = subprocess.run(command, env=ray_environment, capture_output=True, text=True, timeout=500, check=False)
    assert 0 == done.returncode, done.stderr[-3000:]
    found = steps(metrics(tmp_path / "veomni"))
    assert [1, 2, 3] == [line["step"] for line in found]
    for one, other in zip(steps(wanted), found, strict=True):
        for name in ("policy/loss", "grad_norm", "reward/mean"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    assert all(line["log_prob_check/replica/mean"] < 1e-4 for line in found)


def test_an_interpreter_without_veomni_is_refused(small_run: Run, tmp_path: Path) -> None:
    """Before the first step, with what is missing."""
    with pytest.raises(JackfieldError) as caught:
        small_run("here", "engine={name: veomni}")
    assert "plugin.import" == caught.value.code
    assert "veomni" in str(caught.value)
    assert not (tmp_path / "here" / "metrics.jsonl").exists()
