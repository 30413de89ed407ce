"""The gateway: what it adds to a request, against a bare web server in the same run.

    python benchmarks/gateway.py [--clients 256] [--turns 8] [--seconds 1.0] [--repeat 3] [--quick] [--json]

Clients in a process of their own hold ``--clients`` conversations of ``--turns`` turns, each over a connection of its
own. The model answers with 16 tokens after half to one and a half times ``--seconds``, drawn from a seed, so that
about ``--clients`` requests are in flight; ``instant`` is the same with a model that waits for nothing, where requests
queue for the processor and latency is the number of clients times the cost of a request.

``gateway``: the agent's web server with one open rollout per conversation, a tokenizer of one token per byte, and the
recording of every turn. ``bare``: the same web server (aiohttp) with a handler that reads the JSON, waits as long and
sends an answer of the same size. Latency is measured at the client, less the time of the model. ``added`` is the
difference of the medians. ``--quick`` shows that the benchmark works, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from jackfield.abc.agent import AgentContext, AgentWorkerContext
from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield.data.tokens import HuggingFaceChatTokenizer
from jackfield.imports import own_process
from jackfield_agent_gateway.agent import GatewayAgent
from jackfield_agent_gateway.settings import GatewayConfig, ProgramConfig
from jackfield_openai.web import WebServer

TOKENS = 16
QUESTION = "How many marbles are there, if each of the boxes has as many as the one before it? " * 4
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> HuggingFaceChatTokenizer:
    """Return a tokenizer of one token per byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    return HuggingFaceChatTokenizer(fast)


def seconds_of(client: int, turn: int, scale: float) -> float:
    """Return how long the model takes for one turn of one client."""
    return scale * random.Random(f"{client}/{turn}").uniform(0.5, 1.5)


async def ask_all(url: str, keys: list[str], turns: int, scale: float) -> list[float]:
    """Hold all conversations; return the latency of each request, less the time of the model, in seconds."""
    found: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    began = asyncio.Event()

    async def converse(client: int, key: str) -> None:
        messages: list[Any] = []
        await began.wait()
        await asyncio.sleep(scale * random.Random(client).random())
        for turn in range(turns):
            takes = seconds_of(client, turn, scale)
            # the time is in the question, where the bare handler and the model find it
            messages.append({"role": "user", "content": f"{QUESTION} [{takes:.6f}]"})
            body = json.dumps({"model": "policy", "messages": messages}).encode()
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            since = time.perf_counter()
            async with session.post(f"{url}/chat/completions", data=body, headers=headers) as response:
                answer = await response.json()
                latency = time.perf_counter() - since - takes
            assert response.status == 200, answer
            messages.append(answer["choices"][0]["message"])
            found.append(latency)

    async with aiohttp.ClientSession(connector=connector) as session:
        work = [asyncio.create_task(converse(client, key)) for client, key in enumerate(keys)]
        began.set()
        await asyncio.gather(*work)
    return found


