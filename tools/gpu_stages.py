"""The stages of ``tools/gpu.py``. Each is a function of its plan that returns JSON-ready results.

Times are medians of repeated steps, in seconds; memory is in bytes.
"""

from __future__ import annotations

import inspect
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_measures import Plan, Skipped, make_batch, make_lengths, make_model, memory, timed


def environment(plan: Plan) -> dict[str, Any]:
    """Return versions, devices and the measured speed of a bfloat16 matrix product, in FLOP/s."""
    import torch

    if plan.cuda and not torch.cuda.is_available():
        raise RuntimeError(f"--device {plan.device}, and torch {torch.__version__} sees no GPU")
    found: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("torch", "transformers", "peft", "tensordict", "trl", "vllm", "flash-attn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["gpus"] = []
    for index in range(plan.gpus):
        about = torch.cuda.get_device_properties(index)
        found["gpus"].append({"name": about.name, "memory": about.total_memory})
    if plan.cuda:
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    size = 256 if plan.small else 8192
    left, right = (torch.randn(size, size, device=plan.device, dtype=torch.bfloat16) for _ in range(2))
    found["matmul_flops"] = 2 * size**3 / timed(plan, lambda: left @ right, warm=3, count=10)
    return found


def engine_conformance(plan: Plan) -> dict[str, Any]:
    """Run the conformance checks of the engine fsdp on the device."""
    return _conformance(plan, "engine:fsdp", every=15)


def server_conformance(plan: Plan) -> dict[str, Any]:
    """Run the conformance checks of the server transformers, and of vllm where it is installed, on the device."""
    found = _conformance(plan, "rollout:transformers", every=20)
    if find_spec("vllm") is not None and not plan.small:
        found |= _conformance(plan, "rollout:vllm", every=1)
    return found


def _conformance(plan: Plan, plugin: str, every: int) -> dict[str, Any]:
    import attrs

    from jackfield_conformance.runner import Run

    run = Run.of(plugin, Path(plan.folder) / "checks")
    run._subject = attrs.evolve(run._subject, fixture={**run._subject.fixture, "device": plan.device})
    checks, left_out = list(run.checks), []
    if plan.cuda and plan.gpus < 2:
        left_out = [check.id for check in checks if "play(" in inspect.getsource(inspect.unwrap(check.function))]
        checks = [check for check in checks if check.id not in left_out]
    outcomes = [run.execute(check) for check in (checks[::every] if plan.small else checks)]
    failed = {each.check.id: str(each.message)[:500] for each in outcomes if each.status == "failed"}
    if failed:
        raise AssertionError(f"{plugin}: {json.dumps(failed)}")
    counts = [outcome.status for outcome in outcomes]
    told: dict[str, Any] = {status: counts.count(status) for status in sorted(set(counts))}
    return {plugin: {**told, **({"left_out": left_out, "why": "two ranks need two GPUs"} if left_out else {})}}


def parity(plan: Plan) -> dict[str, Any]:
    """Compare fsdp on the device with the float64 reference, and TRL where it is installed."""
    from jackfield_parity.oracle import Oracle, Request

    where = f"cluster.device={plan.device}"
    engines = [f"fsdp:{where}"]
    if not plan.small:
        bfloat16 = f"fsdp:{where},mixed_precision=bfloat16,precision=bfloat16"
        engines += [bfloat16, f"fsdp:{where},model.lora.rank=4", f"fsdp:{where},cluster.offload=true"]
        engines += [f"fsdp:{where}@2"] if plan.gpus > 1 or not plan.cuda else []
    request = Request(engines=tuple(engines), with_trl=not plan.small, seconds=300.0)
    report = Oracle(request, Path(plan.folder)).run()
    found = report.as_dict()
    for line in found["comparisons"]:
        line.pop("by_name", None)
    if not report.ok:
        raise AssertionError(json.dumps([row for row in report.table() if row["verdict"] not in ("ok", "skipped")]))
    return found


def weights_shared(plan: Plan) -> dict[str, Any]:
    """Send weights between two processes by ``shared``; on one GPU by CUDA IPC, where the transport has it."""
    return _weights(plan, "shared", [plan.device, plan.device])


def weights_nccl(plan: Plan) -> dict[str, Any]:
    """Send weights between two GPUs by ``nccl``; on the CPU over gloo."""
    if plan.cuda and plan.gpus < 2:
        raise Skipped(f"NCCL refuses two ranks on one GPU, and there is {plan.gpus}")
    return _weights(plan, "nccl", ["cuda:0", "cuda:1"] if plan.cuda else ["cpu", "cpu"])


def _weights(plan: Plan, plugin: str, devices: list[str]) -> dict[str, Any]:
    from jackfield_conformance.support.transfer_ends import team

    with team(plugin) as ends:
        ends.gather(1, 1)
        for end, side, device in zip((*ends.ranks, *ends.workers), ("sender", "receiver"), devices, strict=True):
            place = {"end": side, "rank": 0, "world_size": 1, "deadline_seconds": 60.0, "device": device}
            assert end.ask("make", plugin=plugin, settings={}, context=place) == {"made": True}
        seconds = []
        for number in range(1, 4):
            started = time.perf_counter()
            ends.transfer(number)
            seconds.append(time.perf_counter() - started)
    return {"devices": devices, "transfers": len(seconds), "seconds": statistics.median(seconds)}


def grpo(plan: Plan) -> dict[str, Any]:
    """Run GRPO with engine and server on the same device; return seconds of each stage of a step, and memory."""
    from _vs_trl_task import WANTED, make_tokenizer

    from jackfield.compose import run
    from jackfield.config import make_config
    from jackfield.plugins import hookimpl

    folder = Path(plan.folder)
    count = make_model(plan, folder / "model")
    make_tokenizer(folder / "model")
    lines = [json.dumps({"question": f"name {kind}", "answer": WANTED}) for kind in ("birds", "maps", "roads", "songs")]
    (folder / "prompts.jsonl").write_text("\n".join(lines * 8) + "\n", encoding="utf-8")
    stages: dict[str, list[float]] = {}
    ends: list[float] = []

    class Times:
        @hookimpl
        def stage_ended(self, event: Any) -> None:
            stages.setdefault(event.name, []).append(event.end - event.start)

        @hookimpl
        def step_ended(self, event: Any) -> None:
            ends.append(time.perf_counter())

    steps, tokens = (3, 8) if plan.small else (6, 256)
    groups, rollouts = (2, 2) if plan.small else (16, 8)
    task = Path(inspect.getfile(make_tokenizer))
    settings = {
        "name": "gpu",
        "folder": str(folder / "run"),
        "model": {"path": str(folder / "model"), "dtype": "float32" if plan.small else "bfloat16"},
        "data": {
            "train": str(folder / "prompts.jsonl"),
            "groups_per_batch": groups,
            "rollouts_per_group": rollouts,
        },
        "sampling": {"max_new_tokens": tokens, "ignore_eos": True},
        "algorithm": {"name": "grpo"},
        "optimizer": {"lr": 1e-6},
        "schedule": {"steps": steps},
        "engine": {"name": "fsdp"},
        "cluster": {"device": plan.device, "micro_batch_tokens": 16384},
        "checkpoint": {"every": 0, "at_end": False, "resume": False},
        "reward": {"name": "function", "path": f"{task}:compute_score"},
        "observe": {"report_to": [], **dict.fromkeys(("sample_table", "timeline", "curve", "progress"), False)},
    }
    run(make_config(settings), hooks=[Times()])
    seconds = statistics.median(after - before for before, after in itertools.pairwise(ends))
    medians = {name: statistics.median(each[1:] or each) for name, each in stages.items()}
    work = {"parameters": count, "samples": groups * rollouts, "response_tokens": groups * rollouts * tokens}
    return {
        **work,
        "seconds": seconds,
        "stages": medians,
        "samples_per_second": work["samples"] / seconds,
        **memory(plan),
    }


def training(plan: Plan) -> dict[str, Any]:
    """Time a training step of fsdp beside a plain PyTorch loop on the same rows and weights."""
    folder = Path(plan.folder) / "model"
    count, lengths = make_model(plan, folder), make_lengths(plan)
    tokens = sum(map(sum, lengths))
    found: dict[str, Any] = {"parameters": count, "rows": len(lengths), "tokens": tokens}
    flops = plan.known.get("environment", {}).get("result", {}).get("matmul_flops")
    for name, side in (("fsdp", _fsdp_step), ("plain", _plain_step)):
        step, close = side(plan, folder, lengths)
        seconds = timed(plan, step, warm=2, count=3 if plan.small else 5)
        close()
        found[name] = {"seconds": seconds, "tokens_per_second": tokens / seconds, **memory(plan)}
        if flops:  # 6 FLOP per parameter and token, without attention and recomputation; of the measured matmul
            found[name]["mfu"] = 6 * count * tokens / seconds / flops
    found["ratio"] = found["plain"]["seconds"] / found["fsdp"]["seconds"]
    return found


def trl(plan: Plan) -> dict[str, Any]:
    """Time a training step of TRL's GRPOTrainer on the same rows and weights, 16 rows at a time."""
    if find_spec("trl") is None:
        raise Skipped("TRL is not installed")
    import attrs
    import torch

    from jackfield_parity.batch import write_batch
    from jackfield_parity.trl_side import prepare

    folder, lengths = Path(plan.folder), make_lengths(plan)
    count, batch = make_model(plan, folder / "model"), make_batch(plan, lengths)
    write_batch(batch, folder / "batch.safetensors")
    place = {"batch": str(folder / "batch.safetensors"), "model_path": str(folder / "model")}
    settings = {**attrs.asdict(batch.settings), "device": plan.device, "bf16": not plan.small}
    trainer, inputs = prepare({**place, **settings}, str(folder / "trainer"))
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        for start in range(0, len(lengths), 16):
            part = {n: one[start : start + 16] if one.dim() else one for n, one in inputs.items()}
            with trainer.compute_loss_context_manager():
                loss = trainer._compute_loss(trainer.model, part)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()

    seconds, tokens = timed(plan, step, warm=1, count=3), sum(map(sum, lengths))
    return {"parameters": count, "seconds": seconds, "tokens_per_second": tokens / seconds, **memory(plan)}


def _fsdp_step(
    plan: Plan, folder: Path, lengths: list[tuple[int, int]]
) -> tuple[Callable[[], Any], Callable[[], None]]:
    import torch
    from tensordict import TensorDict

    from jackfield.abc.engine import EngineContext, ModelSpec, OptimizerSpec
    from jackfield.algorithms import LossSpec, resolve_loss
    from jackfield.plugins import discover as plugins
    from jackfield.sdk.jagged import jagged

    batch = make_batch(plan, lengths)
    names = ("prompt_ids", "response_ids", "response_mask", "advantages", "old_log_probs")
    data = TensorDict({name: jagged(getattr(batch, name)) for name in names}, batch_size=[len(batch)])
    model, optimizer = ModelSpec(path=str(folder)), OptimizerSpec(lr=1e-6)
    context = EngineContext(role="actor", model=model, optimizer=optimizer, device=plan.device, micro_batch_tokens=8192)
    settings = {} if plan.small else {"mixed_precision": "bfloat16"}
    engine = plugins().load("engine", "fsdp").build(settings, context)
    engine.initialize()
    loss = resolve_loss(LossSpec(**batch.loss_spec()))

    def step() -> None:
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(data, loss)
            engine.optimizer_step()

    def close() -> None:
        engine.close()
        if plan.cuda:
            torch.cuda.empty_cache()

    return step, close


def _plain_step(
    plan: Plan, folder: Path, lengths: list[tuple[int, int]]
) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Return a step as one writes it by hand: padded micro-batches of rows, sdpa, autocast, fused AdamW."""
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM

    batch = make_batch(plan, lengths)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(plan.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    order = sorted(range(len(lengths)), key=lambda row: sum(lengths[row]))
    size, total = 16, batch.counts["global_tokens"]

    def padded(rows: list[Any]) -> Any:
        return pad_sequence(rows, batch_first=True).to(plan.device)

    def step() -> None:
        optimizer.zero_grad()
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            ids = padded([torch.cat([batch.prompt_ids[row], batch.response_ids[row]]) for row in rows])
            present = padded([torch.ones(sum(lengths[row]), dtype=torch.int64) for row in rows])
            with torch.autocast(ids.device.type, torch.bfloat16, enabled=not plan.small):
                logits = model(input_ids=ids, attention_mask=present, use_cache=False).logits[:, :-1]
            chosen = -torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")

            def aligned(name: str, rows: list[int] = rows) -> Any:
                return padded(
                    [torch.cat([torch.zeros(lengths[row][0] - 1), getattr(batch, name)[row]]) for row in rows]
                )

            ratio, advantages = (chosen - aligned("old_log_probs")).clamp(-20, 20).exp(), aligned("advantages")
            terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            ((terms * aligned("response_mask")).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step, lambda: None
