"""The plugins that the documentation shows pass their gates, keep their contracts, and train a model together."""

from __future__ import annotations

import asyncio
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from jackfield.abc.agent import AgentContext
from jackfield.abc.checkpoint_engine import CheckpointEngineContext, TopologyRequest
from jackfield.abc.engine import (
    EngineContext,
    LoadCheckpointRequest,
    LoraSpec,
    ModelSpec,
    OptimizerSpec,
    SaveCheckpointRequest,
)
from jackfield.abc.reward import RewardContext, ScoreRequest, ScoreResult
from jackfield.abc.rollout import (
    AbortRequest,
    GenerateRequest,
    GenerateResult,
    PauseRequest,
    ResumeRequest,
    RolloutContext,
    SamplingParams,
    SleepRequest,
    WakeUpRequest,
)
from jackfield.abc.transfer_queue import (
    DeleteRequest,
    GetRequest,
    PutRequest,
    SnapshotRequest,
    TransferQueueContext,
)
from jackfield.algorithms import LossSpec, resolve_loss
from jackfield.compose import run
from jackfield.config import make_config
from jackfield.data.tokens import HuggingFaceChatTokenizer
from jackfield.errors import EngineError, PluginError, QueueError, RolloutError, WeightsError
from jackfield.plugins import Registry
from jackfield.sdk.buckets import digest
from jackfield.sdk.cells import column_from_rows, dense_column, json_column, rows_of
from jackfield.sdk.jagged import jagged, rows
from jackfield.sdk.receiver import WeightReceiver
from jackfield.weights import Replica, WeightSender, WeightSynchronizer

from .conftest import PLUGINS, PROJECTS

KEPT = sorted((PLUGINS.parents[1] / "tests" / "conformance" / "kept").glob("*.whl"))
NAMES = {
    "engine": "plain",
    "rollout": "plain",
    "agent": "second_try",
    "reward": "brevity",
    "transfer_queue": "sqlite",
    "checkpoint_engine": "tcp",
}


@pytest.mark.parametrize("kind", NAMES)
def test_each_plugin_passes_the_manifest_and_the_structure_gate(documented: Registry, kind: str) -> None:
    record = documented.resolve(NAMES[kind], kind)
    assert record.error is None
    loaded = documented.load(kind, NAMES[kind])
    assert loaded.settings_class() == loaded.settings_class()


@pytest.mark.needs("module:jackfield_conformance")
@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
@pytest.mark.timeout(240)
def test_each_plugin_keeps_its_contract(project: Path) -> None:
    """What the documentation shows passes every conformance check that applies to it.

    Where a plugin is what it was when the ABI became 1.0, byte for byte, the test of the kept wheels certifies it.
    """
    from jackfield_conformance import certify

    files = [(str(file.relative_to(project / "src")), file.read_bytes()) for file in _sources(project)]
    kept = [each for wheel in KEPT for each in _contents(wheel)]
    assert files
    if any(file not in kept for file in files):
        assert "none" != certify(f"{project.name}:{NAMES[project.name]}").level


def _contents(wheel: Path) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(wheel) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def _sources(project: Path) -> list[Path]:
    return [file for file in sorted((project / "src").rglob("*")) if file.suffix in (".py", ".toml")]


# ---- reward


def score(build: Any, solution: str, tokens: int, ground_truth: str = "so 7") -> ScoreResult:
    agent = build("reward", "brevity", RewardContext())
    request = ScoreRequest(
        data_source="t", solution_str=solution, ground_truth=ground_truth, response_ids=(1,) * tokens
    )
    result: ScoreResult = asyncio.run(agent.compute_score(request))
    return result


def test_the_reward_compares_whole_groups_and_leaves_failures_alone(build: Any) -> None:
    scores = [score(build, "7", 1), score(build, "so it is 7", 5), score(build, "8", 1), ScoreResult(status="failed")]
    agent = build("reward", "brevity", RewardContext(), penalty=0.5)
    assert [1.0, 0.5, 0.0, None] == [each.score for each in agent.post_process_scores(scores)]


