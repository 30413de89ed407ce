"""Ranks over gloo against float64 and against the engine fsdp: one launch plays all, each test reads one scenario."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from jackfield.abc.engine import EngineContext, ModelSpec
from jackfield_conformance.support import engine as support
from jackfield_engine_fsdp.config import Config
from jackfield_engine_fsdp.engine import FSDPEngine

pytestmark = [pytest.mark.needs("veomni"), pytest.mark.multiprocess, pytest.mark.timeout(600)]

SECONDS = 280.0  #: for the processes of one launch, imports included, on a busy machine
STEPS = 3

#: Name, ranks, whether the model is a mixture of experts, settings.
SCENARIOS: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "data": (2, False, {}),
    "sequence": (2, False, {"sequence_parallel": 2}),
    "mixture": (2, True, {}),
    "experts": (2, True, {"expert_parallel": 2}),
    "copies": (4, False, {"shard_size": 2}),
    "sequences": (4, False, {"sequence_parallel": 2, "shard_size": 1}),
    "experts of sequences": (4, True, {"sequence_parallel": 2, "expert_parallel": 2}),
}
#: Scenarios that go on from the checkpoint of ``experts``.
RESUMED: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "without experts": (2, True, {}),
    "more experts": (4, True, {"expert_parallel": 4}),
}
EVERY = {**SCENARIOS, **RESUMED}
IN_CI = {"sequence", "experts", "without experts"}  #: the others are nightly


def names(scenarios: dict[str, tuple[int, bool, dict[str, Any]]]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.nightly) for name in scenarios]


def folder(mixture: bool) -> Path:
    return support.mixture_folder() if mixture else support.model_folder(tied=False)


class Played:
    """What the ranks of a scenario saw."""

    def __init__(self, out: Path, name: str, world: int) -> None:
        self.facts = [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(world)]
        self.files = [load_file(out / f"{name}-{rank}.safetensors") for rank in range(world)]
        outputs = [fact for fact in self.facts if fact["is_output_rank"]]
        self.losses = [sum(fact["losses"][step] for fact in outputs) for step in range(STEPS)]

    def tensors(self, rank: int, kind: str) -> dict[str, torch.Tensor]:
        found = self.files[rank]
        return {name.removeprefix(f"{kind}:"): each for name, each in found.items() if name.startswith(f"{kind}:")}


Play = Callable[[str], Played]


@pytest.fixture(scope="module")
def played(launch: Callable[[list[dict[str, Any]], float], Path]) -> Play:
    """What a scenario's ranks saw; the first one launches all of CI, or all that are nightly."""

    @functools.cache
    def launched(in_ci: bool) -> Path:
        scenarios = []
        for name, (world, mixture, config) in EVERY.items():
            if in_ci == (name in IN_CI):
                scenario = {"name": name, "world": world, "model": str(folder(mixture)), "config": config}
                if name in RESUMED:
                    scenario["load"] = str(launched(True) / "experts") if not in_ci else "experts"
                if name == "sequence":
                    scenario["on_nonfinite"] = "stop"
                scenarios.append({**scenario, "save": name == "experts"})
        return launch(scenarios, SECONDS)

    @functools.cache
    def play(name: str) -> Played:
        return Played(launched(name in IN_CI), name, EVERY[name][0])

    return play


@pytest.fixture(scope="module")
def with_fsdp() -> Callable[[bool], tuple[list[float], dict[str, torch.Tensor]]]:
    """The losses and weights of three steps of the engine fsdp on one rank."""

    @functools.cache
    def train(mixture: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = ModelSpec(path=str(folder(mixture)))
        engine = FSDPEngine(Config(), EngineContext(role="actor", model=model, optimizer=support.OPTIMIZER))
        engine.initialize()
        losses = []
        for _ in range(STEPS):
            output, _norm = support.train(engine, loss=support.Loss(0.1))
            assert output.loss is not None
            losses.append(output.loss)
        weights = support.weights(engine)
        engine.close()
        return losses, weights

    return train


@pytest.mark.parametrize("name", names(SCENARIOS))
def test_gradients_and_log_probs_are_those_of_float64(played: Play, name: str) -> None:
    """On every rank, whatever shares rows, tokens and experts."""
    world, mixture, _ = SCENARIOS[name]
    wanted, found = support.expected(folder(mixture), entropy=0.1), played(name)
    assert wanted.loss == pytest.approx(found.losses[0], rel=1e-5)
    rows: dict[int, torch.Tensor] = {}
    for rank in range(world):
        support.assert_close(wanted.gradients, found.tensors(rank, "gradient"), 1e-4, f"gradients of rank {rank}")
        rows |= {int(row): each for row, each in found.tensors(rank, "log_probs").items()}
    support.assert_tokens(wanted.log_probs, [rows[row] for row in range(len(rows))], 1e-4, "log-probabilities")


@pytest.mark.parametrize("name", names(SCENARIOS))
def test_losses_and_weights_are_those_of_fsdp(
    played: Play, with_fsdp: Callable[[bool], tuple[list[float], dict[str, torch.Tensor]]], name: str
) -> None:
    """Three steps of one batch: within 1e-4 of the engine fsdp's on one rank, in its own environment."""
    world, mixture, _ = SCENARIOS[name]
    losses, weights = with_fsdp(mixture)
    assert [pytest.approx(loss, rel=1e-4) for loss in losses] == played(name).losses
    for rank in range(world):
        support.assert_close(weights, played(name).tensors(rank, "weight"), 1e-3, f"weights of rank {rank}")


@pytest.mark.parametrize("name", names(SCENARIOS))
def test_ranks_of_a_sequence_have_the_same_rows(played: Play, name: str) -> None:
    """They are neighbours, and the first one's results count."""
    world, _, config = SCENARIOS[name]
    size, facts = config.get("sequence_parallel", 1), played(name).facts
    assert [[rank // size, world // size] for rank in range(world)] == [fact["layout"] for fact in facts]
    assert [rank % size == 0 for rank in range(world)] == [fact["is_output_rank"] for fact in facts]


@pytest.mark.parametrize("name", names(RESUMED))
def test_a_checkpoint_goes_on_with_other_sizes(played: Play, name: str) -> None:
    """Saved by two ranks that share experts after two steps: others go on with the third step."""
    assert played("experts").losses[2] == pytest.approx(played(name).losses[0], rel=1e-4)


def test_gradients_that_are_not_finite_stop_the_run(played: Play) -> None:
    """On each rank, with the samples."""
    assert [["engine.not-finite", "row 1"]] * 2 == [fact["stopped"] for fact in played("sequence").facts]
