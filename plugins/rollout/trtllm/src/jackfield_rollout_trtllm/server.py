"""The rollout server: the contract, on TensorRT-LLM's asynchronous LLM API."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from jackfield.abc.rollout import GenerateRequest, RolloutContext, ServerInfo, UpdateWeightsRequest
from jackfield.sdk.relay import Running
from jackfield_huggingface.folders import WeightFolder
from jackfield_huggingface.serving import FolderServer
from jackfield_rollout_trtllm.config import Config
from jackfield_rollout_trtllm.requests import check_sampling, llm_arguments, new_tokens, sampling_arguments

_TAGS = {"weights": "model", "kv_cache": "kv_cache"}  #: TensorRT-LLM's names of the memory that it can release
_CONTROL_SECONDS = 120.0


class TrtllmServer(FolderServer):
    """One replica, whose TensorRT-LLM workers are actors of a Ray cluster that it starts."""

    config: Config
    engine_name = "TensorRT-LLM"
    level_1 = ("kv_cache",)

    def __init__(self, config: Config, context: RolloutContext) -> None:
        super().__init__(config, context)
        self._llm: Any = None
        self._answers: set[Any] = set()  #: of requests that run in TensorRT-LLM
        self._idle = asyncio.Event()  #: set while nothing runs there
        self._idle.set()

    async def start(self) -> ServerInfo:
        """Load the model; ``plugin.requirement`` if TensorRT-LLM is not installed."""
        self._begin()
        self._llm = self._make()
        self._weight_folder = WeightFolder(self.context, self.config.weight_folder)
        try:
            await self._clock.wait_for(
                self._llm.setup_async(), self.config.start_seconds, "TensorRT-LLM to load the model"
            )
        except Exception as error:
            raise self.cannot_serve(error) from error
        return ServerInfo(replica=self.context.replica)  # its workers read the weights that this process receives

    def _make(self) -> Any:
        try:
            from tensorrt_llm._torch.async_llm import AsyncLLM
            from tensorrt_llm.llmapi import KvCacheConfig
        except ImportError as error:
            raise self.missing(error) from error
        cache = KvCacheConfig(
            free_gpu_memory_fraction=self.config.memory_fraction, enable_block_reuse=self.config.prefix_caching
        )
        return AsyncLLM(**llm_arguments(self.config, self.context), kv_cache_config=cache)

    async def stop(self) -> None:
        """Stop TensorRT-LLM; every unfinished request fails with ``rollout.stopped``."""
        self._stopped = True
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
        arguments = sampling_arguments(running.request, left, running.seed + len(running.token_ids))
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
