"""Weights are published, saved and loaded under the names of the checkpoint on disk, whatever the architecture.

For each architecture: an engine loads a tiny random model and must publish exactly the tensors of its safetensors file;
the folder that it writes must hold them, too; its log-probabilities are the library's; and a rollout server that holds
*other* random weights must load them by these names, acknowledge them, and then answer with the log-probabilities of
the first model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.abc.engine import EngineContext, ModelSpec, SaveCheckpointRequest
from jackfield.abc.rollout import GenerateRequest, RolloutContext, SamplingParams, ServerInfo
from jackfield.clock import Clock
from jackfield.errors import EngineError, JackfieldError
from jackfield.plugins import Registry, discover
from jackfield.sdk.buckets import digest
from jackfield.sdk.jagged import jagged
from jackfield.weights import Replica, WeightSender, WeightSynchronizer
from jackfield_architectures import ARCHITECTURES, NOT_SERVED, REFUSED, save_model

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.needs("module:jackfield_engine_fsdp"),
    pytest.mark.needs("module:jackfield_rollout_transformers"),
]

PROMPT = (5, 6, 7, 8)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return discover()


@contextmanager
def opened(registry: Registry, folder: Path, **model: Any) -> Iterator[Any]:
    """An engine without an optimizer."""
    context = EngineContext(role="actor", model=ModelSpec(path=str(folder), **model))
    engine: Any = registry.load("engine", "fsdp").build({}, context)
    engine.initialize()
    try:
        yield engine
    finally:
        engine.close()


async def served(registry: Registry, folder: Path, **model: Any) -> Any:
    """A started rollout server."""
    context = RolloutContext(model=ModelSpec(path=str(folder), **model), max_model_len=24)
    server: Any = registry.load("rollout", "transformers").build({}, context)
    await server.start()
    return server


async def synchronise(registry: Registry, engine: Any, server: Any, **settings: Any) -> WeightSynchronizer:
    """The engine's weights, as version 1."""
    loaded = registry.load("checkpoint_engine", "in_process")
    sender = loaded.build({}, CheckpointEngineContext(end="sender", deadline_seconds=60))
    block_bytes = 256 if settings.get("kind") == "delta" else 0
    synchronizer = WeightSynchronizer(
        [WeightSender(sender, lambda: engine.get_per_tensor_param(), block_bytes=block_bytes)],
        [Replica(server, ServerInfo(replica=server.context.replica))],
        "in_process",
        Clock(),
        deadline_seconds=60,
        **settings,
    )
    await synchronizer.sync(1)
    return synchronizer


def engine_log_probs(engine: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """Of an answer to the prompt, by the engine."""
    columns = {"prompt_ids": jagged([torch.tensor(PROMPT)]), "response_ids": jagged([torch.tensor(tokens)])}
    with engine.eval_mode():
        return engine.forward_backward_batch(TensorDict(columns, batch_size=[1]), None, forward_only=True).log_probs[0]


def log_probs(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """Of an answer to the prompt, by the library."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*PROMPT, *tokens]]), use_cache=False).logits
    return logits[0, len(PROMPT) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


async def load_into_another(registry: Registry, engine: Any, folder: Path, model: Any, disk: dict[str, Any]) -> bool:
    """Whether a server on ``folder`` starts; then it must take the engine's weights and answer as ``model`` does."""
    try:
        server = await served(registry, folder)
    except JackfieldError as error:
        if error.code != "engine.model":
            raise
        return False
    try:
        done = await synchronise(registry, engine, server)
        assert done.last is not None
        assert {name: digest(tensor) for name, tensor in disk.items()} == done.last.receipts[0].workers[0].digests
        sampling = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
        answer = await server.generate(GenerateRequest(request_id="a", prompt_ids=PROMPT, sampling=sampling))
    finally:
        await server.stop()
    expected = log_probs(model, answer.token_ids)
    torch.testing.assert_close(torch.tensor(answer.log_probs), expected, rtol=0, atol=2e-3)
    return True


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - REFUSED.keys()))
def test_weights_have_the_names_of_their_checkpoint(architecture: str, registry: Registry, tmp_path: Path) -> None:
    model = save_model(architecture, tmp_path / "one", seed=0)
    save_model(architecture, tmp_path / "other", seed=1)
    disk = load_file(tmp_path / "one" / "model.safetensors")
    with opened(registry, tmp_path / "one") as engine:
        published = dict(engine.get_per_tensor_param()[0])
        assert_same(disk, published)
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "saved"), format="huggingface"))
        assert_same(disk, load_file(tmp_path / "saved" / "model.safetensors"))
        answer = (9, 3, 17, 40, 2)
        torch.testing.assert_close(engine_log_probs(engine, answer), log_probs(model, answer), rtol=0, atol=2e-4)
        is_served = asyncio.run(load_into_another(registry, engine, tmp_path / "other", model, disk))
    assert is_served == (architecture not in NOT_SERVED)


