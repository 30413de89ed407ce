"""Tokens per second of the rollout server `transformers`, beside the library's own `generate` on the same requests.

    python benchmarks/rollout.py [--concurrency 1 32 256] [--tokens 64] [--threads 1] [--rounds 5] [--quick] [--json]

Both have the same Qwen3 of 1.77 million parameters with random weights, in float32 on the CPU, and sample at
temperature 1 without filters; the end token is a token like any other. The server also yields a log-probability and a
weight version for each token; `generate` yields token ids only. They take turns, and each figure is the best of the
rounds.

equal    each request has a prompt of its own (8 to 24 tokens) and gets `--tokens` tokens
mixed    as many tokens altogether, but a few requests get most of them (8 times `--tokens` at most). `generate` goes on
         until the longest one is full, and what a shorter one did not ask for is not counted. For the server twice as
         many requests as its batch holds wait, and finished ones make room; `generate` takes them in two batches

`vs_generate_ratio`: by the number of concurrent requests, the server's rate over `generate`'s, equal lengths.
`vs_generate_mixed_ratio`: the same for mixed ones. `update`: the pause that a weight update makes while all requests
run, in milliseconds, and what else it took, as its receipt says. The update comes as soon as all requests run, so it
waits for a pass over prompts; another (`paused_decoding_ms`) comes when each request has a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from _vs_trl_task import make_model

TEMPERATURE = 1.0
PROMPTS = (8, 24)  #: tokens, least and most
LONGEST = 8  #: of the mixed lengths, in multiples of the mean
POSITIONS = 2048


@attrs.frozen
class Request:
    """One sample to generate."""

    prompt: tuple[int, ...]
    tokens: int


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=64, help="of an answer; of mixed lengths the mean")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round, shorter answers: under 50 s")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.tokens = 1, min(arguments.tokens, 32)
    result = measure(arguments.concurrency, arguments.tokens, arguments.threads, arguments.rounds)
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the end")
    if arguments.json:
        print(json.dumps(result))


def measure(concurrencies: Sequence[int], tokens: int, threads: int, rounds: int) -> dict[str, Any]:
    """Print a line for each case; return the ratios."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    result: dict[str, Any] = {"vs_generate_ratio": {}, "vs_generate_mixed_ratio": {}, "update": {}}
    print(f"{'requests':>8}  {'lengths':8}{'generate':>10}{'server':>10}{'ratio':>8}   tokens per second")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model, seed=1, positions=POSITIONS)
        for concurrency in concurrencies:
            update = asyncio.run(case(model, concurrency, tokens, rounds, result))
            result["update"][str(concurrency)] = update
    return result


async def case(model: Path, concurrency: int, tokens: int, rounds: int, result: dict[str, Any]) -> dict[str, float]:
    """Both lengths at one concurrency, and then an update while all requests run."""
    generate = make_generate(model)
    server = await start_server(model, concurrency)
    try:
        for lengths, key in (("equal", "vs_generate_ratio"), ("mixed", "vs_generate_mixed_ratio")):
            requests = make_requests(concurrency, tokens, lengths)
            wanted = sum(request.tokens for request in requests)
            best = {"generate": float("inf"), "server": float("inf")}
            for _ in range(rounds + 1):  # the first warms up, and the best is taken
                best["generate"] = min(best["generate"], run_generate(generate, requests, concurrency))
                best["server"] = min(best["server"], await run_server(server, requests))
            rates = {name: wanted / seconds for name, seconds in best.items()}
            ratio = result[key][str(concurrency)] = round(rates["server"] / rates["generate"], 3)
            line = f"{rates['generate']:10,.0f}{rates['server']:10,.0f}{ratio:8.2f}"
            print(f"{concurrency:8}  {lengths:8}{line}", flush=True)
        requests = make_requests(concurrency, tokens, "equal")
        synchronizer = make_synchronizer(server, model)
        update = await run_update(server, synchronizer, requests, 1)
        decoding = await run_update(server, synchronizer, requests, 2, decoding=True)
        update["paused_decoding_ms"] = decoding["paused_ms"]
        pauses = f"{update['paused_ms']:.1f} ms paused at the prompts, {decoding['paused_ms']:.1f} ms while decoding"
        print(f"{concurrency:8}  update  {pauses}; {update['total_ms']:.1f} ms in all", flush=True)
        return update
    finally:
        await server.stop()


