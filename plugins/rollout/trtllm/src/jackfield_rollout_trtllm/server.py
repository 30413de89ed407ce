"""The rollout server: the contract, on TensorRT-LLM's asynchronous LLM API."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from jackfield.abc.rollout import (
    GenerateRequest,
    RolloutContext,
    ServerInfo,
    SleepRequest,
    SleepResult,
    UpdateWeightsRequest,
    WakeUpRequest,
    WakeUpResult,
    WorkerReceipt,
)
from jackfield.errors import PluginError, WeightsError
from jackfield.sdk.relay import MEMORY, InterruptingServer
from jackfield.sdk.requests import Running
from jackfield_huggingface.folders import ReceivedWeights, WeightFolder
from jackfield_rollout_trtllm.config import Config
from jackfield_rollout_trtllm.requests import check_sampling, llm_arguments, new_tokens, sampling_arguments

_TAGS = {"weights": "model", "kv_cache": "kv_cache"}  #: TensorRT-LLM's names of what it can give back
_CONTROL_SECONDS = 120.0


class TrtllmServer(InterruptingServer):
    """One replica: TensorRT-LLM's workers are actors of a Ray cluster that it starts."""

    config: Config
    engine_name = "TensorRT-LLM"

    def __init__(self, config: Config, context: RolloutContext) -> None:
        super().__init__(config, context)
        self._llm: Any = None
        self._weight_folder: WeightFolder | None = None
        self._answers: set[Any] = set()  #: of what runs in TensorRT-LLM
        self._idle = asyncio.Event()  #: nothing runs there
        self._idle.set()

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> ServerInfo:
        """Load the model.

        Raises:
            PluginError: ``plugin.requirement``: TensorRT-LLM is not installed in this interpreter.
            RolloutError: ``engine.model`` when the folder cannot be served, ``rollout.stopped``.
            DeadlineExceeded: it takes too long.
        """
        self._begin()
        self._llm = self._make()
        self._weight_folder = WeightFolder(self.context, self.config.weight_folder)
        try:
            await self._clock.wait_for(
                self._llm.setup_async(), self.config.start_seconds, "TensorRT-LLM to load the model"
            )
        except Exception as error:
            raise self._error(
                f"TensorRT-LLM cannot serve the model: {type(error).__name__}: {error}",
                "engine.model",
                found=self.context.model.path,
                fix="see what TensorRT-LLM has printed",
            ) from error
        return ServerInfo(replica=self.context.replica)  # its workers read what this process receives

    def _make(self) -> Any:
        try:
            from tensorrt_llm._torch.async_llm import AsyncLLM
            from tensorrt_llm.llmapi import KvCacheConfig
        except ImportError as error:
            raise PluginError(
                "TensorRT-LLM is not installed in this interpreter",
                where="the rollout server 'trtllm'",
                found=error,
                fix="give it an environment that has it: cluster.interpreters.rollout; see the plugin's README",
            ) from error
        cache = KvCacheConfig(
            free_gpu_memory_fraction=self.config.memory_fraction, enable_block_reuse=self.config.prefix_caching
        )
        return AsyncLLM(**llm_arguments(self.config, self.context), kv_cache_config=cache)

    async def stop(self) -> None:
        """End TensorRT-LLM; every unfinished request fails with ``rollout.stopped``."""
        self._stopped = True
        await self._fail_all()
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)

    def _down(self) -> str | None:
        return "the server is not running" if self._stopped or self._llm is None else None

    # -- requests --------------------------------------------------------------------------------------------------

    def _refuse(self, request: GenerateRequest) -> None:
        check_sampling(request)

    async def _part(self, running: Running, left: int, seed: int, name: str) -> bool:
        version, known, interruptions = self._version, 0, self._interruptions
        arguments = sampling_arguments(running.request, left, seed + len(running.token_ids))
        answer = self._llm.generate_async(
            [*running.request.prompt_ids, *running.token_ids], self._sampling_params(arguments), streaming=True
        )
        self._answers.add(answer)
        self._idle.clear()
        try:
            async for output in answer:
                completion = output.outputs[0]
                tokens, log_probs = new_tokens(completion, known, name)
                known += len(tokens)
                running.append(tokens, log_probs, version)
                if completion.finish_reason in ("stop", "length"):
                    self._end(running, completion.finish_reason)
                    return True
        except Exception:
            if interruptions == self._interruptions:  # else it was aborted, which may end an answer by an error
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

    # -- pausing and memory ----------------------------------------------------------------------------------------

    async def _interrupt(self) -> None:
        for answer in list(self._answers):
            answer.abort()
        await self._clock.wait_for(self._idle.wait(), _CONTROL_SECONDS, "TensorRT-LLM to end what it has to abort")

    async def sleep(self, request: SleepRequest) -> SleepResult:
        """Give memory back, level 1 that of the KV cache alone; only while paused or idle.

        Raises:
            RolloutError: ``rollout.request`` while decoding; ``rollout.stopped``.
        """
        self._require_running()
        if not self._paused and self._running:
            raise self._error("the server is decoding", "rollout.request", fix="pause it before it sleeps")
        chosen = ("kv_cache",) if request.level == 1 else MEMORY
        tags = [_TAGS[tag] for tag in chosen if tag in self._awake]
        await self._clock.wait_for(self._llm.release(tags), _CONTROL_SECONDS, "TensorRT-LLM to give memory back")
        if request.level == 2:
            self._stale = "the weights were given back by sleep(level=2) and no full update has come"
        self._awake -= set(chosen)
        return SleepResult()

    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        """Take memory again."""
        self._require_running()
        tags = [tag for tag in request.tags or MEMORY if tag not in self._awake]
        if tags:
            resumed = self._llm.resume([_TAGS[tag] for tag in tags])
            await self._clock.wait_for(resumed, _CONTROL_SECONDS, "TensorRT-LLM to take memory")
        self._awake |= set(tags)
        return WakeUpResult(awake=tuple(tag for tag in MEMORY if tag in self._awake))

    # -- weights ---------------------------------------------------------------------------------------------------

    async def _receive(self, request: UpdateWeightsRequest) -> ReceivedWeights:
        """Write what comes into a folder, while TensorRT-LLM decodes."""
        assert self._weight_folder is not None
        return await self._weight_folder.receive(request)

    async def _load(self, request: UpdateWeightsRequest, received: ReceivedWeights) -> Sequence[WorkerReceipt]:
        """Have every worker read the folder, and remove it. TensorRT-LLM forgets cached prefixes at the end."""
        calls = (("jackfield_load", (str(received.folder),)), ("update_weights", (None,)))
        try:
            for method, arguments in calls:
                await self._clock.wait_for(
                    self._llm.collective_rpc(method, args=arguments), request.deadline_seconds, f"workers to {method}"
                )
        except Exception as error:
            raise WeightsError(
                f"TensorRT-LLM has not loaded version {request.version}: {type(error).__name__}: {error}",
                where=f"replica {self.context.replica}",
                fix="see what TensorRT-LLM has printed",
            ) from error
        finally:
            received.remove()
        return [WorkerReceipt(worker=0, digests=received.digests)]
