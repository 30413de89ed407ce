"""The rollout server: the contract, on SGLang's HTTP server, a child process. Names and types are of SGLang 0.5.23."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import aiohttp
import numpy as np

from jackfield.abc.rollout import GenerateRequest, RolloutContext, SamplingParams, ServerInfo, UpdateWeightsRequest
from jackfield.clock import Clock
from jackfield.errors import PluginError, RolloutError, WeightsError
from jackfield_huggingface.relay import Running, mixed
from jackfield_huggingface.serving import FolderServer, WeightFolder, memory_share, visible_gpus
from jackfield_huggingface.shaping import PENALTIES, shaping_of
from jackfield_openai import Address
from jackfield_rollout_sglang.config import Config

_POLL_SECONDS = 0.5  #: between two checks whether a starting server answers
_GRACE_SECONDS = 15.0  #: for a server to end by itself


class SglangProcess:
    """One server: its start, its requests and its end.

    All requests raise ``RolloutError`` (``rollout.failed``, with SGLang's message) if the status is not 200, and
    ``aiohttp.ClientError`` without an answer.
    """

    def __init__(self, clock: Clock, host: str, port: int) -> None:
        self._clock = clock
        bracketed = f"[{host}]" if ":" in host else host
        self.url = f"http://{bracketed}:{port}"
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def ended(self) -> str | None:
        """Return how the process ended; None while it runs."""
        if self._process is None or self._process.returncode is None:
            return None
        return f"SGLang's server has ended with code {self._process.returncode}"

    async def start(
        self, arguments: Sequence[str], seconds: float, variables: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Start the server and wait until it answers; ``rollout.stopped`` if it ends instead.

        ``variables`` are set in its environment.
        """
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sglang.launch_server", *arguments, stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True, env={**os.environ, **variables},
        )  # fmt: skip
        await self.connect(seconds)

    async def connect(self, seconds: float) -> None:
        """Wait until the server answers, started by :meth:`start` or before."""
        no_deadline = aiohttp.ClientTimeout(total=None, sock_connect=_GRACE_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)  # one connection per running request
        self._session = aiohttp.ClientSession(self.url, timeout=no_deadline, connector=connector)
        await self._clock.wait_for(self._ready(), seconds, "SGLang's server to load the model")

    async def _ready(self) -> None:
        assert self._session is not None
        while True:
            if self.ended is not None:
                raise RolloutError(self.ended, code="rollout.stopped", fix="see what SGLang has printed")
            with suppress(aiohttp.ClientError):
                async with self._session.get("/health") as answer:
                    if answer.status == 200:
                        return
            await self._clock.sleep(_POLL_SECONDS)

    async def post(self, path: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
        """Post a request and return the answer's JSON, if it is JSON."""
        return await self._clock.wait_for(self._post(path, body), seconds, f"SGLang to answer {path}")

    async def generate(self, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield answers of ``/generate``: one, or with ``stream`` several. Closing it aborts the request."""
        assert self._session is not None
        if not body["stream"]:
            yield await self._post("/generate", body)
            return
        async with self._session.post("/generate", json=body) as answer:
            await _check("/generate", answer)
            async for line in answer.content:
                text = line.strip().removeprefix(b"data: ")
                if text == b"[DONE]":
                    return
                if text:
                    yield json.loads(text)

    async def _post(self, path: str, body: Mapping[str, Any] | None) -> Any:
        assert self._session is not None
        async with self._session.post(path, json=body) as answer:
            await _check(path, answer)
            return await answer.json() if answer.content_type == "application/json" else None

    async def close(self) -> None:
        """Stop the server and its descendants; idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        process = self._process
        if process is None or process.returncode is not None:
            return
        for each in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, each)
            with suppress(Exception):
                await self._clock.wait_for(process.wait(), _GRACE_SECONDS, "SGLang's server to end")
                return


async def _check(path: str, answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        raise RolloutError(
            f"SGLang has refused {path}",
            code="rollout.failed",
            where=path,
            expected="status 200",
            found=f"{answer.status}: {(await answer.text())[:1000]}",
        )


def free_port(host: str) -> int:
    """Return a port that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


_MASK_TOKENS = 4096  #: SGLang's own default of --sampling-mask-max-tokens


def launch_arguments(config: Config, context: RolloutContext, port: int) -> list[str]:
    """Return the arguments of ``python -m sglang.launch_server``."""
    chosen: dict[str, Any] = {
        **config.arguments,
        "model-path": context.model.path,
        "dtype": context.model.dtype,
        "trust-remote-code": context.model.trust_remote_code,
        "random-seed": context.seed,
        "context-length": context.max_model_len,
        "max-running-requests": config.max_batch_size,
        "tp-size": config.tensor_parallel,
        "mem-fraction-static": memory_share(config, context),
        "disable-radix-cache": not config.prefix_caching,
        "enable-deterministic-inference": config.deterministic,
        "enable-memory-saver": True,
        "enable-weights-cpu-backup": True,
        "incremental-streaming-output": True,
        "enable-return-routed-experts": context.model.router_replay,
        "host": context.host,
        "port": port,
    }
    if context.model.lora is not None:
        chosen |= {"enable-lora": True, "max-lora-rank": context.model.lora.rank, "lora-target-modules": "all"}
    line: list[str] = []
    for name, value in chosen.items():
        if value is True:
            line.append(f"--{name}")
        elif value is not None and value is not False:
            line += [f"--{name}", str(value)]
    return line


def check_log_probs(request: GenerateRequest) -> None:
    """Refuse log-probabilities that SGLang does not compute.

    Its own are those before top-k, top-p and min-p, at the request's temperature. It reports those of the filtered
    distribution only for a finite top-k. Other requests raise ``plugin.capability``.
    """
    sampling = request.sampling
    expected = None
    if sampling.log_probs == "raw" and sampling.temperature not in (0, 1):
        expected = "log_probs: raw with temperature 1 or 0"
    if _asks_for_mask(sampling) and not 1 <= sampling.top_k <= _MASK_TOKENS:
        expected = f"log_probs: processed with top_p or min_p needs a top_k of 1 to {_MASK_TOKENS}"
    if expected is not None:
        raise PluginError(
            "SGLang does not compute these log-probabilities",
            code="plugin.capability",
            where=request.request_id,
            expected=expected,
            found={name: getattr(sampling, name) for name in ("temperature", "log_probs", "top_k", "top_p", "min_p")},
        )


def _asks_for_mask(sampling: SamplingParams) -> bool:
    """Return whether tokens are drawn from a distribution other than the softmax."""
    filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return sampling.temperature > 0 and sampling.log_probs == "processed" and filters


def generate_body(running: Running, left: int, adapter: str | None, experts: bool = False) -> dict[str, Any]:
    """Return the body of ``/generate`` for the rest of a request, of up to ``left`` tokens.

    SGLang hashes the seed with each token's position. ``adapter`` is one that SGLang has loaded; ``experts``: SGLang
    returns those of each token.
    """
    request = running.request
    sampling, shaping = request.sampling, shaping_of(request)
    greedy = sampling.temperature == 0
    body: dict[str, Any] = {
        "rid": running.name,
        "input_ids": [*request.prompt_ids, *running.token_ids],
        "sampling_params": {
            "max_new_tokens": left,
            "temperature": sampling.temperature,
            "top_p": 1.0 if greedy else sampling.top_p,
            "top_k": -1 if greedy or not sampling.top_k else sampling.top_k,
            "min_p": 0.0 if greedy else sampling.min_p,
            "stop": list(sampling.stop) or None,
            "stop_token_ids": list(sampling.stop_token_ids) or None,
            "ignore_eos": sampling.ignore_eos,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": mixed(running.seed),
        },
        "return_logprob": True,
        "stream": running.stream is not None,
    }
    if _asks_for_mask(sampling):
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
    own = body["sampling_params"]
    own |= {name: getattr(shaping, name) for name in PENALTIES if name in shaping.wanted}
    if shaping.min_tokens:
        own["min_new_tokens"] = max(shaping.min_tokens - len(running.token_ids), 0)
    if shaping.logit_bias:
        own["logit_bias"] = {str(token): bias for token, bias in shaping.logit_bias.items()}
    if shaping.grammar is not None:
        own["json_schema" if shaping.grammar.kind == "json" else "regex"] = shaping.grammar.text
    if adapter is not None:
        body["lora_path"] = adapter
    if experts:
        body["return_routed_experts"] = True
    return body


def read_answer(answer: Mapping[str, Any], body: Mapping[str, Any]) -> tuple[list[int], list[float], str | None]:
    """Parse an answer of ``/generate``, whole or of a stream; raise the error that it reports.

    Return new tokens, their log-probabilities, and how the request ended: ``stop``, ``length`` or ``abort``.
    """
    if "error" in answer or "meta_info" not in answer:
        raise RolloutError("SGLang refuses the request", code="rollout.failed", where=body["rid"], found=dict(answer))
    meta = answer["meta_info"]
    tokens = [int(token) for token in answer.get("output_ids") or ()]
    if body.get("return_sampling_mask"):
        log_probs = [float(value) for value in meta.get("output_token_sampling_logprobs") or ()]
    else:
        log_probs = [float(entry[0]) for entry in meta.get("output_token_logprobs") or ()]
    if len(tokens) != len(log_probs):
        raise RolloutError(
            "SGLang tells another number of log-probabilities than of tokens",
            code="rollout.failed",
            where=body["rid"],
            expected=len(tokens),
            found=len(log_probs),
        )
    finish = meta.get("finish_reason")
    return tokens, log_probs, finish and finish["type"]


def read_experts(answer: Mapping[str, Any]) -> Any:
    """Return the experts in an answer of ``/generate``, int32 of all layers in one dimension; None without any."""
    encoded = answer["meta_info"].get("routed_experts")
    return None if encoded is None else np.frombuffer(base64.b64decode(encoded), dtype=np.int32)


_CONTROL_SECONDS = 120.0  #: for SGLang to pause, go on, sleep or wake up


class SglangServer(FolderServer):
    """One replica, which runs SGLang's server as a child process."""

    config: Config
    engine_name = "SGLang"
    #: its likeliest tokens are not of the distribution that is drawn from
    shaping = frozenset({*PENALTIES, "logit_bias", "min_tokens", "grammar"})
    update_kinds = ("full", "adapter")

    def __init__(self, config: Config, context: RolloutContext) -> None:
        super().__init__(config, context)
        self._address = Address()
        self._sglang: SglangProcess | None = None
        self._adapter: str | None = None
        self._experts: Any = None  #: with router_replay, the layers that have some

    async def start(self) -> ServerInfo:
        """Start SGLang and wait until the model is loaded; ``plugin.requirement`` if it is not installed."""
        self._begin()
        self._require_sglang()
        self._weight_folder = WeightFolder(self.context, self.config.weight_folder)
        model = self.context.model
        if model.router_replay:
            from jackfield_huggingface.routers import RoutedLayers

            self._experts = RoutedLayers.of(model.path, model.trust_remote_code)
        port = free_port(self.context.host)
        self._sglang = SglangProcess(self._clock, self.context.host, port)
        await self._open(self._sglang, launch_arguments(self.config, self.context, port))
        url = await self._address.open(self, self.config.openai)  # workers read the weights that this process receives
        return ServerInfo(replica=self.context.replica, openai_base_url=url)

    def _require_sglang(self) -> None:
        if find_spec("sglang") is None:
            raise self.missing()

    async def _open(self, sglang: SglangProcess, arguments: list[str]) -> None:
        variables = visible_gpus(self.context, self.config.tensor_parallel)
        await sglang.start(arguments, self.config.start_seconds, variables)

    async def stop(self) -> None:
        """Stop SGLang; every unfinished request fails with ``rollout.stopped``."""
        self._stopped = True
        await self._address.close()
        await self._fail_all()
        if self._sglang is not None:
            await self._sglang.close()

    def _down(self) -> str | None:
        if self._stopped or self._sglang is None:
            return "the server is not running"
        return self._sglang.ended

    async def _post(self, path: str, body: dict[str, Any] | None, seconds: float = _CONTROL_SECONDS) -> Any:
        assert self._sglang is not None
        return await self._sglang.post(path, body, seconds)

    def _refuse(self, request: GenerateRequest) -> None:
        check_log_probs(request)

    async def _part(self, running: Running, left: int) -> bool:
        assert self._sglang is not None
        version, body = self._version, generate_body(running, left, self._adapter, self._experts is not None)
        try:
            async with aclosing(self._sglang.generate(body)) as answers:
                async for each in answers:
                    tokens, log_probs, reason = read_answer(each, body)
                    running.append(tokens, log_probs, version)
                    if reason in ("stop", "length"):
                        if self._experts is not None:
                            known = len(running.request.prompt_ids) + len(running.token_ids) - 1
                            running.routed_experts = self._experts.experts(read_experts(each), known)
                        self._end(running, "stop" if reason == "stop" else "length")
                        return True
        except asyncio.CancelledError:
            if self._down() is None:
                with suppress(Exception):
                    await self._post("/abort_request", {"rid": body["rid"]})
            raise
        return False

    async def _interrupt(self) -> None:
        await self._post("/pause_generation", {"mode": "abort"})

    async def _release(self) -> None:
        await self._post("/continue_generation", {})
        await super()._release()

    async def _give_back(self, tags: list[str], level: int) -> None:
        await self._post("/flush_cache", None)
        await self._post("/release_memory_occupation", {"tags": tags})

    async def _take_back(self, tags: list[str]) -> None:
        await self._post("/resume_memory_occupation", {"tags": tags})

    async def _read_folder(self, request: UpdateWeightsRequest, folder: str) -> None:
        if request.kind == "full":
            body = {"model_path": folder, "load_format": "safetensors", "flush_cache": True}
            body["weight_version"] = str(request.version)
            await self._post("/update_weights_from_disk", body, request.deadline_seconds)
            await self._forget_adapter()
            return
        if self.context.model.lora is None:
            raise WeightsError("an adapter came for a replica that was started without", fix="set model.lora")
        await self._forget_adapter()
        body = {"lora_name": f"jackfield-{request.version}", "lora_path": folder, "pinned": True}
        await self._post("/load_lora_adapter", body, request.deadline_seconds)
        self._adapter = f"jackfield-{request.version}"

    async def _forget_adapter(self) -> None:
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            await self._post("/unload_lora_adapter", {"lora_name": adapter})