def test_a_task_without_a_ground_truth_is_a_failure_not_a_zero(build: Any) -> None:
    assert ("failed", None) == (score(build, "7", 1, "").status, score(build, "7", 1, "").score)


# ---- agent


class Model:
    """Answers what it is told to, and remembers what it was asked."""

    def __init__(self, *answers: tuple[int, ...]) -> None:
        self.answers = list(answers)
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.asked.append(request)
        tokens = self.answers.pop(0)
        return GenerateResult(
            request_id=request.request_id,
            token_ids=tokens,
            log_probs=tuple(-0.5 for _ in tokens),
            weight_versions=tuple(3 for _ in tokens),
            finish_reason="stop",
        )


def try_twice(build: Any, model_folder: Path, model: Model) -> Any:
    context = AgentContext(generate=model.generate, tokenizer=HuggingFaceChatTokenizer.load(model_folder))
    agent = build("agent", "second_try", context, marker="w60", hint="w40 w41")
    return asyncio.run(agent.run({"max_new_tokens": 9}, messages=[{"role": "user", "content": "w5"}]))


def test_the_agent_asks_again_and_masks_what_it_said_itself(build: Any, model_folder: Path) -> None:
    model = Model((7, 8, 1), (60, 1))
    output = try_twice(build, model_folder, model)
    (sequence,) = output.sequences
    assert 2 == output.num_turns
    assert (7, 8, 1, 3, 40, 41, 4, 60, 1) == sequence.response_ids
    assert (1, 1, 1, 0, 0, 0, 0, 1, 1) == sequence.response_mask
    assert (-0.5,) * 3 + (0.0,) * 4 + (-0.5,) * 2 == sequence.response_log_probs
    assert (3,) * 3 + (-1,) * 4 + (3,) * 2 == sequence.weight_versions
    assert sequence.prompt_ids + sequence.response_ids[:7] == model.asked[1].prompt_ids
    assert [9, 6] == [request.sampling.max_new_tokens for request in model.asked]


def test_the_agent_is_content_with_a_finished_answer(build: Any, model_folder: Path) -> None:
    output = try_twice(build, model_folder, Model((7, 60, 1)))
    assert (1, (7, 60, 1)) == (output.num_turns, output.sequences[0].response_ids)


# ---- engine


def engine(build: Any, model_folder: Path, **context: Any) -> Any:
    optimizer = OptimizerSpec(lr=1e-2, weight_decay=0.0)
    made = build(
        "engine",
        "plain",
        EngineContext(role="actor", model=ModelSpec(path=str(model_folder)), optimizer=optimizer, **context),
    )
    made.initialize()
    return made


def batch() -> TensorDict:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 61, (n,), generator=generator) for n in (3, 1, 6)]
    responses = [torch.randint(5, 61, (n,), generator=generator) for n in (4, 7, 2)]
    columns = {
        "prompt_ids": jagged(prompts),
        "response_ids": jagged(responses),
        "response_mask": jagged([torch.ones(len(each), dtype=torch.bool) for each in responses]),
    }
    return TensorDict(columns, batch_size=[3])


SFT = resolve_loss(LossSpec(name="sft", global_counts={"global_tokens": 13, "global_sequences": 3}))


def gradients(build: Any, model_folder: Path, micro_batch_tokens: int) -> dict[str, torch.Tensor]:
    made = engine(build, model_folder, micro_batch_tokens=micro_batch_tokens)
    with made.train_mode():
        made.optimizer_zero_grad()
        made.forward_backward_batch(batch(), SFT)
    return dict(made.get_per_tensor_grad())


