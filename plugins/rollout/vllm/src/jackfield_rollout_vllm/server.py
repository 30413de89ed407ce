"""The rollout server: the contract, on vLLM's asynchronous engine."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.rollout import (
    GenerateRequest,
    RolloutContext,
    ServerInfo,
    SleepRequest,
    SleepResult,
    UpdateWeightsRequest,
    WorkerReceipt,
)
from jackfield.errors import PluginError, WeightsError, rebuilt_error
from jackfield_huggingface.relay import Running, mixed
from jackfield_huggingface.serving import SleepingServer, environment, memory_share, visible_gpus
from jackfield_huggingface.shaping import FIELDS, Likeliest, shaping_of
from jackfield_openai import Address
from jackfield_rollout_vllm.config import Config

_HOTTEST = 2.0  #: highest temperature that vLLM accepts; our logits processor does the rest


def vllm_arguments(request: GenerateRequest, seed: int, max_model_len: int) -> dict[str, Any]:
    """Return the arguments of vLLM's ``SamplingParams`` for a request."""
    sampling, shaping = request.sampling, shaping_of(request)
    greedy = sampling.temperature == 0
    changed = bool(shaping.wanted - {"top_log_probs", "prompt_log_probs", "grammar"})
    heat = min(sampling.temperature, _HOTTEST)
    return {
        "temperature": heat,
        "max_tokens": min(sampling.max_new_tokens, max_model_len - len(request.prompt_ids)),
        "seed": mixed(seed),  # torch's CPU generator uses only the lower half
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "logprobs": shaping.top_log_probs,  # 0: only of the drawn token
        "prompt_logprobs": shaping.top_log_probs if shaping.prompt_log_probs else None,
        "frequency_penalty": shaping.frequency_penalty,
        "presence_penalty": shaping.presence_penalty,
        "repetition_penalty": shaping.repetition_penalty,
        "logit_bias": dict(shaping.logit_bias) or None,
        "min_tokens": shaping.min_tokens,
        "extra_args": {
            "jackfield": {
                "top_k": 0 if greedy else sampling.top_k,
                "top_p": 1.0 if greedy else sampling.top_p,
                "min_p": 0.0 if greedy else sampling.min_p,
                "divisor": 1.0 if greedy else sampling.temperature / heat,
                "raw": (greedy and not changed) or sampling.log_probs == "raw",
            }
        },
    }


def likeliest_of(entries: Mapping[int, Any], count: int) -> Likeliest:
    """Return the ``count`` likeliest of vLLM's log-probs of a place, by token id."""
    ordered = sorted(entries.items(), key=lambda item: item[1].rank)[:count]
    return tuple((token, entry.logprob) for token, entry in ordered if math.isfinite(entry.logprob))


_CPU_CACHE_BYTES = 1 << 30
#: The plugin's logits processors, by whether vLLM's model runner is the second one.
PROCESSORS = {False: "jackfield_rollout_vllm.sampling:Filters", True: "jackfield_rollout_vllm.sampling_v2:Filters"}


