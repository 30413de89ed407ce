"""What the training engine costs: its steps beside a hand-written PyTorch loop, and what its options change.

    python benchmarks/engines.py [--parts loop trl packing ranks output] [--rounds N] [--threads N] [--quick] [--json]

loop: the engine and a plain PyTorch loop on the same model, rows, loss and optimizer, in turns in one process.
trl: the same with the training step of TRL's GRPO trainer; left out where TRL is missing (``make benchmark-peers``).
packing: rows with the lengths of GSM8K, packed and padded; left out where ``--gsm8k`` has no ``train.jsonl``.
ranks: one process and two with gloo, the same rows; wall seconds, and processor seconds of all processes.
output: 2,048 tokens × 65,536 words through the output layer in pieces and at once, each in a process of its own, with
the peak of its memory. Times are processor seconds, which a busy machine distorts less; ratios are medians over rounds
that alternate the sides.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("loop", "trl", "packing", "ranks", "output")
TOKENS, WORDS, HIDDEN = 2048, 65_536, 128  #: of the part ``output``


def make_model(folder: Path) -> Path:
    """Save a Qwen3 of 0.8M parameters with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_batch(lengths: list[tuple[int, int]], samples: int) -> Any:
    """Return rows with ``(prompt, response)`` lengths, each prompt with ``samples`` responses."""
    import torch
    from tensordict import TensorDict

    from jackfield.sdk.jagged import jagged

    generator = torch.Generator().manual_seed(2)
    prompts: list[torch.Tensor] = []
    responses: list[torch.Tensor] = []
    for index, (prompt, response) in enumerate(lengths):
        new = torch.randint(0, 1024, (prompt,), generator=generator)
        prompts.append(prompts[-1] if index % samples else new)
        responses.append(torch.randint(0, 1024, (response,), generator=generator))
    columns = {
        "prompt_ids": jagged(prompts),
        "response_ids": jagged(responses),
        "advantages": jagged([torch.randn(len(each), generator=generator) for each in responses]),
    }
    return TensorDict(columns, batch_size=[len(lengths)])


