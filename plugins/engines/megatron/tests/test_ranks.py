"""One, two and four ranks over gloo, in each kind of parallelism.

Their numbers are those of the float64 reference of ``jackfield parity``, and of the engine fsdp on one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from jackfield.abc.engine import OptimizerSpec
from jackfield_conformance.registry import Subject
from jackfield_conformance.support import engine as support
from jackfield_engine_fsdp.config import Config
from jackfield_engine_fsdp.engine import FSDPEngine
from jackfield_parity.oracle import Oracle, Report, Request

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(560)]

OPTIMIZER = OptimizerSpec(lr=1e-2, weight_decay=0.1, eps=1e-4)  # worker.OPTIMIZER
SIZES: dict[str, Any] = {
    "vocab_size": support.VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": support.make_rows()[0].response_ids[0],  # a token like any other, but its embedding
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 8, "num_hidden_layers": 8},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "head_dim": 8, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 12, "num_hidden_layers": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "num_hidden_layers": 2},
}

TENSOR, PIPELINE = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
VIRTUAL = {**PIPELINE, "virtual_pipeline_stages": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}

#: Engines of ``jackfield parity``, on a model with layers of both kinds
PARITY = (
    "recompute=selective,logits_chunk=200",
    "tensor_parallel=2,sequence_parallel=true,logits_chunk=200@2",
    "pipeline_parallel=2@2",
    "pipeline_parallel=2,virtual_pipeline_stages=2,recompute=full@2",
    "context_parallel=2@2",
    "expert_parallel=2@2",
    "model.dtype=bfloat16,expert_parallel=2,distributed_optimizer=true@2",
)


def make_model(root: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """A tiny model whose weights all have an effect."""
    folder = root / f"{name}-{str(dtype).removeprefix('torch.')}"
    generator = torch.Generator().manual_seed(29)
    with torch.random.fork_rng(devices=[]), support.without_progress_bars():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SIZES, **MODELS[name]}))
        with torch.no_grad():
            for parameter in model.parameters():
                offset = 1.0 if parameter.ndim == 1 else 0.0
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + offset)
        model.to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folders, by name; one is in bfloat16."""
    root = tmp_path_factory.mktemp("models")
    found = {name: str(make_model(root, name)) for name in MODELS}
    return {**found, "bfloat16": str(make_model(root, "qwen3_moe", torch.bfloat16))}


@pytest.fixture(scope="module")
def expected(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """``expected(name)``: a folder with what the engine fsdp does on one process with that model."""
    made: dict[str, str] = {}

    def make(name: str) -> str:
        if name not in made:
            made[name] = str(tmp_path_factory.mktemp(f"expected-{name}"))
            play_fsdp(Path(models[name]), Path(made[name]))
        return made[name]

    return make


def play_fsdp(model: Path, folder: Path) -> None:
    """Three steps; gradients, weights and log-probabilities of the first, losses and norms of all."""
    more: dict[str, Any] = {"config": Config(), "config_class": Config, "folder": folder}
    subject = Subject(kind="engine", name="fsdp", cls=FSDPEngine, **more)
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, list[float]] = {"loss": [], "norm": []}
    with support.opened(subject, model, optimizer=attrs.evolve(OPTIMIZER)) as engine:
        for step in range(3):
            with engine.train_mode():
                engine.optimizer_zero_grad()
                output = engine.forward_backward_batch(support.batch(), support.Loss(entropy=0.1))
                gradients = support.held_gradients(engine)
                numbers["norm"].append(engine.optimizer_step())
                engine.lr_scheduler_step()
            assert output.loss is not None
            assert output.log_probs is not None
            numbers["loss"].append(output.loss)
            if step == 0:
                tensors |= {f"gradient:{name}": tensor for name, tensor in gradients.items()}
                tensors |= {f"weight:{name}": tensor for name, tensor in support.weights(engine).items()}
                tensors |= {f"log_probs:{row}": one.clone() for row, one in enumerate(output.log_probs.unbind())}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "expected.safetensors")
    (folder / "expected.json").write_text(json.dumps(numbers))


@pytest.fixture
def job(models: dict[str, str], expected: Callable[[str], str]) -> Callable[..., dict[str, Any]]:
    """``job(settings, *names, trips=())``: train these models as fsdp does, and load and write those bit for bit."""

    def make(settings: dict[str, Any], *names: str, trips: tuple[str, ...] = ()) -> dict[str, Any]:
        tasks = [["same_as", models[name], expected(name)] for name in names]
        return {"settings": settings, "tasks": tasks + [["round_trip", models[name]] for name in trips]}

    return make


