"""Copies, sequence and tensor parallelism on 2 and 4 ranks over gloo, beside one rank and a float64 reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from jackfield.abc.engine import LoadCheckpointRequest, LoraSpec, SaveCheckpointRequest
from jackfield.errors import EngineError
from jackfield.sdk.jagged import rows as unpack
from jackfield_commands import CommandServer
from jackfield_engine_fsdp.config import Config
from jackfield_ranks import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]

DEADLINE = 300.0  # seconds for all processes, imports included, on a busy machine
_MEMORY = {"activation_offload": True, "reshard_after_forward": True}
_BFLOAT16 = {"mixed_precision": "bfloat16"}
_CHECKPOINTED = {"gradient_checkpointing": True}
_PIECES = {"logits_chunk": 183}  # three tokens of 61 words

#: by ranks and name: settings of the engine and of the model
SCENARIOS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "sequence": {"config": {"sequence_parallel": 2, "wrap": "layers"} | _MEMORY | _PIECES, "one": True},
        "tensor": {"config": {"tensor_parallel": 2} | _PIECES, "model": _CHECKPOINTED, "one": True},
        "adapter": {"config": {"tensor_parallel": 2}, "model": {"lora": {"rank": 2}}},
        "dora": {"config": {"sequence_parallel": 2}, "model": {"lora": {"rank": 2, "use_dora": True}}},
        "compiled": {"config": {"compile": "aot_eager", "wrap": "layers"} | _PIECES},
        "compiled sequence": {"config": {"compile": "aot_eager", "sequence_parallel": 2}},
        "experts": {"config": {"tensor_parallel": 2}, "folder": "mixture"},
        "window": {"config": {"sequence_parallel": 2}, "folder": "window"},
        "critic": {"config": {"sequence_parallel": 2}, "model": {"role": "critic", "value_head": True}},
    },
    4: {
        "tensor": {"config": {"tensor_parallel": 2, "shard_size": 2} | _MEMORY, "save": True},
        "copies": {"config": {"shard_size": 2, "wrap": "layers", "gradient_accumulation": "sharded"}, "load": True},
        "sequence": {"config": {"sequence_parallel": 4, "wrap": "layers", "reshard_size": 2}, "model": _CHECKPOINTED},
        "both": {"config": {"sequence_parallel": 2, "tensor_parallel": 2, "shard_size": 1}, "load": True},
        "bfloat16": {"config": {"sequence_parallel": 2, "tensor_parallel": 2} | _BFLOAT16 | _MEMORY},
    },
}
CASES = [(world, name) for world, scenarios in SCENARIOS.items() for name in scenarios]

Rows = list[dict[str, list[Any]]]
Build = Callable[..., Any]


class Played:
    """What the ranks saw."""

    def __init__(self, out: Path, world: int) -> None:
        self.out, self.world = out, world
        self.facts = [json.loads((out / f"result_{rank}.json").read_text()) for rank in range(world)]
        self._files = [safe_open(out / f"result_{rank}.safetensors", "pt") for rank in range(world)]

    def tensors(self, prefix: str, rank: int = 0) -> dict[str, torch.Tensor]:
        """The tensors that a rank kept under ``prefix``."""
        file = self._files[rank]
        return {n.removeprefix(f"{prefix}:"): file.get_tensor(n) for n in file.keys() if n.startswith(f"{prefix}:")}  # noqa: SIM118


def save_random(folder: Path, kind: str, **changes: Any) -> Path:
    """A random model of another architecture than the other tests have."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **changes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_folders(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Qwen3, a mixture of experts, and a Mistral with a sliding window shorter than the rows."""
    base = tmp_path_factory.mktemp("models")
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    return {
        "tiny": model_folder,
        "mixture": save_random(base / "mixture", "qwen3_moe", **experts),
        "window": save_random(base / "window", "mistral", sliding_window=4),
    }