class VllmServer(SleepingServer):
    """One replica, which runs vLLM's engine core and workers as child processes."""

    config: Config

    engine_name = "vLLM"
    shaping = FIELDS

    def __init__(self, config: Config, context: RolloutContext) -> None:
        super().__init__(config, context)
        self._address = Address()
        self._engine: Any = None
        self._experts: Any = None  #: with router_replay, the layers that have some
        # an adapter is merged into whole weights
        self.update_kinds = ("full", "adapter", "delta") if config.tensor_parallel == 1 else ("full", "delta")

    async def start(self) -> ServerInfo:
        """Load the model and begin to serve; ``plugin.requirement`` if vLLM is not installed."""
        self._begin()
        self._engine = await self._open_engine()
        model = self.context.model
        if model.router_replay:
            from jackfield_huggingface.routers import RoutedLayers

            self._experts = RoutedLayers.of(model.path, model.trust_remote_code)
        described = self._engine.model_config
        self._vocabulary = described.get_vocab_size()
        self._max_model_len = min(self.context.max_model_len or described.max_model_len, described.max_model_len)
        url = await self._address.open(self, self.config.openai)
        return ServerInfo(replica=self.context.replica, workers=self.config.tensor_parallel, openai_base_url=url)

    async def _open_engine(self) -> Any:
        try:
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise self.missing(error) from error
        try:
            with environment(visible_gpus(self.context, self.config.tensor_parallel)):
                arguments = AsyncEngineArgs(**self._engine_arguments())
                described = arguments.create_engine_config()
                newer = getattr(described, "use_v2_model_runner", False)  # vLLM's choice, and on GPUs the usual one
                described.model_config.logits_processors = [PROCESSORS[newer]]
                engine = AsyncLLM.from_vllm_config(
                    described,
                    enable_log_requests=arguments.enable_log_requests,
                    disable_log_stats=arguments.disable_log_stats,
                )
            await engine.collective_rpc("jackfield_prepare")
        except Exception as error:
            raise self.cannot_serve(error) from error
        return engine

    def _engine_arguments(self) -> dict[str, Any]:
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform

        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        config, model = self.config, self.context.model
        cache = config.kv_cache_bytes
        if cache is None and current_platform.is_cpu():
            cache = _CPU_CACHE_BYTES
        return {
            "disable_log_stats": True,
            "load_format": "safetensors",  # no pickle
            **config.engine,
            "model": model.path,
            "dtype": model.dtype,
            "trust_remote_code": model.trust_remote_code,
            "seed": self.context.seed,
            "max_model_len": self.context.max_model_len,
            "max_num_seqs": config.max_batch_size,
            "tensor_parallel_size": config.tensor_parallel,
            "gpu_memory_utilization": memory_share(config, self.context),
            "kv_cache_memory_bytes": cache,
            "enable_prefix_caching": config.prefix_caching,
            "enable_sleep_mode": not current_platform.is_cpu(),
            "enforce_eager": config.eager,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": "jackfield_rollout_vllm.worker.WorkerExtension",
            "weight_transfer_config": WeightTransferConfig(backend="jackfield"),
            **({"enable_return_routed_experts": True} if model.router_replay else {}),
        }

    async def stop(self) -> None:
        """Stop vLLM's processes; every unfinished request fails with ``rollout.stopped``."""
        self._stopped = True
        await self._address.close()
        engine, self._engine = self._engine, None
        await self._fail_all()
        if engine is not None:
            await self._close_engine(engine)

    async def _close_engine(self, engine: Any) -> None:
        engine.shutdown()

    def _down(self) -> str | None:
        if self._stopped or self._engine is None:
            return "the server is not running"
        return "vLLM's engine core has died" if self._engine.errored else None

    async def _read(self, running: Running) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        arguments = vllm_arguments(running.request, running.seed, self._max_model_len)
        shaping, prompt = shaping_of(running.request), running.request.prompt_ids
        count = shaping.top_log_probs
        if (grammar := shaping.grammar) is not None:
            asked: dict[str, Any] = {grammar.kind: grammar.text, "disable_any_whitespace": grammar.kind == "json"}
            arguments["structured_outputs"] = StructuredOutputsParams(**asked)
        answers = self._engine.generate(
            {"prompt_token_ids": list(running.request.prompt_ids)},
            SamplingParams(output_kind=RequestOutputKind.DELTA, **arguments),
            running.name,
        )
        async for answer in answers:  # vLLM aborts what nobody reads
            part = answer.outputs[0]
            tokens = list(part.token_ids)
            log_probs = [each[token].logprob for token, each in zip(tokens, part.logprobs or (), strict=True)]
            if shaping.prompt_log_probs and answer.prompt_logprobs and not running.prompt:
                pairs = zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
                found = ((each[token], likeliest_of(each, count)) for token, each in pairs)
                running.prompt = tuple((own.logprob, own.rank, top) for own, top in found)
            top = [likeliest_of(each, count) for each in part.logprobs or ()] if count else []
            running.append(tokens, log_probs, self._version, top)
            if part.finish_reason is not None:
                if self._experts is not None:
                    known = len(running.request.prompt_ids) + len(running.token_ids) - 1
                    running.routed_experts = self._experts.experts(part.routed_experts, known)
                self._end(running, "length" if part.finish_reason == "length" else "stop")
                return

    async def _abort(self, chosen: Sequence[Running]) -> None:
        await super()._abort(chosen)
        if chosen and self._engine is not None:
            await self._engine.is_paused()  # answers once vLLM has processed the aborts

    async def sleep(self, request: SleepRequest) -> SleepResult:
        """Release memory; only while paused or idle, and only on a GPU: ``plugin.capability`` on a CPU."""
        from vllm.platforms import current_platform

        self._require_running()
        if current_platform.is_cpu():
            raise PluginError(
                "vLLM cannot sleep on a CPU",
                code="plugin.capability",
                where=f"replica {self.context.replica}",
                expected="a GPU",
                fix="set cluster.offload: false",
            )
        return await super().sleep(request)

    async def _give_back(self, tags: list[str], level: int) -> None:
        await self._engine.sleep(level, mode="keep")

    async def _take_back(self, tags: list[str]) -> None:
        await self._engine.wake_up(tags)

    async def _hold(self, wait: bool = False) -> None:
        await self._engine.pause_generation(mode="wait" if wait else "keep", clear_cache=False)

    async def _release(self) -> None:
        await self._engine.resume_generation()

    async def _receive(self, request: UpdateWeightsRequest) -> None:
        """Do nothing: workers load tensors as they receive them."""
        if len(request.connect) != self.config.tensor_parallel:
            raise WeightsError(
                "connect arguments do not fit the replica's workers",
                expected=self.config.tensor_parallel,
                found=len(request.connect),
            )

    async def _load(self, request: UpdateWeightsRequest, received: None) -> Sequence[WorkerReceipt]:
        """Update every worker; recompute running requests with the new weights, and drop cached prefixes."""
        info = {"request": attrs.asdict(request), "host": self.context.host}
        answers = await self._engine.collective_rpc("jackfield_update", args=(info,))
        for answer in answers:
            if "error" in answer:
                error = rebuilt_error(answer["error"], f"replica {self.context.replica}")
                if isinstance(error, WeightsError | PluginError):
                    raise error
                details: dict[str, Any] = {"where": error.where, "found": error.found, "fix": error.fix}
                raise WeightsError(f"the update broke off: {error.message}", **details)
        await self._engine.reset_prefix_cache(reset_running_requests=True)
        return [WorkerReceipt(worker=number, digests=answer["digests"]) for number, answer in enumerate(answers)]