def label(settings: str) -> str:
    """An engine as ``jackfield parity`` names it, with micro-batches of different shapes."""
    preload = Path(__file__).parent / "interpreter" / "sitecustomize.py"
    return f"megatron:env.preload={preload},cluster.micro_batch_tokens=24,{settings}"


@pytest.fixture(scope="module")
def report(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report on all engines of :data:`PARITY`, with all parts of the loss."""
    loss = ("aggregation=seq-mean-token-mean", "kl_coefficient=0.1", "entropy_coefficient=0.05", "clip_dual=1.5")
    request = Request(engines=tuple(map(label, PARITY)), model=models["qwen3_moe"], loss=loss, with_trl=False)
    return Oracle(request, tmp_path_factory.mktemp("parity")).run()


@pytest.mark.parametrize("settings", PARITY)
def test_an_engine_equals_the_reference(report: Report, settings: str) -> None:
    """Published weights, log-probabilities, loss, norm, gradients by name, and parameters after three steps."""
    assert {} == report.errors
    own = {line.measure: line for line in report.lines if line.subject == label(settings)}
    wanted = {"weights", "log_probs", "log_probs (training)", "loss", "grad_norm", "gradients", "parameters"}
    assert wanted == own.keys()
    assert [] == [line for line in own.values() if not line.ok]


@pytest.mark.nightly
def test_one_rank(job: Callable[..., dict[str, Any]], play: Callable[..., None], tmp_path: Path) -> None:
    """Names and bits of each family, and its training."""
    names = tuple(MODELS)
    optimizer = {"distributed_optimizer": True, "recompute": "full"}
    play(tmp_path, 1, [job({}, *names, trips=(*names, "bfloat16")), job(optimizer, "qwen3_moe")])


def test_two_ranks(job: Callable[..., dict[str, Any]], play: Callable[..., None], tmp_path: Path) -> None:
    """The least that each change is tested with: tensor parallelism, and virtual stages with tied embeddings."""
    play(tmp_path, 2, [job(TENSOR, "qwen2", trips=("qwen2",)), job(VIRTUAL, "qwen2", trips=("qwen2",))])


@pytest.mark.nightly
def test_two_ranks_of_dense_models(
    job: Callable[..., dict[str, Any]], play: Callable[..., None], tmp_path: Path
) -> None:
    """Tensor and pipeline parallelism."""
    trips = ("llama", "qwen2", "qwen3")
    jobs = [
        job(TENSOR, "qwen2", "qwen3", trips=trips),
        job(PIPELINE, "llama", "qwen2", trips=trips),
        job(VIRTUAL, "llama", trips=trips),
    ]
    play(tmp_path, 2, jobs)


@pytest.mark.nightly
def test_two_ranks_of_experts(job: Callable[..., dict[str, Any]], play: Callable[..., None], tmp_path: Path) -> None:
    """Expert parallelism, and experts under the other kinds."""
    jobs = [
        job({"expert_parallel": 2}, "qwen3_moe", "mixtral", trips=("qwen2_moe", "mixtral", "bfloat16")),
        job(PIPELINE, "qwen3_moe", trips=("qwen2_moe", "bfloat16")),
        job(VIRTUAL, "qwen3_moe", trips=("qwen3_moe",)),
        job(SEQUENCE, "qwen2_moe", trips=("qwen3_moe", "mixtral")),
    ]
    play(tmp_path, 2, jobs)


@pytest.mark.nightly
def test_two_ranks_in_other_ways(job: Callable[..., dict[str, Any]], play: Callable[..., None], tmp_path: Path) -> None:
    """Sequence and context parallelism, and the distributed optimizer."""
    jobs = [
        job(SEQUENCE, "llama"),
        job({"context_parallel": 2}, "qwen3"),
        job({"distributed_optimizer": True, "recompute": "selective"}, "qwen3"),
        job({"distributed_optimizer": True, "expert_parallel": 2}, "qwen3_moe"),
    ]
    play(tmp_path, 2, jobs)


@pytest.mark.nightly
def test_four_ranks(job: Callable[..., dict[str, Any]], play: Callable[..., None], tmp_path: Path) -> None:
    """Two kinds of parallelism at once, and four stages."""
    jobs = [
        job({**TENSOR, **PIPELINE}, "qwen2"),
        job({**SEQUENCE, **VIRTUAL}, "qwen3"),
        job({**VIRTUAL, "pipeline_parallel": 4}, "qwen3"),
        job({**SEQUENCE, "expert_parallel": 2, "distributed_optimizer": True}, "qwen3_moe"),
    ]
    play(tmp_path, 4, jobs)