@pytest.fixture(scope="module")
def grids(
    kit: ModuleType,
    model_folders: dict[str, Path],
    rows: Rows,
    jackfield: CommandServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int], Played]:
    """``grids(ranks)``: all scenarios of so many ranks, played once, and ended at the deadline."""
    found: dict[int, Played | None] = {}

    def play(world: int) -> Played:
        if world in found:
            played = found[world]
            assert played is not None, "the ranks have failed in an earlier test"
            return played
        found[world] = None
        out = tmp_path_factory.mktemp(f"grid{world}")
        engine = kit.make_engine(model_folders["tiny"])
        kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(out / "one")))
        engine.close()
        folders = {name: str(folder) for name, folder in model_folders.items()}
        settings = {"rows": rows, "folders": folders, "one": str(out / "one"), "scenarios": SCENARIOS[world]}
        run_ranks(jackfield, Path(__file__).with_name("grid_worker.py"), out, world, settings, DEADLINE)
        found[world] = played = Played(out, world)
        return played

    return play


@pytest.fixture(scope="module")
def alone(kit: ModuleType, model_folders: dict[str, Path], rows: Rows) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """``alone(scenario)``: the same rows and model on one rank, in float32."""
    found: dict[str, dict[str, Any]] = {}

    def run(scenario: dict[str, Any]) -> dict[str, Any]:
        model = {name: value for name, value in scenario.get("model", {}).items() if name != "gradient_checkpointing"}
        key = json.dumps([scenario.get("folder", "tiny"), model])
        if key not in found:
            if "lora" in model:
                model["lora"] = LoraSpec(**model["lora"])
            engine = kit.make_engine(model_folders[scenario.get("folder", "tiny")], **model)
            critic = engine.context.role == "critic"
            batch, loss = kit.make_batch(rows), kit.PolicyLoss(rows, entropy=0.0 if critic else 0.01)
            result = {"first": kit.weights(engine), "grad": kit.gradients(engine, batch, loss)}
            output, norm = kit.train(engine, batch, loss, steps=2)
            with engine.eval_mode():
                after = engine.forward_backward_batch(batch, None, forward_only=True)
            results = unpack(after.values if critic else after.log_probs)
            result |= {"weight": kit.weights(engine), "norm": norm, "loss": output.loss, "results": results}
            engine.close()
            found[key] = result
        return found[key]

    return run


def near(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor], tolerance: float) -> None:
    assert sorted(expected) == sorted(actual)
    for name, tensor in expected.items():
        error = float((tensor.double() - actual[name].double()).norm() / tensor.double().norm().clamp_min(1e-30))
        assert error < tolerance, (name, error)


