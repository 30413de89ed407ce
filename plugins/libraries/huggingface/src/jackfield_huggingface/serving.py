"""Shared parts of rollout servers that relay to an engine: reserved arguments, sleep, and weight folders.

An update is received into a weight folder, and the inference engine loads it from there.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from jackfield.abc.rollout import (
    RolloutContext,
    SleepRequest,
    SleepResult,
    UpdateWeightsRequest,
    WakeUpRequest,
    WakeUpResult,
    WorkerReceipt,
)
from jackfield.errors import ConfigError, JackfieldError, PluginError, WeightsError
from jackfield.sdk.receiver import WeightReceiver, reopen_receiver
from jackfield_huggingface.names import shapes_of
from jackfield_huggingface.relay import MEMORY, RelayServer, Running
from jackfield_huggingface.shaping import shaping_of

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"(?:model\.|language_model\.)*layers\.(\d+)\.")  #: of the language model
#: Layers that predict further tokens (Qwen), and what old checkpoints hold beside parameters: frequencies, masks.
_EXTRA = re.compile(r"(?:^|\.)mtp\.|\.inv_freq$|\.(?:attn|attention)\.(?:masked_)?bias$")

_FILE_BYTES = 1 << 30  #: size of one file; at most this much waits in memory to be written


def memory_share(config: Any, context: RolloutContext) -> float:
    """Return the part of each device's memory for a server: what its place leaves, otherwise its setting."""
    return float(config.memory_fraction if context.memory_fraction is None else context.memory_fraction)


def visible_gpus(context: RolloutContext, count: int) -> dict[str, str]:
    """Return what child processes need in their environment to use ``count`` GPUs, the first one the context's.

    It is empty if they would use these anyway.
    """
    kind, _, number = context.device.partition(":")
    if kind != "cuda" or not int(number or 0):
        return {}
    known = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    indexes = range(int(number), int(number) + count)
    return {"CUDA_VISIBLE_DEVICES": ",".join(known[index] if known else str(index) for index in indexes)}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process's environment, for the child processes that are started in the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@attrs.frozen
class ReceivedWeights:
    """The weights of one update, in a folder."""

    folder: Path
    digests: dict[str, str]  #: of what was received, by name

    def remove(self) -> None:
        """Remove the folder, once the engine has read it."""
        shutil.rmtree(self.folder, ignore_errors=True)


class WeightFolder:
    """A receiver of updates for one replica. Its engine is one receiver for any number of workers."""

    def __init__(self, context: RolloutContext, where: str) -> None:
        """Read the expected tensors from the model's folder. Each update gets its own folder in ``where``."""
        self._host, self._where = context.host, where
        self._model = Path(context.model.path)
        self.expected: Mapping[str, tuple[int, ...]] = tensors_of(self._model)  #: shapes by name
        self._tied = bool(_described(self._model).get("tie_word_embeddings"))
        self._last: WeightReceiver | None = None  #: of the last update, which keeps connections and buffers

    async def receive(self, request: UpdateWeightsRequest) -> ReceivedWeights:
        """Receive a version, whole or not at all."""
        if len(request.connect) != 1:
            message = "connect arguments do not fit the replica's workers"
            raise WeightsError(message, expected=1, found=len(request.connect))
        if not Path(self._where).is_dir():
            raise WeightsError(
                "there is no folder for new weights",
                code="weights.storage",
                where="rollout.weight_folder",
                expected="an existing folder",
                found=self._where,
            )
        folder = Path(tempfile.mkdtemp(prefix=f"jackfield-weights-{request.version}-", dir=self._where))
        receiver = self._last = reopen_receiver(self._last, request, host=self._host)
        try:
            if request.kind == "adapter":
                await self._write_adapter(receiver, request, folder)
            else:
                await self._write_model(receiver, request, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return ReceivedWeights(folder, dict(receiver.digests))

    async def _write_model(self, receiver: WeightReceiver, request: UpdateWeightsRequest, folder: Path) -> None:
        """Receive a model's tensors and write them to safetensors files."""
        shutil.copy(self._model / "config.json", folder)
        waiting: dict[str, torch.Tensor] = {}
        files = size = 0
        wrong: WeightsError | None = None  # raised at the end, so that the sender can finish and does not fail
        async with aclosing(receiver.tensors(request.connect[0], request.version)) as tensors:
            async for name, tensor in tensors:
                try:
                    check_tensor(name, tensor, self.expected)
                except WeightsError as error:
                    wrong = wrong or error
                if wrong is not None:
                    continue
                waiting[name] = tensor.detach().to("cpu", copy=True).contiguous()
                size += tensor.nbytes
                if size >= _FILE_BYTES:
                    _write(waiting, folder / f"part-{files:05}.safetensors")
                    files, size, waiting = files + 1, 0, {}
        if wrong is not None:
            raise wrong
        check_complete(receiver.digests, self.expected, tied=self._tied)
        _write(waiting, folder / f"part-{files:05}.safetensors")

    @staticmethod
    async def _write_adapter(receiver: WeightReceiver, request: UpdateWeightsRequest, folder: Path) -> None:
        """Receive a LoRA adapter and write it as PEFT does."""
        tensors: dict[str, torch.Tensor] = {}
        async with aclosing(receiver.tensors(request.connect[0], request.version)) as stream:
            async for name, tensor in stream:
                # a file has no name of an adapter in it
                tensors[name.replace(".default.", ".")] = tensor.detach().to("cpu", copy=True).contiguous()
        _write(tensors, folder / "adapter_model.safetensors")
        settings = dict(request.peft_config or {})
        plain = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}
        (folder / "adapter_config.json").write_text(json.dumps(plain, default=str), encoding="utf-8")