@pytest.mark.parametrize("architecture", sorted(REFUSED))
def test_what_cannot_be_trained_is_refused_at_the_start(architecture: str, registry: Registry, tmp_path: Path) -> None:
    save_model(architecture, tmp_path)
    with pytest.raises(EngineError) as caught, opened(registry, tmp_path):
        pass
    assert "engine.model" == caught.value.code


def moved(engine: Any, scale: float) -> dict[str, torch.Tensor]:
    """What the engine publishes, some tensors of it changed: an expert and a norm."""
    tensors = dict(engine.get_per_tensor_param()[0])
    for name in ("model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.0.input_layernorm.weight"):
        tensors[name] = tensors[name] * scale
    return tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_changed_experts_travel_as_deltas(dtype: str, registry: Registry, tmp_path: Path) -> None:
    """A delta of one expert and one norm changes these and keeps the rest, proved by digests and log-probabilities,
    where the server holds what was sent, and where it holds it cast or rounded."""
    save_model("qwen3_moe", tmp_path / "one", seed=0)
    save_model("qwen3_moe", tmp_path / "other", seed=1)

    async def main() -> tuple[list[float], list[float]]:
        with opened(registry, tmp_path / "one") as engine:
            server = await served(registry, tmp_path / "other", dtype=dtype)
            fresh = await served(registry, tmp_path / "other", dtype=dtype)
            source = SimpleNamespace(get_per_tensor_param=engine.get_per_tensor_param)
            synchronizer = await synchronise(registry, source, server, kind="delta")
            new = moved(engine, 1.5)
            source.get_per_tensor_param = lambda: (((name, tensor) for name, tensor in new.items()), None)
            done = await synchronizer.sync(2)
            assert "delta" == done.kind
            assert {name: digest(tensor) for name, tensor in new.items()} == done.receipts[0].workers[0].digests
            await synchronise(registry, source, fresh)
            answers = [await score(each) for each in (server, fresh)]
            await server.stop()
            await fresh.stop()
        return answers[0], answers[1]

    found, expected = asyncio.run(main())
    assert expected == found


async def score(server: Any) -> list[float]:
    """Log-probabilities of a greedy answer."""
    sampling = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    return list(
        (await server.generate(GenerateRequest(request_id="a", prompt_ids=PROMPT, sampling=sampling))).log_probs
    )


def test_a_bfloat16_checkpoint_comes_back_bit_for_bit(registry: Registry, tmp_path: Path) -> None:
    """Also where some tensors stay in float32."""
    save_model("deepseek_v3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "low")
    with opened(registry, tmp_path / "low", dtype="bfloat16") as engine:
        assert_same(load_file(tmp_path / "low" / "model.safetensors"), dict(engine.get_per_tensor_param()[0]))


def test_names_of_the_hub_without_the_models_prefix(registry: Registry, tmp_path: Path) -> None:
    """gpt2 is published as the bare transformer: h.0.attn…, not transformer.h.0.attn…"""
    save_model("gpt2", tmp_path)
    bare = {name.removeprefix("transformer."): each for name, each in load_file(tmp_path / "model.safetensors").items()}
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with opened(registry, tmp_path) as engine:
        assert_same(bare, dict(engine.get_per_tensor_param()[0]))


def test_experts_have_the_names_that_servers_know(registry: Registry, tmp_path: Path) -> None:
    """Written out, so that the library alone does not say what is right."""
    wanted = {
        "mixtral": "model.layers.0.block_sparse_moe.experts.0.w1.weight",
        "qwen3_moe": "model.layers.0.mlp.experts.0.gate_proj.weight",
        "qwen2_vl": "visual.blocks.0.attn.qkv.weight",
    }
    for architecture, name in wanted.items():
        save_model(architecture, tmp_path / architecture)
        with opened(registry, tmp_path / architecture) as engine:
            assert name in dict(engine.get_per_tensor_param()[0])


def test_a_folder_of_another_form_is_refused_at_the_start(registry: Registry, tmp_path: Path) -> None:
    """A tensor whose shape on disk is not the one that would be published."""
    save_model("qwen3_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    index = {name: tensors.pop(name) for name in list(tensors) if "experts.0." in name}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert index
    with pytest.raises(JackfieldError) as caught, opened(registry, tmp_path):
        pass
    assert caught.value.code in ("engine.model", "weights.names")


def assert_same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Names, shapes, dtypes and values."""
    assert sorted(expected) == sorted(found)
    for name, tensor in expected.items():
        assert (tensor.dtype, tensor.shape) == (found[name].dtype, found[name].shape), name
        assert torch.equal(tensor, found[name]), name