def same(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> None:
    assert sorted(expected) == sorted(actual)
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name


@pytest.mark.parametrize(("world", "name"), CASES)
def test_ranks_in_a_grid_train_as_one(
    grids: Callable[[int], Played], alone: Callable[..., Any], world: int, name: str
) -> None:
    """Published weights bit for bit; then gradients, their norm, two steps and log-probs of each rank's rows."""
    played, scenario = grids(world), SCENARIOS[world][name]
    expected, rough = alone(scenario), scenario["config"].get("mixed_precision") == "bfloat16"
    shares: dict[int, float] = {}
    for rank in range(world):
        facts = played.facts[rank][name]
        index, size, gives_output = facts["layout"]
        same(expected["first"], played.tensors(f"{name}/first", rank))
        near(expected["grad"], played.tensors(f"{name}/grad", rank), 0.05 if rough else 2e-5)
        near(expected["weight"], played.tensors(f"{name}/weight", rank), 0.1 if rough else 2e-3)
        assert expected["norm"] == pytest.approx(facts["norm"], rel=0.1 if rough else 1e-3)
        tokens = torch.cat([*expected["results"][index::size], torch.zeros(0)])
        actual = played.tensors(f"{name}/results", rank)[""]
        torch.testing.assert_close(tokens, actual, rtol=0, atol=0.3 if rough else 2e-3)
        if gives_output:
            assert index not in shares
            shares[index] = facts["loss"]
    assert sorted(shares) == list(range(size))
    assert expected["loss"] == pytest.approx(sum(shares.values()), rel=0.1 if rough else 1e-3, abs=1e-3)


@pytest.mark.parametrize(("world", "name"), [(2, "sequence"), (2, "tensor"), (4, "copies"), (4, "both")])
def test_gradients_equal_a_reference_in_float64(
    kit: ModuleType, reference: ModuleType, grids: Callable[[int], Played], model_folder: Path, rows: Rows,
    world: int, name: str,
) -> None:  # fmt: skip
    """It shares no code with the engine."""
    _, expected = reference.loss_and_gradients(reference.parameters(model_folder), rows, entropy=0.01)
    actual = grids(world).tensors(f"{name}/grad", world - 1)
    assert sorted(expected) == sorted(actual)
    for key, gradient in expected.items():
        assert reference.relative_error(gradient, actual[key]) < 2e-5, key


@pytest.mark.parametrize(("world", "name"), [(2, "tensor"), (2, "experts"), (4, "tensor"), (4, "copies"), (4, "both")])
def test_boxes_of_all_ranks_are_the_published_weights(grids: Callable[[int], Played], world: int, name: str) -> None:
    """What ranks have without gathering, put together; nothing for stacked experts."""
    played = grids(world)
    published, covered = played.tensors(f"{name}/weight"), dict[str, torch.Tensor]()
    if name == "experts":
        assert [] == played.facts[0][name]["boxes"]
        return
    for rank in range(world):
        values = played.tensors(f"{name}/box", rank)
        for key, shape, start, length in played.facts[rank][name]["boxes"]:
            whole = covered.setdefault(key, torch.full(shape, torch.nan))
            whole[tuple(slice(at, at + size) for at, size in zip(start, length, strict=True))] = values[key]
    same(published, covered)


def test_each_rank_has_its_part_only(grids: Callable[[int], Played], alone: Callable[..., Any]) -> None:
    """Copies have half of the model on each of 4 ranks, tensor-parallel ranks a quarter."""
    played = grids(4)
    whole = sum(tensor.numel() for tensor in alone({})["weight"].values())
    for name, share in (("tensor", 1 / 4), ("copies", 1 / 2), ("sequence", 1 / 4), ("both", 1 / 2)):
        for rank in range(4):
            assert whole * share == pytest.approx(played.facts[rank][name]["elements"], rel=0.1), name


def test_checkpoints_move_between_grids(
    kit: ModuleType, grids: Callable[[int], Played], build: Build, rows: Rows
) -> None:
    """Written by 2 x 2 tensor-parallel ranks: read bit for bit by copies, by sequence x tensor and by one rank, whose
    next step is the same; and one rank's checkpoint by 2 ranks."""
    played = grids(4)
    saved = played.tensors("tensor/weight")
    for name in ("copies", "both"):
        same(saved, played.tensors(f"{name}/loaded", 3))
        near(played.tensors("tensor/after"), played.tensors(f"{name}/after", 3), 2e-3)
    engine = build()
    engine.load_checkpoint(LoadCheckpointRequest(folder=str(played.out / "native")))
    same(saved, kit.weights(engine))
    kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows, entropy=0.01))
    near(played.tensors("tensor/after"), kit.weights(engine), 2e-3)
    same(saved, kit.weights(build(folder=played.out / "hugging_face")))
    two = grids(2)
    engine.load_checkpoint(LoadCheckpointRequest(folder=str(two.out / "one")))
    for name in ("sequence", "tensor"):
        same(kit.weights(engine), two.tensors(f"{name}/one", 1))


@pytest.mark.parametrize(
    ("world", "settings", "where"),
    [
        (3, {"sequence_parallel": 2}, "engine.sequence_parallel"),
        (2, {"sequence_parallel": 2, "tensor_parallel": 2}, "engine.tensor_parallel"),
        (4, {"tensor_parallel": 3}, "engine.tensor_parallel"),
        (4, {"tensor_parallel": 2, "shard_size": 4}, "engine.shard_size"),
        (6, {"shard_size": 4}, "engine.shard_size"),
        (4, {"shard_size": 2, "reshard_size": 2}, "engine.reshard_size"),
        (6, {"reshard_size": 4}, "engine.reshard_size"),
    ],
    ids=str,
)
def test_sizes_that_do_not_divide_are_refused(world: int, settings: dict[str, int], where: str) -> None:
    """With the setting to change, before anything is loaded."""
    with pytest.raises(EngineError) as caught:
        Config(**settings).sizes(world)
    assert ("config.invalid-value", where) == (caught.value.code, caught.value.where)
