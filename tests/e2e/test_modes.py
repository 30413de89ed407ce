"""Every setting of the one loop, on the real plugins, for a few small steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from jackfield.errors import JackfieldError
from jackfield.queue import read_ledger

from .conftest import QUICKSTART, Run

TIMES = ("seconds", "time", "samples_per_second", "tokens_per_second", "waits")


def steps(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == "step"]


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if not key.startswith(TIMES)} for line in steps(lines)]


#: Settings that let a model that knows nothing earn different rewards within a group.
GRADED = (
    "reward.pattern=null",
    "reward.ground_truth_pattern=null",
    "reward.method=regex",
    "reward.expected='.*[0-4].*'",
)

STREAM = "schedule.stream_mini_batches=true"

#: What a run needs that is compared with another to the last bit.
INVARIANT = "rollout.batch_invariant=true"


def test_one_seed_fixes_a_synchronous_run(small_run: Run) -> None:
    """Metrics and weights of two runs are bitwise equal; another seed's are not."""
    first, first_lines = small_run("first", INVARIANT, *GRADED)
    second, second_lines = small_run("second", INVARIANT, *GRADED)
    other, _ = small_run("other", "seed=99", INVARIANT, *GRADED)
    assert without_times(first_lines) == without_times(second_lines)
    assert 3 == len(steps(first_lines))
    weights = [load_file(result.model / "model.safetensors") for result in (first, second, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


def test_rollout_and_engine_agree_on_log_probs(small_run: Run) -> None:
    """On-policy, with one optimizer step per batch, the first ratio is 1: both compute the same policy."""
    _, lines = small_run("ratio", *GRADED)
    for line in steps(lines):
        assert 1.0 == pytest.approx(line["policy/ratio"], abs=1e-4)
        assert 0.0 == pytest.approx(line["policy/approx_kl"], abs=1e-6)
        assert 0 == line["staleness/max"]
        assert 0.0 == pytest.approx(line["log_prob_check/replica/mean"], abs=1e-4)


@pytest.mark.parametrize(
    "overrides",
    [
        ("schedule.sync_offset=1",),
        ("schedule.sync_interval=2", "schedule.sync_offset=1", "schedule.steps=5"),
        ("algorithm.old_log_probs=engine", "algorithm.mini_batches=2", "algorithm.epochs=2"),
        ("cluster.replicas=2",),
        ("cluster.offload=true",),
        ("algorithm.entropy_coefficient=0.01", "algorithm.aggregation=seq-mean-token-mean"),
        ("algorithm.correction.enabled=true", "algorithm.correction.reject=sequence-mean"),
        (
            "algorithm.kl={coefficient: 0.1, name: k1, in_reward: true, target: 0.2}",
            "algorithm.shaping={clip: [-1, 1], normalize: true, overlong_length: 6, overlong_buffer: 4}",
        ),
        ("algorithm.kl={coefficient: 0.1, target: 0.2}", "algorithm.mini_batches=2"),
        ("cluster.micro_batch_tokens=64", "optimizer.warmup_steps=0", "optimizer.total_steps=3"),
        (STREAM, "algorithm.mini_batches=2"),
        (STREAM, "algorithm.mini_batches=2", "algorithm.epochs=2", "algorithm.kl.coefficient=0.1"),
        (STREAM, "algorithm.mini_batches=2", "schedule.sync_offset=1", "algorithm.old_log_probs=engine"),
        (STREAM, "algorithm.mini_batches=2", "algorithm.name=ppo", "cluster.offload=true"),
        (STREAM, "algorithm.mini_batches=2", "algorithm.name=remax", "algorithm.old_log_probs=engine"),
        (STREAM, "algorithm.mini_batches=2", "algorithm.name=reinforce_plus_plus", "algorithm.scope=mini_batch"),
        ("schedule.mode=async", "schedule.steps=6"),
        ("schedule.mode=async", "schedule.max_staleness=3", "schedule.sync_interval=2", "schedule.steps=6"),
        ("schedule.mode=async", "algorithm.name=decoupled_ppo", "schedule.on_stale=train_corrected"),
        ("schedule.mode=async", "schedule.rollouts_in_flight=4", "algorithm.correction.enabled=false"),
        ("schedule.mode=async", "algorithm.correction={stale_only: true, max_token_staleness: 1}"),
        ("algorithm.kl.measure=true",),
    ],
    ids=lambda overrides: ",".join(overrides),
)
def test_settings_of_the_loop(small_run: Run, overrides: tuple[str, ...]) -> None:
    result, lines = small_run("run", *GRADED, *overrides)
    assert result.steps == len(steps(lines))
    assert all(math.isfinite(line["policy/loss"]) and line["grad_norm"] >= 0 for line in steps(lines))
    ledger = list(read_ledger(result.folder))
    acked = [key for entry in ledger if entry.get("consumer") == "trainer" for key in entry.get("keys", ())]
    of_step = 20 if "algorithm.name=remax" in overrides else 16  # with a baseline for each of 4 groups
    assert len(acked) == len(set(acked)) == of_step * result.steps, "every sample was trained on exactly once"


@pytest.mark.parametrize("lora", [(), ("model.lora={rank: 4}", "optimizer.lr=1e-2")], ids=["full", "lora"])
def test_kl_to_the_reference_starts_at_zero_and_grows(small_run: Run, lora: tuple[str, ...]) -> None:
    _, lines = small_run("kl", "algorithm.kl.coefficient=0.1", "optimizer.warmup_steps=0", *GRADED, *lora)
    divergences = [line["policy/kl"] for line in steps(lines)]
    assert 0.0 == pytest.approx(divergences[0], abs=1e-6)
    assert divergences[-1] > 1e-6


def test_kl_and_entropy_are_reported_without_a_penalty(small_run: Run) -> None:
    """And the losses are those of a run that does not measure the KL."""
    _, plain = small_run("plain", INVARIANT, "optimizer.warmup_steps=0", *GRADED)
    _, lines = small_run("kl", INVARIANT, "algorithm.kl.measure=true", "optimizer.warmup_steps=0", *GRADED)
    divergences = [line["policy/kl"] for line in steps(lines)]
    assert 0.0 == pytest.approx(divergences[0], abs=1e-6)
    assert divergences[-1] > 1e-6
    assert [line["policy/loss"] for line in steps(plain)] == [line["policy/loss"] for line in steps(lines)]
    assert all(0 < line["policy/entropy_estimate"] < 20 for line in steps(plain))
    moved = [line["policy/initial_kl"] for line in steps(plain)]
    assert [line["policy/initial_kl"] for line in steps(lines)] == moved
    assert 0 < moved[0] < moved[-1]


def test_lora_reaches_the_rollout_server(small_run: Run) -> None:
    """Adapter updates are what it generates with: the first ratio of later steps is still 1."""
    _, lines = small_run(
        "lora", "model.lora={rank: 4}", "optimizer.lr=1e-2", "optimizer.warmup_steps=0", "schedule.steps=4", *GRADED
    )
    assert any(line["grad_norm"] > 0 for line in steps(lines))
    assert all(line["policy/ratio"] == pytest.approx(1.0, abs=1e-4) for line in steps(lines))


def test_supervised_fine_tuning_runs_through_the_same_loop(small_run: Run) -> None:
    result, lines = small_run(
        "sft", "schedule.steps=30", "data.groups_per_batch=16", "optimizer.warmup_steps=0", file="warmup.yaml"
    )
    losses = [line["policy/loss"] for line in steps(lines)]
    assert losses[-1] < 0.6 * losses[0]
    assert (result.model / "model.safetensors").is_file()


def test_a_hook_offers_a_loss_that_the_configuration_names(small_run: Run, made: Path, tmp_path: Path) -> None:
    """A part that a listener registers is used like one of ours; an unknown name would have been refused."""
    from jackfield.compose import run
    from jackfield.config import load_config
    from jackfield.plugins import hookimpl

    called = []

    def plain(*, log_probs: Any, advantages: Any, response_mask: Any) -> tuple[Any, dict[str, Any]]:
        called.append(len(log_probs))
        return -log_probs * advantages, {}

    class Offer:
        @hookimpl
        def register_parts(self, register: Any) -> None:
            register("loss", "plain_policy_gradient", plain)

    overrides = [
        f"folder={tmp_path / 'hook'}",
        f"model.path={made / 'model'}",
        f"data.train={made / 'problems'}.jsonl",
        "data.groups_per_batch=2",
        "data.rollouts_per_group=2",
        "schedule.steps=1",
        "evaluation.every=0",
        "observe.progress=false",
        "algorithm.loss={name: plain_policy_gradient}",
    ]
    run(load_config(QUICKSTART / "grpo.yaml", overrides), hooks=[Offer()])
    assert [4] == called


def test_the_model_folder_is_a_hugging_face_model(small_run: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result, _ = small_run("export", *GRADED)
    model = AutoModelForCausalLM.from_pretrained(result.model, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(result.model, local_files_only=True)
    assert len(tokenizer) == model.config.vocab_size
    assert (result.folder / "config.yaml").is_file()


def test_a_reward_of_the_users_own(small_run: Run, tmp_path: Path) -> None:
    """A plain function in a file, in a worker process under a deadline."""
    file = tmp_path / "my_reward.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(len(solution_str) % 3)\n"
    )
    _, lines = small_run("function", f"reward={{name: function, path: '{file}:compute_score'}}")
    assert 3 == len(steps(lines))


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (("algorithm.name=grpoo",), "algorithm.unknown"),
        (("algorithm.loss={name: pppo}",), "algorithm.unknown"),
        (("algorithm.advantages={name: optimal_token_baseline}",), "config.invalid-value"),
        (("algorithm.name=mix",), "config.missing-key"),
        (("algorithm.name=gdpo",), "config.missing-key"),
        (("critic.warmup_steps=3",), "config.invalid-value"),
        (("algorithm.kl.target=0.1",), "config.invalid-value"),
        (("algorithm.correction.enabled=true", "algorithm.old_log_probs=rollout"), "config.invalid-value"),
        (("algorithm.name=gmpo", "algorithm.correction.enabled=true"), "config.invalid-value"),
        (("algorithm.name=dpo",), "config.invalid-value"),
        (("mode=offline",), "config.invalid-value"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_what_is_wrong_is_named(small_run: Run, overrides: tuple[str, ...], code: str) -> None:
    """``test_bad_input.py`` has what is not the algorithm's."""
    with pytest.raises(JackfieldError) as caught:
        small_run("wrong", *overrides)
    assert code == caught.value.code, str(caught.value)


@pytest.mark.parametrize("offload", [False, True])
def test_a_replica_that_spoils_what_it_has_acknowledged_is_caught(
    small_run: Run, monkeypatch: pytest.MonkeyPatch, offload: bool
) -> None:
    """Its receipts are right, its log-probs are not: the run ends before a sample is trained on that it makes then.

    Where engine and replica take turns on the device, it is found at the next turn; else before the next sample.
    """
    from jackfield_rollout_transformers.server import TransformersServer
    from jackfield_rollout_transformers.weights import FullUpdate

    finish, generate, asked = FullUpdate.finish, TransformersServer.generate, list[str]()

    def spoiling(update: FullUpdate, received: Any) -> dict[str, str]:
        digests = finish(update, received)
        weight = update._weights.targets()["model.layers.0.mlp.down_proj.weight"].data
        weight.copy_(weight.flip(0) * 3.0)
        asked.clear()
        return digests

    async def noting(server: TransformersServer, request: Any) -> Any:
        asked.append(request.request_id)
        return await generate(server, request)

    monkeypatch.setattr(FullUpdate, "finish", spoiling)
    monkeypatch.setattr(TransformersServer, "generate", noting)
    with pytest.raises(JackfieldError) as caught:
        small_run("spoilt", *GRADED, f"cluster.offload={str(offload).lower()}")
    assert ("weights.log-probs", "replica 0") == (caught.value.code, caught.value.where)
    assert "probe-1" == asked[0]
    assert offload or ["probe-1"] == asked