class Sides:
    """The two servers, which the same clients ask."""

    def __init__(self, clients: int, turns: int, scale: float) -> None:
        self._clients, self._turns, self._scale = clients, turns, scale
        self._tokenizer = make_tokenizer()
        self._ids = (*self._tokenizer.encode_text("x" * (TOKENS - 1)), *self._tokenizer.end_token_ids[:1])

    async def gateway(self) -> dict[str, float]:
        """Measure the gateway."""
        config = GatewayConfig(program=ProgramConfig(external=True))
        with tempfile.TemporaryDirectory() as folder:
            worker = AgentWorkerContext(tokenizer=self._tokenizer, folder=Path(folder))
            shared = await GatewayAgent.start(config, worker)
            context = AgentContext(generate=self._generate, tokenizer=self._tokenizer, shared=shared)
            sampling = {"max_new_tokens": 10**6, "seed": 1}
            rollouts = [shared.gateway.open(context, sampling, {}) for _ in range(self._clients)]
            try:
                measured = await self._measured(shared.gateway.address, [rollout.key for rollout in rollouts])
                for rollout in rollouts:
                    (sequence,) = rollout.recording.sequences()
                    assert self._turns * TOKENS == sum(sequence.response_mask)
            finally:
                for rollout in rollouts:
                    await shared.gateway.end(rollout)
                await GatewayAgent.close(shared)
        return measured

    async def bare(self) -> dict[str, float]:
        """Measure a handler that only waits."""
        message = {"role": "assistant", "content": "x" * (TOKENS - 1), "refusal": None}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": None}
        usage = {"prompt_tokens": 500, "completion_tokens": TOKENS, "total_tokens": 516}
        head = {"id": "chatcmpl-" + "0" * 32, "object": "chat.completion", "created": 1_800_000_000, "model": "policy"}

        async def handle(request: web.Request) -> web.Response:
            given = await request.json()
            await self._wait(given["messages"][-1]["content"])
            return web.json_response({**head, "choices": [choice], "usage": usage})

        app = web.Application()
        app.router.add_post("/v1/chat/completions", handle)
        server = WebServer(app, max_connections=4096, idle_seconds=30.0)
        try:
            return await self._measured(await server.start("127.0.0.1", 0, "port"), ["any"] * self._clients)
        finally:
            await server.close()

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        if self._scale:
            shown = self._tokenizer.decode(request.prompt_ids[-64:], False)
            await self._wait(shown.partition("<|im_end|>")[0])
        return GenerateResult(
            request_id=request.request_id,
            token_ids=self._ids,
            log_probs=(-1.0,) * TOKENS,
            weight_versions=(0,) * TOKENS,
            finish_reason="stop",
        )

    async def _wait(self, content: str) -> None:
        seconds = float(content.rpartition("[")[2].rstrip("]"))
        if seconds:
            await asyncio.sleep(seconds)

    async def _measured(self, url: str, keys: list[str]) -> dict[str, float]:
        """Let a process ask, and return the latencies in milliseconds and the processor time here per request."""
        before, since = _processor_seconds(), time.perf_counter()
        command = (sys.executable, __file__, "--ask", url, str(self._turns), str(self._scale))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        output, _ = await process.communicate(json.dumps(keys).encode())
        assert process.returncode == 0, "the clients failed"
        used, wall = _processor_seconds() - before, time.perf_counter() - since
        latencies = sorted(json.loads(output))
        return {
            "p50_ms": 1e3 * statistics.median(latencies),
            "p90_ms": 1e3 * latencies[int(0.9 * len(latencies))],
            "processor_ms": 1e3 * used / len(latencies),
            "requests_per_s": len(latencies) / wall,
        }


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(clients: int, turns: int, scale: float, repeat: int) -> dict[str, dict[str, float]]:
    """Measure both sides in turn, and return the medians of the repetitions."""
    sides = Sides(clients, turns, scale)
    found: dict[str, list[dict[str, float]]] = {"bare": [], "gateway": []}
    for _ in range(repeat):
        for name, results in found.items():
            results.append(asyncio.run(getattr(sides, name)()))
    return {
        name: {key: statistics.median(result[key] for result in results) for key in results[0]}
        for name, results in found.items()
    }


def main() -> None:
    """Measure, and print a table."""
    if sys.argv[1:2] == ["--ask"]:
        url, turns, scale = sys.argv[2:]
        print(json.dumps(asyncio.run(ask_all(url, json.load(sys.stdin), int(turns), float(scale)))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.quick:
        given.clients, given.turns, given.seconds, given.repeat = 8, 2, 0.05, 1
    own_process()
    measured = {
        name: measure(given.clients, given.turns, scale, given.repeat)
        for name, scale in (("model", given.seconds), ("instant", 0.0))
    }
    if given.json:
        print(json.dumps({"machine": f"{os.cpu_count()} x {platform.machine()}", **measured}))
        return
    print(f"{given.clients} clients, {given.turns} turns, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':18}{'p50 ms':>10}{'p90 ms':>10}{'CPU ms':>10}{'req/s':>10}")
    for name, sides in measured.items():
        for side, result in sides.items():
            print(f"{name + ' ' + side:18}" + "".join(f"{value:10.2f}" for value in result.values()))
        added = sides["gateway"]["p50_ms"] - sides["bare"]["p50_ms"]
        print(f"{name + ' added':18}{added:10.2f}")


if __name__ == "__main__":
    main()
