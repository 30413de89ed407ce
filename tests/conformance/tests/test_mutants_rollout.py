"""The suite of rollout servers is tested: each mutant is killed by the checks that it names, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mutants import harness
from mutants.rollout import MUTANTS, REFERENCE
from mutants.rollout_experts import ReplayingServer
from mutants.rollout_images import SeeingServer
from mutants.rollout_parallel import LacksARow, LoadsOneWorkerOnly, SignsForOneWorker, TwoWorkers
from mutants.rollout_server import Config

from jackfield_conformance.support import rollout


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a mutant never does is not waited for long; it runs on the event loop alone, and needs no other time."""
    monkeypatch.setattr(rollout, "PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(rollout, "BREATH_BYTES", 1 << 10)
    torch.set_num_threads(1)
    rollout.model_folder()  # made once, and transformers imported, outside the time of the first check


(
    test_the_reference_passes,
    test_each_mutant_fails_its_checks,
    test_no_other_check_fails,
    test_every_check_is_killed_by_a_mutant,
) = harness.make_tests("rollout", REFERENCE, MUTANTS)


@pytest.mark.timeout(120)
def test_a_server_with_two_workers_passes_the_checks_of_weights(tmp_path: Path) -> None:
    weights = {f"ROL-{number:03}" for number in range(70, 87)}
    found = harness.outcomes("rollout", harness.Reference(cls=TwoWorkers, config_class=Config), tmp_path, only=weights)
    assert {id: outcome.message for id, outcome in found.items() if outcome.status != "passed"} == {}
    assert len(found) > 10


def test_a_server_that_takes_images_passes_their_checks(tmp_path: Path) -> None:
    seeing = harness.Reference(cls=SeeingServer, config_class=Config, capabilities={"multi_modal": "full"})
    found = harness.outcomes("rollout", seeing, tmp_path, only={"ROL-112", "ROL-113", "ROL-114"})
    assert {id: outcome.message for id, outcome in found.items() if outcome.status != "passed"} == {}
    assert len(found) == 3


def test_a_server_that_returns_experts_passes_their_checks(tmp_path: Path) -> None:
    replaying = harness.Reference(cls=ReplayingServer, config_class=Config, capabilities={"router_replay": "full"})
    found = harness.outcomes("rollout", replaying, tmp_path, only={"ROL-120", "ROL-121"})
    assert {id: outcome.message for id, outcome in found.items() if outcome.status != "passed"} == {}
    assert len(found) == 2


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (LoadsOneWorkerOnly, "worker 1 has loaded other bytes"),
        (LacksARow, "replica 0 workers lack model.layers.0.self_attn.q_proj.weight["),
        (SignsForOneWorker, "a receipt that does not cover its workers"),
    ],
)
def test_a_fault_of_one_of_two_workers_is_found(cls: type, message: str, tmp_path: Path) -> None:
    reference = harness.Reference(cls=cls, config_class=Config)
    found = harness.outcomes("rollout", reference, tmp_path, only={"ROL-086"})
    assert "failed" == found["ROL-086"].status
    assert message in found["ROL-086"].message
