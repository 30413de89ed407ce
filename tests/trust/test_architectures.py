"""Each architecture is trained and served in a run of three GRPO steps, with the results that are committed.

``tools/architecture_runs.py`` writes the results, ``tools/architecture_reference.py`` the page of the documentation.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jackfield_architecture_runs import RESULTS, Result, run_architecture, runs
from jackfield_architectures import ARCHITECTURES, NOT_SERVED, REFUSED, TRAINED, VARIANTS
from jackfield_huggingface.architectures import advice

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.needs("module:jackfield_engine_fsdp"),
    pytest.mark.needs("module:jackfield_rollout_transformers"),
]

NAMES = [*ARCHITECTURES, *VARIANTS]
#: packed with a sliding window; eager attention and experts; a recurrence, one request after another; with vision
FAST = ("mistral", "gpt_oss", "bamba", "qwen3_vl")
CHOICES = ("trained", "served", "packed", "attention", "cache", "images", "tensor_parallel")


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    found: dict[str, Result] = json.loads(RESULTS.read_text())
    return found


def test_results_are_those_of_the_lists(results: dict[str, Result]) -> None:
    assert sorted(NAMES) == sorted(results)
    assert {*REFUSED, *NOT_SERVED} == {name for name, result in results.items() if not runs(result)}


def test_most_of_what_people_train_runs(results: dict[str, Result]) -> None:
    assert 65 == len(set(TRAINED)) == len(TRAINED)
    assert 58 <= sum(runs(results[name]) for name in TRAINED)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in FAST else pytest.mark.nightly) for each in NAMES]
)
def test_a_run_gives_the_committed_result(name: str, results: dict[str, Result], made: Path, tmp_path: Path) -> None:
    found = run_architecture(name, made, tmp_path, replays=False)
    assert runs(found) == runs(results[name]), found
    assert {each: results[name][each] for each in CHOICES} == {each: found[each] for each in CHOICES}


def test_a_result_of_weights_that_stayed_is_none_of_a_run(results: dict[str, Result]) -> None:
    """Equal log-probs of server and engine mean nothing where nothing has changed."""
    good = results["qwen3"]
    for change in ({"moved": 0.0}, {"updates": 2}, {"difference": 0.1}):
        assert runs(good)
        assert not runs({**good, **change})


def test_a_refusal_says_what_else_has_the_architecture(tmp_path: Path) -> None:
    def told(kind: str, refused: str) -> str:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        return advice(str(tmp_path), refused)  # type: ignore[arg-type]

    assert "qwen3" in told("qwen3", "trained")
    assert "paligemma" in told("paligemma", "trained")
    assert "nobody" in told("nobody", "served")
    assert advice(str(tmp_path / "missing"), "trained")