def test_the_engine_agrees_with_the_library_run_row_by_row(build: Any, model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = engine(build, model_folder)
    with made.eval_mode():
        output = made.forward_backward_batch(batch(), SFT, forward_only=True)
    reference = AutoModelForCausalLM.from_pretrained(model_folder).double().eval()
    expected = []
    for prompt, response in zip(rows(batch()["prompt_ids"]), rows(batch()["response_ids"]), strict=True):
        with torch.no_grad():
            logits = reference(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        expected.append(logits.log_softmax(-1)[torch.arange(len(response)), response])
    for want, found in zip(expected, rows(output.log_probs), strict=True):
        torch.testing.assert_close(found.double(), want, rtol=0, atol=1e-5)
    assert math.isclose(-float(torch.cat(expected).mean()), output.loss, rel_tol=1e-5)


def test_gradients_do_not_depend_on_the_micro_batches(build: Any, model_folder: Path) -> None:
    whole, split = gradients(build, model_folder, 1000), gradients(build, model_folder, 8)
    assert whole.keys() == split.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-4, atol=1e-6)
        assert gradient.abs().sum() > 0, name


def step(made: Any) -> dict[str, torch.Tensor]:
    with made.train_mode():
        made.optimizer_zero_grad()
        made.forward_backward_batch(batch(), SFT)
        made.optimizer_step()
    made.lr_scheduler_step()
    return dict(made.get_per_tensor_param()[0])


def test_save_load_step_is_step(build: Any, model_folder: Path, tmp_path: Path) -> None:
    one, other = engine(build, model_folder), engine(build, model_folder)
    step(one)
    one.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "saved")))
    other.load_checkpoint(LoadCheckpointRequest(folder=str(tmp_path / "saved")))
    expected, found = step(one), step(other)
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_the_engine_refuses_what_it_cannot_do(build: Any, model_folder: Path) -> None:
    model = ModelSpec(path=str(model_folder), lora=LoraSpec())
    with pytest.raises(PluginError) as caught:
        build("engine", "plain", EngineContext(role="actor", model=model)).initialize()
    assert "plugin.capability" == caught.value.code
    with pytest.raises(EngineError) as caught:
        engine(build, model_folder).forward_backward_batch(batch(), SFT)
    assert "engine.state" == caught.value.code
    missing = ModelSpec(path=str(model_folder / "nothing"))
    with pytest.raises(EngineError) as caught:
        build("engine", "plain", EngineContext(role="actor", model=missing)).initialize()
    assert "engine.model" == caught.value.code


# ---- rollout


def request(name: str, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_ids=(5, 6, 7), sampling=SamplingParams(**sampling))


def server(build: Any, model_folder: Path) -> Any:
    return build("rollout", "plain", RolloutContext(model=ModelSpec(path=str(model_folder))))


def test_the_server_generates_what_the_library_generates(build: Any, model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    async def main() -> GenerateResult:
        made = server(build, model_folder)
        await made.start()
        result: GenerateResult = await made.generate(request("a", temperature=0.0, max_new_tokens=12))
        await made.stop()
        return result

    result = asyncio.run(main())
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False)[0, 3:]
    assert tuple(expected.tolist()) == result.token_ids
    assert len(result.token_ids) == len(result.log_probs) == len(result.weight_versions)


def test_seeds_abort_pause_and_sleep(build: Any, model_folder: Path) -> None:
    sampling = {"max_new_tokens": 6, "seed": 4, "ignore_eos": True, "top_k": 20, "top_p": 0.9, "min_p": 0.01}

    async def main() -> None:
        made = server(build, model_folder)
        await made.start()
        alone = await made.generate(request("a", **sampling))
        both = await asyncio.gather(
            made.generate(request("b", **sampling)), made.generate(request("c", max_new_tokens=6))
        )
        assert alone.token_ids == both[0].token_ids, "a seed fixes the tokens, whatever else runs"
        chunks = [chunk async for chunk in made.generate_stream(request("d", **sampling))]
        assert alone.token_ids == tuple(token for chunk in chunks for token in chunk.token_ids)
        assert "length" == chunks[-1].finish_reason

        await made.pause(PauseRequest())
        waiting = asyncio.create_task(made.generate(request("e", **sampling)))
        await asyncio.sleep(0)
        assert 1 == (await made.health()).waiting
        await made.abort(AbortRequest(request_ids=("e",)))
        assert "abort" == (await waiting).finish_reason
        await made.sleep(SleepRequest(level=2))
        await made.wake_up(WakeUpRequest())
        await made.resume(ResumeRequest())
        with pytest.raises(RolloutError) as caught:
            await made.generate(request("f"))
        assert "rollout.stale" == caught.value.code
        await made.stop()

    asyncio.run(main())