def tensors_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the model in a folder's safetensors files, by name.

    Tensors that no engine loads are left out: buffers, and further layers for multi-token prediction (DeepSeek and GLM
    continue the layer numbers, Qwen calls them ``mtp``). Without such files it raises ``weights.storage``.
    """
    found = shapes_of(folder)
    if not found:
        message = "the model folder has no safetensors files, by which updates are checked"
        raise WeightsError(message, code="weights.storage", where=str(folder))
    layers = _described(folder).get("num_hidden_layers")

    def is_extra(name: str) -> bool:
        number = _LAYER.match(name)
        return bool(_EXTRA.search(name)) or bool(number and layers is not None and int(number[1]) >= layers)

    return {name: shape for name, shape in found.items() if not is_extra(name)}


def _described(folder: Path) -> dict[str, Any]:
    """Return the language model's part of a model folder's configuration."""
    described: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {**described, **(described.get("text_config") or {})}


def check_tensor(name: str, tensor: torch.Tensor, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a tensor that the model does not have: ``weights.missing``, or ``weights.transfer`` for its shape."""
    if name not in expected:
        raise WeightsError(f"the model has no tensor {name}", code="weights.missing", where=name)
    if tuple(tensor.shape) != expected[name]:
        message = f"the tensor {name} has another shape than the model's"
        raise WeightsError(message, where=name, expected=list(expected[name]), found=list(tensor.shape))


