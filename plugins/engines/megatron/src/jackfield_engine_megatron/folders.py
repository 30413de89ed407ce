"""Hugging Face folders: read the tensors of a model, and write a folder for ``from_pretrained``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from jackfield_engine_megatron.architecture import unusable
from jackfield_engine_megatron.checkpointing import Files
from jackfield_engine_megatron.weights import Weights

#: Patterns of the files beside the weights that are needed to use them; copied unchanged.
_COMPANIONS = ["tokenizer*", "vocab.*", "merges.txt", "spiece.model", "chat_template.*", "added_tokens.json"]
_COMPANIONS += ["special_tokens_map.json", "generation_config.json"]


@contextmanager
def opened(folder: Path, weights: Weights) -> Iterator[Callable[[str], torch.Tensor]]:
    """Give a function that reads a tensor by name; refuse a folder that lacks one (``engine.model``)."""
    with ExitStack() as stack:
        places: dict[str, Any] = {}
        try:
            for path in sorted(folder.glob("*.safetensors")):
                file = stack.enter_context(safe_open(path, "pt"))
                places |= dict.fromkeys(file.keys(), file)
        except (OSError, SafetensorError) as caught:
            raise unusable("a file of weights cannot be read", where=str(folder), found=str(caught)) from caught
        lacking = []
        for name, shape in weights.shapes().items():
            found = tuple(places[name].get_slice(name).get_shape()) if name in places else None
            if found != shape:
                lacking.append(f"{name} {list(shape)}" + ("" if found is None else f" (it is {list(found)})"))
        if lacking:
            raise unusable(
                f"the model folder lacks {len(lacking)} weights",
                where=str(folder),
                expected="every weight of the architecture that config.json names, in safetensors files",
                found="no " + ", ".join(lacking[:4]) + (" …" if len(lacking) > 4 else ""),
            )

        def read(name: str) -> torch.Tensor:
            tensor: torch.Tensor = places[name].get_tensor(name)
            return tensor

        yield read


def save_folder(source: Path, folder: Path, weights: Weights, dtype: torch.dtype, *, writes: bool) -> None:
    """Write the weights, in ``dtype``, and copy what is beside them in ``source``. A collective operation."""
    files = Files(folder, "model-")
    size = 0
    for name, tensor in weights.gathered(lambda parameter: parameter, dtype):
        if writes:
            files.add(name, tensor)
            size += tensor.nbytes
    if not writes:
        return
    files.flush()
    if len(set(files.names.values())) == 1:
        (folder / "model-0.safetensors").rename(folder / "model.safetensors")
    else:
        index = {"metadata": {"total_size": size}, "weight_map": files.names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for path in (path for pattern in _COMPANIONS for path in source.glob(pattern)):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
