"""The rollout server: the contract, on TensorRT-LLM's asynchronous LLM API. Names are those of 1.2."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jackfield.abc.rollout import GenerateRequest, RolloutContext, ServerInfo, UpdateWeightsRequest
from jackfield.errors import PluginError, RolloutError
from jackfield_huggingface.relay import Running, mixed
from jackfield_huggingface.serving import FolderServer, WeightFolder, environment, visible_gpus
from jackfield_huggingface.shaping import PENALTIES, shaping_of
from jackfield_openai import Address
from jackfield_rollout_trtllm.config import Config

EXTENSION = "jackfield_rollout_trtllm.worker.WorkerExtension"


def llm_arguments(config: Config, context: RolloutContext) -> dict[str, Any]:
    """Return the arguments of ``AsyncLLM``, except ``kv_cache_config``, an object of TensorRT-LLM."""
    return {
        **config.arguments,
        "model": context.model.path,
        "dtype": context.model.dtype,
        "trust_remote_code": context.model.trust_remote_code,
        "max_seq_len": context.max_model_len,
        "max_batch_size": config.max_batch_size,
        "tensor_parallel_size": config.tensor_parallel,
        "ray_worker_extension_cls": EXTENSION,
    }


def cache_fraction(share: float, total: int, free: int, weights: int) -> float:
    """Return the part of what loading leaves free that the KV cache may have, so that all has ``share`` of ``total``.

    Sizes are in bytes, ``free`` before the model's ``weights`` are loaded.
    """
    cache, left = share * total - weights, free - weights
    if cache <= 0 or left <= 0:
        raise RolloutError(
            "the replica's part of the GPU has no room for its KV cache",
            code="rollout.failed",
            where="rollout.memory_fraction",
            expected=f"more than {weights} bytes, the model's weights",
            found=f"{share:g} of {total} bytes, of which {free} are free",
            fix="raise it, set cluster.offload: true or cluster.placement: separate, or use more GPUs per replica",
        )
    return min(cache / left, 1.0)


def _cache_fraction(config: Config, context: RolloutContext) -> float:
    if context.memory_fraction is None:
        return config.memory_fraction
    import torch

    files = sum(file.stat().st_size for file in Path(context.model.path).glob("*.safetensors"))
    free, total = torch.cuda.mem_get_info(context.device)
    return cache_fraction(context.memory_fraction, total, free, files // config.tensor_parallel)


def check_sampling(request: GenerateRequest) -> None:
    """Refuse sampling parameters for which TensorRT-LLM's log-probabilities are of another distribution.

    They are of the softmax, which is the distribution drawn from at temperature 1 without filters. Other requests that
    are not greedy raise ``plugin.capability``.
    """
    sampling = request.sampling
    filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    if sampling.temperature == 0 or (sampling.temperature == 1 and not filters):
        return
    raise PluginError(
        "TensorRT-LLM's log-probabilities of such a request are not known to be those that were asked for",
        code="plugin.capability",
        where=request.request_id,
        expected="temperature 0, or temperature 1 without top_k, top_p and min_p",
        found={name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "log_probs")},
    )


def sampling_arguments(request: GenerateRequest, left: int, seed: int, done: int = 0) -> dict[str, Any]:
    """Return the ``SamplingParams`` arguments for ``left`` tokens after the ``done`` first, drawn by ``seed``."""
    sampling, shaping = request.sampling, shaping_of(request)
    greedy = sampling.temperature == 0
    own: dict[str, Any] = {name: getattr(shaping, name) for name in PENALTIES if name in shaping.wanted}
    if shaping.min_tokens > done:
        own["min_tokens"] = shaping.min_tokens - done
    return {
        **own,
        "max_tokens": left,
        "temperature": 1.0 if greedy else sampling.temperature,
        "top_k": 1 if greedy else None,
        "seed": mixed(seed),
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "include_stop_str_in_output": True,
        "ignore_eos": sampling.ignore_eos,
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "logprobs": 1,
    }


def new_tokens(completion: Any, known: int, name: str) -> tuple[list[int], list[float]]:
    """Return a ``CompletionOutput``'s tokens after the first ``known``, and the log-probability of each."""
    tokens: Sequence[int] = list(completion.token_ids)
    entries: Sequence[Any] = list(completion.logprobs or ())
    if len(tokens) != len(entries):
        raise RolloutError(
            "TensorRT-LLM tells another number of log-probabilities than of tokens",
            code="rollout.failed",
            where=name,
            expected=len(tokens),
            found=len(entries),
        )
    pairs = list(zip(tokens, entries, strict=True))[known:]
    return [token for token, _ in pairs], [_log_prob(token, entry, name) for token, entry in pairs]


def _log_prob(token: int, entry: Any, name: str) -> float:
    """Return a token's log-probability; an entry is a number or a mapping with the drawn token."""
    if not isinstance(entry, Mapping):
        return float(entry)
    if token not in entry:
        raise RolloutError(
            "TensorRT-LLM does not tell the log-probability of a token that it drew", code="rollout.failed", where=name
        )
    found: Any = entry[token]
    return float(getattr(found, "logprob", found))


