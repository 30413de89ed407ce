"""Every bundle through the one loop, on the real plugins, for a few small steps: what it needs is supplied."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from jackfield.algorithms import names
from jackfield.errors import JackfieldError

from .conftest import Run
from .test_modes import steps

#: Settings that a bundle needs beside its name.
SETTINGS: dict[str, tuple[str, ...]] = {
    "gdpo": ("algorithm.reward_dimensions=[even, length]",),
    "mix": ("data.expert_samples_per_batch=3",),
    "mix_chord": ("data.expert_samples_per_batch=3",),
}

GRADES = """\
def compute_score(data_source, solution_str, ground_truth, extra_info):
    length = len(solution_str)
    return {"score": float(length % 3), "even": float(length % 2), "length": length / 10}
"""


@pytest.fixture
def graded(tmp_path: Path) -> str:
    """A reward that tells the answers of a model that knows nothing apart, in several ways."""
    file = tmp_path / "graded.py"
    file.write_text(GRADES)
    return f"reward={{name: function, path: '{file}:compute_score'}}"


def expert(made: Path) -> str:
    return f"data.expert={made / 'demonstrations.jsonl'}"


OFFLINE = ("sft", "dpo")


@pytest.mark.parametrize("name", [name for name in names("algorithm") if name not in OFFLINE])
def test_every_bundle_that_explores_gets_what_it_needs(small_run: Run, made: Path, graded: str, name: str) -> None:
    settings = (graded, *SETTINGS.get(name, ()), *((expert(made),) if name.startswith("mix") else ()))
    result, lines = small_run(name, f"algorithm.name={name}", "schedule.steps=2", "algorithm.mini_batches=2", *settings)
    assert 2 == result.steps == len(steps(lines))
    for line in steps(lines):
        assert all(math.isfinite(line[key]) for key in ("policy/loss", "reward/mean", "advantages/abs_mean"))
    assert any(line["grad_norm"] > 0 for line in steps(lines)), "something was learnt from"


def test_a_log_prob_that_is_not_finite_names_its_sample(small_run: Run, graded: str) -> None:
    """Weights that overflow make the next step's log-probs NaN."""
    broken = ("optimizer.lr=1e38", "optimizer.clip_grad=null", "optimizer.weight_decay=0.0", "optimizer.warmup_steps=0")
    with pytest.raises(JackfieldError) as caught:
        small_run("nan", "algorithm.epochs=2", graded, *broken)
    assert "algorithm.not-finite" == caught.value.code, str(caught.value)
    assert str(caught.value.where).startswith("sample train/0/"), caught.value.where