def check_complete(found: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
    """Refuse an incomplete model (``weights.missing``), naming tensors; one of tied tensors is enough."""
    ends = ("lm_head.weight", "embed_tokens.weight")
    has_one = tied and any(name.endswith(ends) for name in found)
    missing = [name for name in expected if name not in found and not (has_one and name.endswith(ends))]
    if missing:
        raise WeightsError(
            f"parameters did not come: {', '.join(missing[:4])}" + (" and more" if len(missing) > 4 else ""),
            code="weights.missing",
            expected=f"{len(expected)} tensors",
            found=f"{len(found)} tensors",
        )


def _write(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    if not tensors:
        return
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except Exception as error:  # safetensors raises its own error for a full disk
        raise WeightsError(
            "received weights cannot be written",
            code="weights.storage",
            where=str(file),
            found=error,
            fix="make room, or name another folder",
        ) from error


def without(ours: Mapping[str, str], engine: str, where: str) -> Callable[[Any, Any, Mapping[str, Any]], None]:
    """Return a validator of further arguments of an engine, given in the setting ``where``.

    ``ours`` maps the arguments that a plugin sets itself to the setting to use for each.
    """

    def validate(_: Any, __: Any, value: Mapping[str, Any]) -> None:
        for name in value.keys() & ours.keys():
            raise ConfigError(
                f"the argument {name} of {engine} is not free",
                where=f"{where}.{name}",
                expected="an argument that no setting stands for",
                fix=f"use {ours[name]}",
            )

    return validate


class SleepingServer(RelayServer):
    """A replica whose engine can release memory. A subclass says how."""

    level_1: ClassVar[tuple[str, ...]] = MEMORY  #: memory that sleep of level 1 releases

    def missing(self, error: object = None) -> PluginError:
        """Return the error for a missing package of the engine."""
        return PluginError(
            f"{self.engine_name} is not installed in this interpreter",
            where="the rollout server",
            found=error,
            fix="give it an environment that has it: cluster.interpreters.rollout; see the plugin's README",
        )

    def cannot_serve(self, error: Exception) -> JackfieldError:
        """Return the error for a model that the engine cannot load."""
        return self._error(
            f"{self.engine_name} cannot serve the model: {type(error).__name__}: {error}",
            "engine.model",
            found=self.context.model.path,
            fix=f"see what {self.engine_name} has printed",
        )

    @abstractmethod
    async def _give_back(self, tags: list[str], level: int) -> int | None:
        """Let the engine release memory; return the bytes, if they are known."""

    @abstractmethod
    async def _take_back(self, tags: list[str]) -> None:
        """Let the engine allocate its memory again."""

    async def sleep(self, request: SleepRequest) -> SleepResult:
        """Release memory; only while paused or idle."""
        self._require_running()
        if not self._paused and self._running:
            raise self._error("the server is decoding", "rollout.request", fix="pause it before it sleeps")
        chosen = self.level_1 if request.level == 1 else MEMORY
        freed = await self._give_back([tag for tag in chosen if tag in self._awake], request.level)
        if request.level == 2:
            self._held = None
            self._stale = "the weights were given back by sleep(level=2) and no full update has come"
        self._awake -= set(chosen)
        return SleepResult(freed_bytes=freed or 0)

    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        """Allocate the memory again."""
        self._require_running()
        tags = [tag for tag in request.tags or MEMORY if tag not in self._awake]
        if tags:
            await self._take_back(tags)
        self._awake |= set(tags)
        return WakeUpResult(awake=tuple(tag for tag in MEMORY if tag in self._awake))


_WHOLE = frozenset({"frequency_penalty", "presence_penalty", "grammar"})  #: count or follow the answer's own tokens


class FolderServer(SleepingServer):
    """A replica whose engine reads new weights from a folder, with any number of workers.

    All requests are removed from the engine at a pause or an update. The rest of each request is generated afterwards,
    with its tokens so far appended to the prompt. So one known weight version generates each of the engine's responses,
    and no old KV cache is used. A stop string that begins before an interruption and ends after it is not found.
    """

    _weight_folder: WeightFolder

    def __init__(self, config: Any, context: RolloutContext) -> None:
        super().__init__(config, context)
        self._flows = asyncio.Event()  #: set while requests may be sent to the engine
        self._flows.set()
        self._interruptions = 0

    @abstractmethod
    async def _part(self, running: Running, left: int) -> bool:
        """Generate up to ``left`` tokens after the prompt and the tokens so far; return False if interrupted."""

    @abstractmethod
    async def _interrupt(self) -> None:
        """Remove all running requests from the engine. No forward pass runs once it returns."""

    @abstractmethod
    async def _read_folder(self, request: UpdateWeightsRequest, folder: str) -> None:
        """Let the engine load the weights in a folder, and drop cached prefixes."""

    async def _read(self, running: Running) -> None:
        request = running.request
        budget = min(request.sampling.max_new_tokens, self._max_model_len - len(request.prompt_ids))
        while True:
            await self._flows.wait()
            if running.token_ids and (kept := shaping_of(request).wanted & _WHOLE):
                message = (
                    f"an update interrupted a request with {', '.join(sorted(kept))}, which needs one whole answer"
                )
                raise self._error(message, "rollout.stale", where=request.request_id, fix="send it again")
            interruptions, left = self._interruptions, budget - len(running.token_ids)
            if not left:
                self._end(running, "length")  # it was interrupted after its last token
                return
            if await self._part(running, left):
                return
            if interruptions == self._interruptions:
                raise self._error(f"{self.engine_name} gave request {request.request_id!r} up", "rollout.failed")

    async def _hold(self, wait: bool = False) -> None:
        self._flows.clear()
        if wait:
            await asyncio.gather(*(each.ended for each in self._begun()), return_exceptions=True)
        self._interruptions += 1
        await self._interrupt()

    async def _release(self) -> None:
        self._flows.set()

    async def _receive(self, request: UpdateWeightsRequest) -> ReceivedWeights:
        """Receive weights into a folder while the engine decodes."""
        return await self._weight_folder.receive(request)

    async def _load(self, request: UpdateWeightsRequest, received: ReceivedWeights) -> Sequence[WorkerReceipt]:
        try:
            await self._read_folder(request, str(received.folder))
        except Exception as error:
            said = error.message if isinstance(error, JackfieldError) else f"{type(error).__name__}: {error}"
            raise WeightsError(
                f"{self.engine_name} has not loaded version {request.version}: {said}",
                where=f"replica {self.context.replica}",
                found=getattr(error, "found", None),
                fix=f"see what {self.engine_name} has printed",
            ) from error
        finally:
            received.remove()
        return [WorkerReceipt(worker=0, digests=received.digests)]
