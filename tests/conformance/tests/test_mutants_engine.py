"""Which check of training engines kills which mutant."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from mutants import harness  # noqa: E402
from mutants.engine import MUTANTS, REFERENCE  # noqa: E402
from mutants.engine_experts import MixingEngine  # noqa: E402
from mutants.engine_images import SeeingEngine  # noqa: E402
from mutants.plain_engine import PlainConfig  # noqa: E402

from jackfield_conformance.support import engine as support  # noqa: E402


@pytest.fixture(autouse=True)
def _one_layer_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seventy engines pass fifty checks each: the smallest model and no threads."""
    monkeypatch.setattr(support, "LAYERS", 1)
    torch.set_num_threads(1)


(
    test_the_reference_passes,
    test_each_mutant_fails_its_checks,
    test_no_other_check_fails,
    test_every_check_is_killed_by_a_mutant,
) = harness.make_tests("engine", REFERENCE, MUTANTS, timeout=240)


def test_an_engine_that_takes_images_passes_their_check(tmp_path: Path) -> None:
    """The mutants of images are this engine with one fault each."""
    seeing = harness.Reference(cls=SeeingEngine, config_class=PlainConfig, capabilities={"multi_modal": "full"})
    found = harness.outcomes("engine", seeing, tmp_path, only={"ENG-122"})
    assert {"ENG-122": ("passed", "")} == {id: (each.status, each.message or "") for id, each in found.items()}


def test_an_engine_of_mixtures_passes_their_checks(tmp_path: Path) -> None:
    """The mutants of experts are this engine with one fault each."""
    capabilities = {"router_replay": "full", "router_aux_loss": "full"}
    mixing = harness.Reference(cls=MixingEngine, config_class=PlainConfig, capabilities=capabilities)
    found = harness.outcomes("engine", mixing, tmp_path, only={"ENG-140", "ENG-141"})
    assert {id: outcome.message for id, outcome in found.items() if outcome.status != "passed"} == {}
    assert len(found) == 2
