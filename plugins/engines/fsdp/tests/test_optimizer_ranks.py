"""Optimizers on two ranks over gloo, beside one rank: one launch (``optimizer_worker.main``), several tests."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file

from jackfield.abc.engine import LoadCheckpointRequest, LoraSpec, OptimizerSpec, SaveCheckpointRequest
from jackfield_commands import CommandServer
from jackfield_ranks import run_ranks
from jackfield_testing import TOOLS, TORCHAO

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

#: Muon's iterations round to bfloat16; a matrix that is updated in two halves differs by 1e-2
TOLERANCES = {"muon": 3e-3}
DEADLINE = 240.0  # seconds for both processes, imports included, on a busy machine
SPEC: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "ema_decay": 0.5}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adafactor": {**SPEC, "name": "adafactor"},
    "muon": {**SPEC, "name": "muon", "lr_factors": {"q_proj": 0.5}, "no_decay": ["norms"]},
    "sgd": {**SPEC, "name": "sgd", "options": {"momentum": 0.9}},
}
if TOOLS["torchao"]():
    OPTIMIZERS["adamw_8bit"] = {**SPEC, "name": "adamw_8bit", "options": {"block_size": 64}}


@attrs.frozen
class Played:
    """What one rank and two ranks saw."""

    out: Path
    alone: dict[str, torch.Tensor]
    tensors: list[dict[str, torch.Tensor]]
    facts: list[dict[str, Any]]

    def near(self, prefix: str, tolerance: float) -> None:
        """Require that both ranks have what one rank has."""
        for tensors in self.tensors:
            names = {name for name in tensors if name.startswith(f"{prefix}:")}
            assert names
            assert names == {name for name in self.alone if name.startswith(f"{prefix}:")}
            for name in names:
                one, two = self.alone[name], tensors[name]
                assert float((one - two).norm() / one.norm()) < tolerance, name


@pytest.fixture(scope="module")
def played(
    kit: ModuleType, wide_folder: Path, rows: Any, jackfield: CommandServer, tmp_path_factory: pytest.TempPathFactory
) -> Played:
    """Run all of it on one rank, then launch two, and wait for both with a deadline."""
    out = tmp_path_factory.mktemp("ranks")
    batch, loss, alone = kit.make_batch(rows), kit.PolicyLoss(rows), dict[str, torch.Tensor]()

    def keep(prefix: str, engine: Any) -> None:
        alone.update({f"{prefix}:{name}": tensor.clone() for name, tensor in kit.weights(engine).items()})

    for name, options in OPTIMIZERS.items():
        engine = kit.make_engine(wide_folder, optimizer=OptimizerSpec(**options))
        kit.train(engine, batch, loss, steps=2)
        keep(name, engine)
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(out / "one" / name)))
        kit.train(engine, batch, loss)
        keep(f"{name}/resumed", engine)
        engine.close()
    lora = LoraSpec(rank=2, publish="merged", use_dora=True)
    engine = kit.make_engine(wide_folder, optimizer=OptimizerSpec(lr=1e-2), lora=lora)
    kit.train(engine, batch, loss, steps=2)
    keep("merged", engine)
    engine.close()
    settings = {"rows": rows, "model": str(wide_folder), "one": str(out / "one"), "optimizers": OPTIMIZERS}
    settings["torchao"] = str(TORCHAO)
    run_ranks(jackfield, Path(__file__).with_name("optimizer_worker.py"), out, 2, settings, DEADLINE)
    tensors = [load_file(out / f"result_{rank}.safetensors") for rank in (0, 1)]
    return Played(out, alone, tensors, [json.loads((out / f"result_{rank}.json").read_text()) for rank in (0, 1)])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_step_like_one(played: Played, name: str) -> None:
    """Matrices are updated as a whole, however they are sharded."""
    played.near(name, TOLERANCES.get(name, 2e-4))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_resume_to_the_bit(played: Played, name: str) -> None:
    """A step after a save in the background and a load is the step without them."""
    assert [True, True] == [facts[name] for facts in played.facts]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_go_on_from_one(played: Played, name: str) -> None:
    """The state of one rank is loaded by two."""
    played.near(f"{name}/resumed", TOLERANCES.get(name, 2e-4))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_rank_goes_on_from_two(kit: ModuleType, played: Played, wide_folder: Path, rows: Any, name: str) -> None:
    """The state of two ranks is loaded by one, with its average."""
    engine = kit.make_engine(wide_folder, optimizer=OptimizerSpec(**OPTIMIZERS[name]), seed=8)
    engine.load_checkpoint(LoadCheckpointRequest(folder=str(played.out / name)))
    kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
    for key, tensor in kit.weights(engine).items():
        one = played.alone[f"{name}/resumed:{key}"]
        assert float((one - tensor).norm() / one.norm()) < TOLERANCES.get(name, 2e-4), key
    engine.close()


def test_two_ranks_publish_merged_weights(played: Played) -> None:
    """Whole weights with a DoRA adapter merged, as one rank has them."""
    played.near("merged", 2e-4)


def test_every_rank_names_the_samples_of_all(played: Played) -> None:
    """The NaN is on rank 1; both ranks stop, and name its sample."""
    expected = ["engine.not-finite", "sample 11"]
    assert [expected, expected] == [facts["not finite"] for facts in played.facts]
