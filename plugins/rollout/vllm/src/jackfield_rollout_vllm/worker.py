"""The part in each of vLLM's workers: the receiving end of a weight transfer, and sampling.

vLLM loads :class:`WorkerExtension` into its worker class before the model is made.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import utils as layer_utils
from vllm.platforms import current_platform
from vllm.v1.sample.sampler import Sampler

from jackfield.abc.rollout import UpdateWeightsRequest
from jackfield.errors import error_fields
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import HeldWeights, WeightReceiver, reopen_receiver
from jackfield_huggingface.adapters import MergedAdapter
from jackfield_huggingface.serving import check_complete, check_tensor, tensors_of
from jackfield_rollout_vllm.sampling import RawLogProbs

BACKEND = "jackfield"  #: the name of the receiver among vLLM's weight transfer engines


def _use_plain_linear(layer: Any, remove_weight: bool) -> None:
    """Keep linear layers unpacked: on a CPU vLLM would use stale packed weights after an update."""
    layer.cpu_linear = torch.nn.functional.linear


if current_platform.is_cpu():
    layer_utils.dispatch_cpu_unquantized_gemm = _use_plain_linear


@dataclass
class InitInfo(WeightTransferInitInfo):
    """An empty record: every update has its own topology."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The description of one update for the receiving end."""

    request: dict[str, Any]  #: the fields of an :class:`~jackfield.abc.rollout.UpdateWeightsRequest`
    host: str


class CheckpointEngineReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """A receiver that uses any of Jackfield's checkpoint engines, and loads parameters in place."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.digests: dict[str, str] = {}  #: of the last update
        self._expected: dict[str, tuple[int, ...]] = {}
        self._held = HeldWeights(self._loaded)
        self._last: WeightReceiver | None = None  #: of the last update, which keeps connections and buffers
        self._adapter = MergedAdapter(
            lambda module: self._loaded(f"{module}.weight"),
            lambda: (name.removesuffix(".weight") for name in self._expected if name.endswith(".weight")),
        )

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do: weights are loaded in place."""

    def finish_weight_update(self) -> None:
        """Nothing to do: weights are loaded in place."""

    def shutdown(self) -> None:
        """Release what the checkpoint engine keeps."""
        self._last = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive all weights of one version."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive the tensors, and load each as it arrives."""
        asyncio.run(self._receive(update_info))

    async def _receive(self, info: UpdateInfo) -> None:
        request, worker = UpdateWeightsRequest(**info.request), self.parallel_config.rank
        place: dict[str, Any] = {"device": str(self.device), "host": info.host}
        receiver = self._last = reopen_receiver(self._last, request, worker, **place, held=self._held)
        self._expected, self.digests = tensors_of(Path(self.model_config.model)), {}
        if request.kind == "delta":
            await self._receive_delta(receiver, request)
            return
        async with aclosing(receiver.tensors(request.connect[worker], request.version)) as tensors:
            if request.kind == "adapter":
                adapter = {name: tensor.clone() async for name, tensor in tensors}
                self._adapter.merge(adapter, dict(request.peft_config or {}))
                self.digests = dict(receiver.digests)
                return
            self._adapter.forget()
            async for name, tensor in tensors:
                check_tensor(name, tensor, self._expected)
                self.model.load_weights([(name, tensor.to(self.device))])
                self.digests[name] = self._loaded_digest(name, tensor, receiver.digests[name])
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        check_complete(self.digests, self._expected, tied=tied)

    async def _receive_delta(self, receiver: WeightReceiver, request: UpdateWeightsRequest) -> None:
        connect = request.connect[self.parallel_config.rank]
        changes = await receiver.changes(connect, request.version, request.base_version)
        digests = self._held.unchanged(changes)
        for name, tensor in self._held.apply(changes, request.version, digests):
            check_tensor(name, tensor, self._expected)
            self.model.load_weights([(name, tensor.to(self.device))])
        self.digests = digests

    def _loaded_digest(self, name: str, sent: torch.Tensor, received: str) -> str:
        """Return the parameter's digest; if it is sharded or of another dtype, that of the received tensor."""
        found = self._loaded(name)
        return received if found is None or found.dtype != sent.dtype else digest(found)

    def _loaded(self, name: str) -> torch.Tensor | None:
        """Return the part of a parameter with a tensor's values; None if it is not one whole part.

        vLLM packs tensors side by side: query, key and value; gate and up.
        """
        if self.parallel_config.tensor_parallel_size > 1 or name not in self._expected:
            return None
        parameters: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        if name in parameters:
            return parameters[name][: self._expected[name][0]]  # a vocabulary may be padded
        for packed, parts in getattr(self.model, "packed_modules_mapping", {}).items():
            for position, part in enumerate(parts):
                if f".{part}." not in name:
                    continue
                whole = parameters.get(name.replace(f".{part}.", f".{packed}."))
                if whole is None:
                    continue
                sizes = [self._expected[name.replace(f".{part}.", f".{each}.")][0] for each in parts]
                first = sum(sizes[:position])
                return whole[first : first + sizes[position]]
        return None


class WorkerExtension:
    """Methods that are added to vLLM's worker; ``self`` is the worker."""

    weight_transfer_engine: CheckpointEngineReceiver
    model_runner: Any

    def jackfield_prepare(self) -> None:
        """Enable raw log-probabilities for requests that ask for them; called once, after loading."""
        old = self.model_runner.sampler
        if not isinstance(old, Sampler):  # of the second model runner
            from jackfield_rollout_vllm.sampling_v2 import return_raw_log_probs

            return_raw_log_probs(old)
            return
        sampler = RawLogProbs(logprobs_mode=old.logprobs_mode, use_fp64_gumbel=old.use_fp64_gumbel)
        self.model_runner.sampler = sampler.to(self.model_runner.device)

    def jackfield_update(self, info: dict[str, Any]) -> dict[str, Any]:
        """Run vLLM's phases of an update; return digests by name, or the error, which keeps its class so."""
        worker: Any = self
        try:
            worker.start_weight_update()
            worker.update_weights(info)
            worker.finish_weight_update()
        except Exception as error:
            return {"error": error_fields(error)}
        return {"digests": self.weight_transfer_engine.digests}


WeightTransferEngineFactory.register_engine(BACKEND, CheckpointEngineReceiver)