def test_the_server_refuses_what_it_would_ignore(build: Any, model_folder: Path) -> None:
    async def main() -> None:
        made = server(build, model_folder)
        await made.start()
        with pytest.raises(RolloutError) as caught:
            await made.generate(request("a", stop=("w9",)))
        assert "rollout.request" == caught.value.code
        await made.stop()

    asyncio.run(main())


def test_a_synchronisation_over_tcp_is_proved_by_digests(build: Any, documented: Registry, model_folder: Path) -> None:
    async def main() -> None:
        trainer, replica = engine(build, model_folder), server(build, model_folder)
        info = await replica.start()
        new = step(trainer)
        loaded = documented.load("checkpoint_engine", "tcp")
        sender = loaded.build({"bucket_bytes": 100}, CheckpointEngineContext(end="sender", deadline_seconds=20))
        synchronizer = WeightSynchronizer(
            [WeightSender(sender, trainer.get_per_tensor_param)],
            [Replica(replica, info)],
            name="tcp",
            clock=replica._clock,
            deadline_seconds=20,
        )
        report = await synchronizer.sync(1)
        assert {name: digest(tensor) for name, tensor in new.items()} == report.receipts[0].workers[0].digests
        result = await replica.generate(request("a", max_new_tokens=2, ignore_eos=True))
        assert (1, 1) == result.weight_versions
        await replica.stop()

    asyncio.run(main())


# ---- checkpoint engine


TENSORS = {
    "bfloat16": torch.randn(3, 5).to(torch.bfloat16),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(2.5),
    "larger than a bucket": torch.randn(40, 25),
    "strided": torch.randn(4, 6).T,
}


async def transfer(build: Any, source: Any, workers: int) -> list[Any]:
    ends = [build("checkpoint_engine", "tcp", CheckpointEngineContext(end="sender", deadline_seconds=5))]
    for rank in range(workers):
        context = CheckpointEngineContext(end="receiver", rank=rank, world_size=workers, deadline_seconds=5)
        ends.append(build("checkpoint_engine", "tcp", context))
    sender, receivers = WeightSender(ends[0], lambda: (source, None)), [WeightReceiver(end) for end in ends[1:]]
    request = TopologyRequest(trainer_metadata=((await sender.prepare()).metadata,), rollout_workers=workers)
    topology = type(ends[0]).build_topology(request)
    json.dumps([topology.trainer, topology.rollout])

    async def send() -> Any:
        try:
            await sender.connect(topology.trainer[0], 1)
            return await sender.send()
        finally:
            await sender.finalize()

    async def receive(number: int) -> dict[str, torch.Tensor]:
        stream = receivers[number].tensors(topology.rollout[number], 1)
        return {name: tensor.clone() async for name, tensor in stream}

    return await asyncio.gather(send(), *(receive(number) for number in range(workers)), return_exceptions=True)


@pytest.mark.parametrize("workers", [1, 3])
def test_every_tensor_arrives_bit_exact(build: Any, workers: int) -> None:
    sent, *received = asyncio.run(transfer(build, (item for item in TENSORS.items()), workers))
    assert TENSORS.keys() == sent.keys()
    for tensors in received:
        assert sent == {name: digest(tensor) for name, tensor in tensors.items()}