_TAGS = {"weights": "model", "kv_cache": "kv_cache"}  #: TensorRT-LLM's names of the memory that it can release
_CONTROL_SECONDS = 120.0


class TrtllmServer(FolderServer):
    """One replica, whose TensorRT-LLM workers are actors of a Ray cluster that it starts."""

    config: Config
    engine_name = "TensorRT-LLM"
    shaping = frozenset({*PENALTIES, "min_tokens"})
    level_1 = ("kv_cache",)

    def __init__(self, config: Config, context: RolloutContext) -> None:
        super().__init__(config, context)
        self._address = Address()
        self._llm: Any = None
        self._answers: set[Any] = set()  #: of requests that run in TensorRT-LLM
        self._idle = asyncio.Event()  #: set while nothing runs there
        self._idle.set()

    async def start(self) -> ServerInfo:
        """Load the model; ``plugin.requirement`` if TensorRT-LLM is not installed."""
        self._begin()
        seconds, who = self.config.start_seconds, "TensorRT-LLM to load the model"
        with environment(visible_gpus(self.context, self.config.tensor_parallel)):
            self._llm = self._make()
            self._weight_folder = WeightFolder(self.context, self.config.weight_folder)
            await self._set_up(seconds, who)
        url = await self._address.open(self, self.config.openai)
        # its workers read the weights that this process receives
        return ServerInfo(replica=self.context.replica, openai_base_url=url)

    async def _set_up(self, seconds: float, who: str) -> None:
        try:
            await self._clock.wait_for(self._llm.setup_async(), seconds, who)
        except Exception as error:
            raise self.cannot_serve(error) from error

    def _make(self) -> Any:
        try:
            from tensorrt_llm._torch.async_llm import AsyncLLM
            from tensorrt_llm.llmapi import KvCacheConfig
        except ImportError as error:
            raise self.missing(error) from error
        cache = KvCacheConfig(
            free_gpu_memory_fraction=_cache_fraction(self.config, self.context),
            enable_block_reuse=self.config.prefix_caching,
        )
        return AsyncLLM(**llm_arguments(self.config, self.context), kv_cache_config=cache)

    async def stop(self) -> None:
        """Stop TensorRT-LLM; every unfinished request fails with ``rollout.stopped``."""
        self._stopped = True
        await self._address.close()
        await self._fail_all()
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)

    def _down(self) -> str | None:
        return "the server is not running" if self._stopped or self._llm is None else None

    def _refuse(self, request: GenerateRequest) -> None:
        check_sampling(request)

    async def _part(self, running: Running, left: int) -> bool:
        version, known, interruptions = self._version, 0, self._interruptions
        done = len(running.token_ids)
        arguments = sampling_arguments(running.request, left, running.seed + done, done)
        answer = self._llm.generate_async(
            [*running.request.prompt_ids, *running.token_ids], self._sampling_params(arguments), streaming=True
        )
        self._answers.add(answer)
        self._idle.clear()
        try:
            async for output in answer:
                completion = output.outputs[0]
                tokens, log_probs = new_tokens(completion, known, running.name)
                known += len(tokens)
                running.append(tokens, log_probs, version)
                if completion.finish_reason in ("stop", "length"):
                    self._end(running, completion.finish_reason)
                    return True
        except Exception:
            if interruptions == self._interruptions:  # else it was aborted, which may raise
                raise
        except asyncio.CancelledError:
            with suppress(Exception):
                answer.abort()
            raise
        finally:
            self._answers.discard(answer)
            if not self._answers:
                self._idle.set()
        return False

    def _sampling_params(self, arguments: dict[str, Any]) -> Any:
        from tensorrt_llm import SamplingParams

        return SamplingParams(**arguments)

    async def _interrupt(self) -> None:
        for answer in list(self._answers):
            answer.abort()
        await self._clock.wait_for(self._idle.wait(), _CONTROL_SECONDS, "TensorRT-LLM to end what it has to abort")

    async def _give_back(self, tags: list[str], level: int) -> None:
        given_back = self._llm.release([_TAGS[tag] for tag in tags])
        await self._clock.wait_for(given_back, _CONTROL_SECONDS, "TensorRT-LLM to give memory back")

    async def _take_back(self, tags: list[str]) -> None:
        resumed = self._llm.resume([_TAGS[tag] for tag in tags])
        await self._clock.wait_for(resumed, _CONTROL_SECONDS, "TensorRT-LLM to take memory")

    async def _read_folder(self, request: UpdateWeightsRequest, folder: str) -> None:
        """Let every worker read the folder. TensorRT-LLM drops cached prefixes at the end."""
        for method, arguments in (("jackfield_load", (folder,)), ("update_weights", (None,))):
            called = self._llm.collective_rpc(method, args=arguments)
            await self._clock.wait_for(called, request.deadline_seconds, f"workers to {method}")