def make_requests(concurrency: int, tokens: int, lengths: str) -> list[Request]:
    """Requests with prompts of their own; twice ``concurrency`` of them with mixed lengths."""
    rng = random.Random(concurrency)

    def prompt() -> tuple[int, ...]:
        return tuple(rng.randrange(5, 1000) for _ in range(rng.randint(*PROMPTS)))

    if lengths == "equal":
        return [Request(prompt(), tokens) for _ in range(concurrency)]
    drawn = [min(rng.paretovariate(1.2), 10.0) for _ in range(2 * concurrency)]
    scale = tokens / (sum(drawn) / len(drawn))
    return [Request(prompt(), max(1, min(round(scale * each), LONGEST * tokens))) for each in drawn]


# -- generate ----------------------------------------------------------------------------------------------------------


def make_generate(folder: Path) -> Any:
    """The library's model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    model.eval()
    return model


def run_generate(model: Any, requests: list[Request], batch: int) -> float:
    """Seconds for all requests, in batches, each until its longest answer is full."""
    import torch

    began = time.perf_counter()
    for first in range(0, len(requests), batch):
        chosen = requests[first : first + batch]
        width = max(len(request.prompt) for request in chosen)
        ids = torch.tensor([(0,) * (width - len(request.prompt)) + request.prompt for request in chosen])
        mask = torch.tensor([[0] * (width - len(each.prompt)) + [1] * len(each.prompt) for each in chosen])
        longest = max(request.tokens for request in chosen)
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=0,
                top_p=1.0,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=0,
            )
        assert output.shape == (len(chosen), width + longest)
    return time.perf_counter() - began


# -- the server --------------------------------------------------------------------------------------------------------


async def start_server(folder: Path, concurrency: int) -> Any:
    """A replica whose batch holds ``concurrency`` requests."""
    from jackfield.abc.engine import ModelSpec
    from jackfield.abc.rollout import RolloutContext
    from jackfield.plugins import load_plugin

    context = RolloutContext(model=ModelSpec(path=str(folder)), max_model_len=POSITIONS)
    server: Any = load_plugin("rollout", "transformers").build({"max_batch_size": concurrency}, context)
    await server.start()
    return server


async def run_server(server: Any, requests: list[Request]) -> float:
    """Seconds for all requests, sent at once."""
    began = time.perf_counter()
    results = await asyncio.gather(*(server.generate(asked(number, each)) for number, each in enumerate(requests)))
    seconds = time.perf_counter() - began
    assert [len(result.token_ids) for result in results] == [request.tokens for request in requests]
    return seconds


def asked(number: int, request: Request) -> Any:
    """A request as the server's contract has it."""
    from jackfield.abc.rollout import GenerateRequest, SamplingParams

    sampling = SamplingParams(max_new_tokens=request.tokens, temperature=TEMPERATURE, seed=number, ignore_eos=True)
    return GenerateRequest(request_id=str(number), prompt_ids=request.prompt, sampling=sampling)


def make_synchronizer(server: Any, folder: Path) -> Any:
    """What sends all weights of a folder through the in-process checkpoint engine."""
    from safetensors.torch import load_file

    from jackfield.abc.checkpoint_engine import CheckpointEngineContext
    from jackfield.abc.rollout import ServerInfo
    from jackfield.clock import Clock
    from jackfield.plugins import load_plugin
    from jackfield.weights import Replica, WeightSender, WeightSynchronizer

    loaded = load_plugin("checkpoint_engine", "in_process")
    engine: Any = loaded.build({}, CheckpointEngineContext(end="sender", rank=0, world_size=1))
    tensors = load_file(folder / "model.safetensors")
    sender = WeightSender(engine, lambda: ((item for item in tensors.items()), None))
    info = ServerInfo(replica=server.context.replica)
    return WeightSynchronizer([sender], [Replica(server, info)], "in_process", Clock())


async def run_update(
    server: Any, synchronizer: Any, requests: list[Request], version: int, *, decoding: bool = False
) -> dict[str, float]:
    """Update the weights while all requests run, or all decode: milliseconds."""
    running = asyncio.gather(*(server.generate(asked(number, each)) for number, each in enumerate(requests)))
    while (await server.health()).running < len(requests):
        await asyncio.sleep(0)
    while decoding and not all(each.token_ids for each in server._sequences.values()):
        await asyncio.sleep(0)
    report = await synchronizer.sync(version)
    results = await running
    assert any(len(set(result.weight_versions)) == 2 for result in results), "the update came when all had ended"
    return {
        "paused_ms": round(1000 * report.receipts[0].paused_seconds, 1),
        "total_ms": round(1000 * report.seconds, 1),
    }


if __name__ == "__main__":
    main()