def test_a_transfer_that_breaks_off_raises_at_both_ends(build: Any) -> None:
    def broken() -> Any:
        yield "first", torch.ones(2)
        raise RuntimeError("the source died")

    sent, received = asyncio.run(transfer(build, broken(), 1))
    assert "the source died" == str(sent)
    assert isinstance(received, WeightsError)


# ---- transfer queue


def test_the_backend_keeps_every_byte_through_a_restart(build: Any, tmp_path: Path) -> None:
    columns = {
        "jagged": column_from_rows([torch.arange(3), torch.arange(0), torch.arange(5)]),
        "half": column_from_rows([torch.ones(2, 2, dtype=torch.bfloat16)] * 3),
        "dense": dense_column(torch.tensor([1.5, -0.0, 3.0])),
        "flag": dense_column(torch.tensor([[True, False]] * 3)),
        "text": json_column([{"a": 1}, "ü", None]),
    }
    keys = ("a", "b", "c")
    context = TransferQueueContext(folder=str(tmp_path / "queue"))

    async def write() -> None:
        backend = build("transfer_queue", "sqlite", context)
        await backend.start()
        for name, column in columns.items():  # one at a time: putting one column keeps the others
            await backend.put(PutRequest(partition="p", keys=keys, columns={name: column}))
        await backend.checkpoint(SnapshotRequest(folder=str(tmp_path / "snapshot")))
        deleted = await backend.delete(DeleteRequest(partition="p", keys=("c", "unknown")))
        assert (1, 2) == (deleted.samples, (await backend.stats()).samples)
        await backend.close()
        await backend.close()

    async def read() -> None:
        backend = build("transfer_queue", "sqlite", context)
        await backend.start()
        with pytest.raises(QueueError) as caught:
            await backend.get(GetRequest(partition="p", keys=("c",), columns=("dense",)))
        assert "queue.unknown-sample" == caught.value.code
        await backend.restore(SnapshotRequest(folder=str(tmp_path / "snapshot")))
        with pytest.raises(QueueError) as caught:
            await backend.get(GetRequest(partition="p", keys=("a",), columns=("other",)))
        assert "queue.column" == caught.value.code
        found = await backend.get(GetRequest(partition="p", keys=keys[::-1], columns=tuple(columns)))
        for name, column in columns.items():
            expected, rows_found = rows_of(column)[::-1], rows_of(found.columns[name])
            if name == "text":
                assert expected == rows_found
                continue
            for one, other in zip(expected, rows_found, strict=True):
                assert (one.dtype, one.shape, one.tolist()) == (other.dtype, other.shape, other.tolist())
        await backend.close()
        with pytest.raises(QueueError) as caught:
            await backend.stats()
        assert "queue.closed" == caught.value.code

    asyncio.run(write())
    asyncio.run(read())


# ---- all together


def test_all_six_train_a_model_together(documented: Registry, model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    config = make_config(
        {
            "folder": str(tmp_path / "run"),
            "model": {"path": str(model_folder)},
            "data": {"train": str(tasks), "eval": str(tasks), "groups_per_batch": 2, "rollouts_per_group": 4},
            "sampling": {"max_new_tokens": 4},
            "optimizer": {"lr": 1e-3},
            "schedule": {"steps": 2, "sync_offset": 1},
            "evaluation": {"every": 2, "sampling": {"max_new_tokens": 4, "temperature": 0.0}},
            "observe": {"progress": False, "curve": False, "report_to": []},
            **{kind: name for kind, name in NAMES.items() if kind != "agent"},
            "agent": {"name": "second_try", "marker": "w60", "hint": "w40"},
        }
    )
    result = run(config, registry=documented)
    assert 2 == result.steps
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert ["evaluation", "step", "step", "evaluation"] == [line["kind"] for line in lines if line["kind"] != "weights"]
    assert (result.model / "tokenizer.json").is_file()