def policy_loss(tokens: int) -> Callable[..., Any]:
    """Return the loss of both sides: the mean of ``-log_prob * advantage`` over all response tokens."""

    def loss(output: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        return -(output.log_probs * data["advantages"]).sum() / tokens, {}

    return loss


def make_engine(folder: Path, config: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return an initialized engine."""
    from jackfield.abc.engine import EngineContext, ModelSpec, OptimizerSpec
    from jackfield_engine_fsdp.config import Config
    from jackfield_engine_fsdp.engine import FSDPEngine

    context = EngineContext(role="actor", model=ModelSpec(path=str(folder)), optimizer=OptimizerSpec(), **options)
    engine = FSDPEngine(Config(**config or {}), context)
    engine.initialize()
    return engine


def engine_step(engine: Any, batch: Any, loss: Any, norm: bool = False) -> float:
    """Train one step; return its loss, or the norm of its gradient."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(batch, loss)
        size = engine.optimizer_step()
        engine.lr_scheduler_step()
    return float(size if norm else output.loss)


def plain_step(folder: Path, micro_batch_tokens: int) -> Callable[[Any, int], float]:
    """Return a step as one writes it by hand: padded micro-batches of similar length, logits of responses only."""
    import torch
    from transformers import AutoModelForCausalLM

    from jackfield.sdk.jagged import rows as rows_of

    model = AutoModelForCausalLM.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01, fused=True)

    def step(batch: Any, tokens: int) -> float:
        prompts, responses, advantages = (rows_of(batch[name]) for name in ("prompt_ids", "response_ids", "advantages"))
        order = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]) - len(responses[row]))
        optimizer.zero_grad()
        total = 0.0
        while order:
            longest = len(prompts[order[0]]) + len(responses[order[0]])
            chosen, order = (
                order[: max(1, micro_batch_tokens // longest)],
                order[max(1, micro_batch_tokens // longest) :],
            )
            rows = [torch.cat([prompts[row], responses[row]]) for row in chosen]
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            hidden = model.model(padded[:, :-1], use_cache=False).last_hidden_state
            inside = torch.zeros(padded[:, 1:].shape, dtype=torch.bool)
            for index, row in enumerate(chosen):
                inside[index, len(prompts[row]) - 1 : len(rows[index]) - 1] = True
            logits = model.lm_head(hidden[inside])
            log_probs = -torch.nn.functional.cross_entropy(logits, padded[:, 1:][inside], reduction="none")
            loss = -(log_probs * torch.cat([advantages[row] for row in chosen])).sum() / tokens
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def compare(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return processor seconds of each round by side. The sides take turns; the first round is left out."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    losses = {}
    for _ in range(rounds + 1):
        for name, step in sides.items():
            begin = time.process_time()
            losses[name] = step()
            times[name].append(time.process_time() - begin)
    values = list(losses.values())
    assert max(values) - min(values) < 1e-3 * abs(values[0]), f"the sides computed different results: {losses}"
    return {name: each[1:] for name, each in times.items()}


def ratio(times: dict[str, list[float]], one: str, other: str) -> float:
    """Return the median over rounds of a round's ratio."""
    return round(statistics.median(a / b for a, b in zip(times[one], times[other], strict=True)), 3)


def response_tokens(batch: Any) -> int:
    """Return the number of response tokens."""
    return int(batch["response_ids"].values().numel())


def loop(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """256 rows of 25 tokens: without and with shared prompts."""
    found: dict[str, Any] = {}
    for name, samples in (("distinct prompts", 1), ("8 answers per prompt", 8)):
        batch = make_batch([(15, 10)] * (64 if arguments.quick else 256), samples)
        tokens = response_tokens(batch)
        engine, plain = make_engine(folder, micro_batch_tokens=1600), plain_step(folder, 1600)
        loss = policy_loss(tokens)
        sides = {"engine": partial(engine_step, engine, batch, loss), "plain": partial(plain, batch, tokens)}
        times = compare(sides, arguments.rounds)
        engine.close()
        found[name] = {
            "engine / plain": ratio(times, "engine", "plain"),
            "plain_s": round(statistics.median(times["plain"]), 3),
        }
    return found


def trl(folder: Path, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The rows of ``loop`` with GRPO's loss."""
    if importlib.util.find_spec("trl") is None:
        return None
    from _engines_trl import ratio_loss, trl_step

    found: dict[str, Any] = {}
    for name, samples in (("distinct prompts", 1), ("8 answers per prompt", 8)):
        batch = make_batch([(15, 10)] * (64 if arguments.quick else 256), samples)
        theirs = trl_step(folder, batch, 64)  # first: TRL looks for a process group
        engine = make_engine(folder, micro_batch_tokens=1600)
        ours = partial(engine_step, engine, batch, ratio_loss(response_tokens(batch)), norm=True)
        times = compare({"engine": ours, "trl": theirs}, arguments.rounds)
        engine.close()
        found[name] = {
            "engine / TRL": ratio(times, "engine", "trl"),
            "trl_s": round(statistics.median(times["trl"]), 3),
        }
    return found


def packing(folder: Path, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Rows with GSM8K's lengths (four characters are a token), packed and padded; answers of a prompt vary."""
    file = arguments.gsm8k / "train.jsonl"
    if not file.exists():
        return None
    lines = [json.loads(line) for line in file.read_text().splitlines()[: 32 if arguments.quick else 64]]
    sizes = [(len(each["question"]) // 4, len(each["answer"]) // 4) for each in lines]
    found: dict[str, Any] = {}
    for name, samples in (("distinct prompts", 1), ("4 answers per prompt", 4)):
        lengths = [(sizes[index // samples][0], sizes[index][1]) for index in range(len(sizes))]
        batch = make_batch(lengths, samples)
        loss = policy_loss(response_tokens(batch))
        sides = {
            "packed": make_engine(folder, micro_batch_tokens=4096),
            "padded": make_engine(folder, micro_batch_tokens=4096),
        }
        sides["padded"]._model.packs = None
        steps = {each: partial(engine_step, engine, batch, loss) for each, engine in sides.items()}
        times = compare(steps, arguments.rounds)
        for engine in sides.values():
            engine.close()
        found[name] = {"packed / padded": ratio(times, "packed", "padded")}
    return found


def rank(folder: Path, number: int, world: int, rounds: int) -> None:
    """Run one of the processes of the part ``ranks``; print its wall and processor seconds per step."""
    batch = make_batch([(15, 10)] * 256, 1)
    method = None if world == 1 else f"file://{folder}/meeting_{world}"
    engine = make_engine(folder, rank=number, world_size=world, init_method=method, micro_batch_tokens=1600)
    loss, walls, processor = policy_loss(response_tokens(batch)), [], []
    for _ in range(rounds + 1):
        begin, worked = time.perf_counter(), time.process_time()
        engine_step(engine, batch[number * 256 // world : (number + 1) * 256 // world], loss)
        walls.append(time.perf_counter() - begin)
        processor.append(time.process_time() - worked)
    engine.close()
    print(json.dumps([statistics.median(walls[1:]), statistics.median(processor[1:])]))


def ranks(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Wall seconds of one and of two processes, one thread each, and the processor seconds of all."""
    found: dict[str, float] = {}
    for world in (1, 2):
        command = [sys.executable, __file__, "--rank", str(folder), "RANK", str(world), str(arguments.rounds)]
        started = [
            subprocess.Popen(
                [number if each == "RANK" else each for each in command],
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
            for number in map(str, range(world))
        ]
        try:
            outputs = [each.communicate(timeout=300)[0] for each in started]
        finally:
            for each in started:
                each.kill()
        if any(each.returncode for each in started):
            sys.exit(f"a process of {world} failed")
        walls, processor = zip(*map(json.loads, outputs), strict=True)
        found |= {f"{world} s": round(max(walls), 3), f"{world} cpu_s": round(sum(processor), 3)}
    return {**found, **{f"2 / 1 {unit}": round(found[f"2 {unit}"] / found[f"1 {unit}"], 3) for unit in ("s", "cpu_s")}}


def layer(chunk: int) -> None:
    """Run a forward and backward pass of an output layer; print processor seconds and GiB."""
    import torch
    from torch import nn

    from jackfield_engine_fsdp.operators import keep_freed_memory, token_statistics
    from jackfield_engines.output_layer import FusedOutput, LogitTransformation

    torch.set_num_threads(1)
    torch.manual_seed(3)
    keep_freed_memory()
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    output, labels = nn.Linear(HIDDEN, WORDS, bias=False), torch.randint(0, WORDS, (TOKENS,))

    class Model:
        def get_output_embeddings(self) -> nn.Linear:
            return output

    def status(name: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(name))) / 2**20

    before, begin = status("VmRSS"), time.process_time()
    if chunk:
        fused: Any = FusedOutput(LogitTransformation())
        log_probs, entropy = fused.statistics(Model(), hidden, labels, 1.0, True, chunk)
    else:
        log_probs, entropy = token_statistics(output(hidden), labels, 1.0, True, 1 << 40)
    (log_probs.sum() + 0.1 * entropy.sum()).backward()
    norm = float(output.weight.grad.norm())  # type: ignore[union-attr]
    print(json.dumps([time.process_time() - begin, status("VmHWM") - before, norm]))


def output(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time and peak memory of the output layer by the number of logits at once."""
    found: dict[str, Any] = {}
    for name, chunk in (("at once", 0), ("2^25", 1 << 25), ("2^23", 1 << 23)):
        runs = []
        for _ in range(1 if arguments.quick else 3):
            command = [sys.executable, __file__, "--layer", str(chunk)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
            runs.append(json.loads(done.stdout))
        seconds, gib, norm = (statistics.median(each) for each in zip(*runs, strict=True))
        found[name] = {"cpu_s": round(seconds, 2), "peak_gib": round(gib, 2), "norm": norm}
    norms = [each.pop("norm") for each in found.values()]
    assert max(norms) - min(norms) < 1e-4 * norms[0], f"the gradients differ: {norms}"
    whole = found["at once"]
    for name in ("2^25", "2^23"):
        for unit in ("cpu_s", "peak_gib"):
            found[name][f"{unit} / at once"] = round(found[name][unit] / whole[unit], 3)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--rounds", type=int, help="default: 15; with --quick 2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gsm8k", type=Path, default=ROOT / "shared" / "data" / "gsm8k", help="a folder")
    parser.add_argument("--quick", action="store_true", help="few rounds and rows")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--layer", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.layer is not None:
        return layer(arguments.layer)
    if arguments.rank:
        return rank(Path(arguments.rank[0]), *map(int, arguments.rank[1:]))
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 15)
    import torch

    torch.set_num_threads(arguments.threads)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name))
        for part in arguments.parts:
            found[part] = globals()[part](folder, arguments)
            missing = "no TRL" if part == "trl" else "no GSM8K"
            print(f"{part}: {found[part] or f'left out: {missing}'}", flush=True)
    if arguments.json:
        print(json.dumps(found))
    return None


if __name__ == "__main__":
    main()
