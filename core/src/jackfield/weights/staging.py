"""Weights received into a folder, for engines that load from one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield.errors import WeightsError
from jackfield.sdk.receiver import WeightReceiver
from jackfield.weights.model_folder import shapes_of

if TYPE_CHECKING:
    import torch

__all__ = ["check_complete", "check_tensor", "stage_adapter", "stage_weights", "tensors_of"]

_LAYER = re.compile(r"(?:model\.|language_model\.)*layers\.(\d+)\.")  #: of the language model
#: Layers that predict further tokens (Qwen), and what old checkpoints hold beside parameters: frequencies, masks.
_EXTRA = re.compile(r"(?:^|\.)mtp\.|\.inv_freq$|\.(?:attn|attention)\.(?:masked_)?bias$")

_FILE_BYTES = 1 << 30  #: of one file; as much waits in memory to be written


async def stage_weights(
    receiver: WeightReceiver, arguments: Mapping[str, Any], version: int, expected: Mapping[str, tuple[int, ...]],
    folder: Path, *, tied: bool,
) -> dict[str, str]:  # fmt: skip
    """Receive a model's tensors and write them to safetensors files in ``folder``, which is empty.

    Args:
        receiver: the receiving end.
        arguments: its share of the topology.
        version: of the weights.
        expected: shapes by name; see :func:`tensors_of`.
        folder: to write into.
        tied: whether the output layer is the embedding.

    Returns:
        Digests of what was received, by name.

    Raises:
        WeightsError: ``weights.missing``, ``weights.transfer``, ``weights.storage``.
    """
    waiting: dict[str, torch.Tensor] = {}
    files = size = 0
    wrong: WeightsError | None = None  # raised at the end: the sender is not cut off, and does not fail for it
    async with aclosing(receiver.tensors(arguments, version)) as tensors:
        async for name, tensor in tensors:
            try:
                check_tensor(name, tensor, expected)
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
    check_complete(receiver.digests, expected, tied=tied)
    _write(waiting, folder / f"part-{files:05}.safetensors")
    return dict(receiver.digests)


async def stage_adapter(
    receiver: WeightReceiver, arguments: Mapping[str, Any], version: int, peft_config: Mapping[str, Any], folder: Path
) -> dict[str, str]:
    """Receive a LoRA adapter and write it to ``folder`` as PEFT would; digests of its tensors, by name.

    Raises:
        WeightsError: ``weights.missing``, ``weights.transfer``, ``weights.storage``.
    """
    tensors: dict[str, torch.Tensor] = {}
    async with aclosing(receiver.tensors(arguments, version)) as stream:
        async for name, tensor in stream:
            # a file has no name of an adapter in it
            tensors[name.replace(".default.", ".")] = tensor.detach().to("cpu", copy=True).contiguous()
    _write(tensors, folder / "adapter_model.safetensors")
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in peft_config.items()}
    (folder / "adapter_config.json").write_text(json.dumps(plain, default=str), encoding="utf-8")
    return dict(receiver.digests)


def tensors_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the model in a folder's safetensors files, by name.

    What the folder holds beside the model is left out, as no engine loads it: further layers, which predict several
    tokens (DeepSeek and GLM number them on, Qwen calls them ``mtp``), and buffers.

    Raises:
        WeightsError: ``weights.storage``: there are none.
    """
    found = shapes_of(folder)
    if not found:
        raise WeightsError(
            "the model folder has no safetensors files, by which updates are checked",
            code="weights.storage",
            where=str(folder),
        )
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layers = {**described, **(described.get("text_config") or {})}.get("num_hidden_layers")
    return {name: shape for name, shape in found.items() if not _is_extra(name, layers)}


def _is_extra(name: str, layers: int | None) -> bool:
    number = _LAYER.match(name)
    return _EXTRA.search(name) is not None or (number is not None and layers is not None and int(number[1]) >= layers)


def check_tensor(name: str, tensor: torch.Tensor, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse what the model does not have.

    Raises:
        WeightsError: ``weights.missing`` for a name, ``weights.transfer`` for a shape.
    """
    if name not in expected:
        raise WeightsError(f"the model has no tensor {name}", code="weights.missing", where=name)
    if tuple(tensor.shape) != expected[name]:
        raise WeightsError(
            f"the tensor {name} has another shape than the model's",
            where=name,
            expected=list(expected[name]),
            found=list(tensor.shape),
        )


def check_complete(found: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
    """Refuse half a model; of tied tensors one is enough.

    Raises:
        WeightsError: ``weights.missing``, naming tensors.
    """
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
    except Exception as error:  # safetensors has an error of its own for a full disk
        raise WeightsError(
            "received weights cannot be written",
            code="weights.storage",
            where=str(file),
            found=error,
            fix="make room, or name another folder",
        ) from error
