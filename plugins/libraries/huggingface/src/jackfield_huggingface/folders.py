"""Weight folders: updates are received into a folder, and an inference engine loads them from there."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from jackfield.abc.rollout import RolloutContext, UpdateWeightsRequest
from jackfield.errors import WeightsError
from jackfield.sdk.receiver import WeightReceiver, open_receiver
from jackfield_huggingface.names import shapes_of

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"(?:model\.|language_model\.)*layers\.(\d+)\.")  #: of the language model
#: Layers that predict further tokens (Qwen), and what old checkpoints hold beside parameters: frequencies, masks.
_EXTRA = re.compile(r"(?:^|\.)mtp\.|\.inv_freq$|\.(?:attn|attention)\.(?:masked_)?bias$")

_FILE_BYTES = 1 << 30  #: size of one file; at most this much waits in memory to be written


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
        receiver = open_receiver(request, host=self._host)
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
