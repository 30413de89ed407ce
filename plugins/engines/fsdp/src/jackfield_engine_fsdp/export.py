"""Export full tensors under Hugging Face and PEFT names, and folders for ``from_pretrained``."""

from __future__ import annotations

import enum
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from jackfield_engine_fsdp.loading import without_progress_bars
from jackfield_engine_fsdp.model import TokenModel, has_adapter, is_of_adapter
from jackfield_huggingface.names import CheckpointNames

#: Files beside the weights that are needed to use them; copied unchanged.
COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sharded tensor, detached, in its own memory. A collective operation."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    whole = tensor.full_tensor()
    shares = whole.untyped_storage().data_ptr() == tensor.to_local().untyped_storage().data_ptr()
    return whole.clone() if shares else whole  # with one rank there is nothing to gather


def published_name(name: str) -> str:
    """Return the name of an adapter's parameter in PEFT's files: without the adapter's name."""
    return ".".join(part for part in name.split(".") if part != "default")


def published_tensors(model: TokenModel, names: CheckpointNames) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that inference loads, in checkpoint form: the adapter's, else the model's.

    A group of tensors that are stacked in the model is gathered and then converted, which needs at most about three
    times its size, beside the model.
    """
    if has_adapter(model.language_model):
        for name, parameter in model.language_model.named_parameters():
            if is_of_adapter(name):  # an engine without an optimizer trains nothing, but exports
                yield published_name(name), full(parameter)
        return
    module, dtypes = model.causal_lm, model.published_dtypes
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    for group in names.groups:
        parts = [full(tensors[part].detach().to(dtypes.get(part, tensors[part].dtype))) for part in group.parts]
        yield from names.to_checkpoint(group, parts).items()


def adapter_config(model: TokenModel) -> dict[str, Any] | None:
    """Return the adapter's PEFT config as JSON-ready values; None without an adapter."""
    if not has_adapter(model.language_model):
        return None
    return {name: _plain(value) for name, value in model.language_model.peft_config["default"].to_dict().items()}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def save_folder(model: TokenModel, names: CheckpointNames, source: Path, folder: Path, writes: bool) -> None:
    """Write an empty folder for ``from_pretrained`` (transformers', or PEFT's with an adapter).

    A collective operation: ranks without ``writes`` only take part in the gathering. The tokenizer's files are copied
    from ``source``, the model's folder.
    """
    tensors = {name: tensor.cpu() for name, tensor in published_tensors(model, names) if writes}
    head = {name: full(each) for name, each in model.value_head.named_parameters()} if model.value_head else {}
    if not writes:
        return
    if has_adapter(model.language_model):
        save_file(_contiguous(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
        model.language_model.peft_config["default"].save_pretrained(str(folder))
    else:
        with without_progress_bars(), model.dropout.config_as_loaded():
            model.causal_lm.save_pretrained(str(folder), state_dict=tensors, save_original_format=False)
            if model.published_dtypes:  # the library names the dtype of the master weights
                model.causal_lm.config.dtype = model.dtype
                model.causal_lm.config.save_pretrained(str(folder))
    if head:
        save_file(_contiguous(head), folder / "value_head.safetensors", metadata={"format": "pt"})
    companions = [*COMPANIONS, *(path.name for path in source.glob("*.py"))]
    for path in (source / name for name in companions):
        if path.is_file() and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
