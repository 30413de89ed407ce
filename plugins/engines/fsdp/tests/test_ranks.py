"""Two ranks over gloo against one: one launch plays all scenarios (``worker.main``), each test reads one of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from jackfield.abc.engine import LoadCheckpointRequest, LoraSpec, SaveCheckpointRequest
from jackfield.sdk.jagged import rows as unpack
from jackfield_commands import CommandServer
from jackfield_ranks import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

DEADLINE = 240.0  # seconds for both processes, imports included, on a busy machine

Rows = list[dict[str, list[Any]]]
Build = Callable[..., Any]


class Played:
    """What the two ranks saw."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.facts = [json.loads((out / f"result_{rank}.json").read_text()) for rank in (0, 1)]
        self._files = [safe_open(out / f"result_{rank}.safetensors", "pt") for rank in (0, 1)]

    def tensors(self, prefix: str, rank: int) -> dict[str, torch.Tensor]:
        """The tensors that a rank kept under ``prefix``."""
        file = self._files[rank]
        return {n.removeprefix(f"{prefix}:"): file.get_tensor(n) for n in file.keys() if n.startswith(f"{prefix}:")}  # noqa: SIM118


@pytest.fixture(scope="module")
def mixture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts in bfloat16 with tied embeddings."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
             "num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True}  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes))
    folder = tmp_path_factory.mktemp("mixture")
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def played(
    kit: ModuleType,
    model_folder: Path,
    mixture_folder: Path,
    rows: Rows,
    jackfield: CommandServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Played:
    """Launch two ranks, wait for both with a deadline, and end what is left of them."""
    out = tmp_path_factory.mktemp("ranks")
    engine = kit.make_engine(model_folder)
    kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
    engine.save_checkpoint(SaveCheckpointRequest(folder=str(out / "one")))
    engine.close()
    settings = {"rows": rows, "model": str(model_folder), "one": str(out / "one"), "mixture": str(mixture_folder)}
    run_ranks(jackfield, Path(__file__).with_name("worker.py"), out, 2, settings, DEADLINE)
    return Played(out)


@pytest.fixture(scope="module")
def alone(kit: ModuleType, model_folder: Path, rows: Rows) -> dict[str, Any]:
    """The same two steps on one rank."""
    engine = kit.make_engine(model_folder)
    batch, loss = kit.make_batch(rows), kit.PolicyLoss(rows)
    gradients = kit.gradients(engine, batch, loss)
    output, norm = kit.train(engine, batch, loss, steps=2)
    result = {"grad": gradients, "weight": kit.weights(engine), "output": output, "norm": norm}
    engine.close()
    return result


def near(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert sorted(expected) == sorted(actual)
    for name, tensor in expected.items():
        error = float((tensor - actual[name]).norm() / tensor.norm().clamp_min(1e-30))
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("scenario", ["even", "uneven", "empty"])
def test_gradients_and_steps_of_two_ranks_are_those_of_one(
    played: Played, alone: dict[str, Any], scenario: str
) -> None:
    """Rows 4 + 4, 7 + 1 and 8 + 0, so one rank has up to five more micro-batches than the other (or all of them)."""
    for rank in (0, 1):
        near(alone["grad"], played.tensors(f"{scenario}/grad", rank))
        near(alone["weight"], played.tensors(f"{scenario}/weight", rank), 1e-4)
        assert alone["norm"] == pytest.approx(played.facts[rank][scenario]["norm"], rel=1e-4)
    for key in ("loss", "tokens"):
        expected = alone["output"].loss if key == "loss" else alone["output"].metrics[key]
        shares = [played.facts[rank][scenario][key] for rank in (0, 1)]
        assert expected == pytest.approx(sum(shares), rel=1e-4)


@pytest.mark.parametrize(("scenario", "split"), [("even", 4), ("uneven", 7), ("empty", 8)])
def test_each_rank_returns_its_own_rows_in_order(
    played: Played, alone: dict[str, Any], scenario: str, split: int
) -> None:
    """The log-probabilities of the second step, rank after rank."""
    expected = unpack(alone["output"].log_probs)
    for rank, share in enumerate((expected[:split], expected[split:])):
        actual = played.tensors(scenario, rank)["log_probs"]
        torch.testing.assert_close(torch.cat([*share, torch.zeros(0)]), actual, rtol=0, atol=1e-4)


def test_every_parameter_is_really_sharded(played: Played) -> None:
    """No rank holds more than its half (rounded up) of any parameter."""
    first, second = (played.facts[rank]["even"]["shapes"] for rank in (0, 1))
    for (name, one, whole), (_, other, _) in zip(first, second, strict=True):
        assert whole[0] == one[0] + other[0], name
        assert one[0] <= (whole[0] + 1) // 2, name


def test_one_rank_reads_what_two_wrote(
    kit: ModuleType, played: Played, build: Build, rows: Rows, tmp_path: Path
) -> None:
    """Weights bit for bit, moments and schedule: the next step is the two ranks' next step."""
    assert {"engine.json", "random_0.json", "random_1.json"} < set(played.facts[0]["native_files"])
    engine = build()
    engine.load_checkpoint(LoadCheckpointRequest(folder=str(played.out / "two")))
    published, expected = kit.weights(engine), played.tensors("even/weight", 0)
    assert all(torch.equal(expected[name], published[name]) for name in expected)
    kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
    near(played.tensors("after", 0), kit.weights(engine), 1e-4)


def test_two_ranks_read_what_one_or_two_wrote(kit: ModuleType, played: Played, build: Build) -> None:
    """One rank's weights bit for bit; and save, load, step on two ranks is bitwise step."""
    engine = build()
    engine.load_checkpoint(LoadCheckpointRequest(folder=str(played.out / "one")))
    expected = kit.weights(engine)
    for rank in (0, 1):
        loaded = played.tensors("loaded", rank)
        assert all(torch.equal(expected[name], loaded[name]) for name in expected)
        after, resumed = played.tensors("after", rank), played.tensors("resumed", rank)
        assert all(torch.equal(after[name], resumed[name]) for name in after)


def test_hugging_face_folder_of_two_ranks(kit: ModuleType, played: Played, build: Build) -> None:
    """Written once, whole."""
    published, expected = kit.weights(build(folder=played.out / "two_hf")), played.tensors("even/weight", 0)
    assert all(torch.equal(expected[name], published[name]) for name in expected)


def test_critic_and_adapter_on_two_ranks(kit: ModuleType, played: Played, build: Build, rows: Rows) -> None:
    """The value head takes part in the reduction, the adapter is the same as on one rank."""
    batch, loss = kit.make_batch(rows), kit.PolicyLoss(rows)
    near(kit.gradients(build(role="critic", value_head=True), batch, loss), played.tensors("critic/grad", 1))
    adapter = build(lora=LoraSpec(rank=2))
    kit.train(adapter, batch, loss, steps=2)
    near(kit.weights(adapter), played.tensors("adapter", 1), 1e-3)


def test_two_ranks_publish_a_mixture_as_its_checkpoint(
    kit: ModuleType, played: Played, build: Build, rows: Rows, mixture_folder: Path
) -> None:
    """Experts one by one, tied embeddings once, bfloat16 of masters in float32: what is loaded is published bit for
    bit; after a step it is what one rank publishes, up to rounding, and what the folder holds."""
    disk = load_file(mixture_folder / "model.safetensors")
    engine = build(folder=mixture_folder, dtype="bfloat16")
    first = kit.weights(engine)
    kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
    alone = kit.weights(engine)
    for rank in (0, 1):
        same(disk, played.tensors("mixture/first", rank))
        same(load_file(played.out / "mixture" / "model.safetensors"), played.tensors("mixture", rank))
        near(alone, played.tensors("mixture", rank), 0.1)  # AdamW follows signs: a step is half of a weight
    same(disk, first)
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in disk
    assert "lm_head.weight" not in disk
    assert not torch.equal(disk["model.embed_tokens.weight"], alone["model.embed_tokens.weight"])


def same(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> None:
    """Names, shapes, dtypes and bits."""
    assert sorted(expected) == sorted(actual)
    for name, tensor in expected.items():
        assert (tensor.dtype, tensor.shape) == (actual[name].dtype, actual[name].shape), name
        assert torch.equal(tensor, actual[name]), name
