"""What a merged model was made from, and adapters that were trained on one, which become adapters of its base model."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ORIGIN = "merged_from.json"
_PREFIX, _FACTORS = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
#: settings with which the factors of an adapter are not all that it is
_MORE = (
    "use_dora", "modules_to_save", "lora_bias", "trainable_token_indices", "layer_replication", "megatron_config",
    "alora_invocation_tokens", "target_parameters",
)  # fmt: skip
#: settings of which modules have factors, and how they are scaled
_OWN = ("layers_to_transform", "layers_pattern", "exclude_modules", "revision")


def record(merged: Path, adapter: Path, base: Path) -> None:
    """Write into a merged model's folder which folders it was made from."""
    told = {"adapter": str(adapter.absolute()), "base": str(base.absolute())}
    if origin_of(str(merged)) != told:
        partial = merged / f".{_ORIGIN}.{os.getpid()}"
        partial.write_text(json.dumps(told), encoding="utf-8")
        partial.replace(merged / _ORIGIN)


def origin_of(path: str) -> dict[str, str] | None:
    """Return the folders of the ``adapter`` and the ``base`` of a merged model; None: the folder is none."""
    try:
        found: dict[str, str] = json.loads(Path(path, _ORIGIN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found


def onto_base(folder: Path, adapter: Path, base: str) -> bool:
    """Turn an adapter that was trained on ``adapter`` merged into a model into one of that model, named ``base``.

    Its factors are those of both beside each other, so that it is their sum. Return whether it could be done: it cannot
    if one of them has more than factors of linear layers, such as DoRA or embeddings.
    """
    import torch
    from safetensors.torch import load_file, save_file

    configs = [json.loads((each / CONFIG).read_text(encoding="utf-8")) for each in (adapter, folder)]
    tensors = [load_file(each / WEIGHTS) for each in (adapter, folder)]
    parts = [_factors(*each) for each in zip(configs, tensors, strict=True)]
    if None in parts:
        return False
    modules = {name: [part[name] for part in parts if part and name in part] for part in parts for name in part or ()}
    joined = dict[str, Any]()
    for name, found in modules.items():
        joined[f"{_PREFIX}{name}{_FACTORS[0]}"] = torch.cat([down for down, _ in found]).contiguous()
        joined[f"{_PREFIX}{name}{_FACTORS[1]}"] = torch.cat([up for _, up in found], dim=1).contiguous()
    ranks = {name: sum(len(down) for down, _ in found) for name, found in modules.items()}
    most = Counter(ranks.values()).most_common(1)[0][0]
    other = {name: rank for name, rank in ranks.items() if rank != most}
    targets = [each["target_modules"] for each in configs]
    alike = all(isinstance(each, list) for each in targets) and {*targets[0]} == {*targets[1]} and not other
    described = {
        **configs[1],
        **dict.fromkeys(_OWN),
        "base_model_name_or_path": base,
        "r": most,
        "lora_alpha": most,
        "rank_pattern": other,
        "alpha_pattern": other,
        "use_rslora": False,
        "fan_in_fan_out": any(each.get("fan_in_fan_out") for each in configs),
        "target_modules": targets[1] if alike else sorted(modules),
    }
    save_file(joined, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(described, indent=2), encoding="utf-8")
    return True


def _factors(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, tuple[Any, Any]] | None:
    """Return the factors of each module, in float32 and scaled, by its name; None if there is more than factors."""
    if config.get("peft_type") != "LORA" or any(config.get(name) for name in _MORE):
        return None
    odd = [name for name, tensor in tensors.items() if not name.endswith(_FACTORS) or tensor.ndim != 2]
    if odd or config.get("bias", "none") != "none":
        return None
    found = dict[str, tuple[Any, Any]]()
    for name in tensors:
        if name.endswith(_FACTORS[0]):
            module = name.removesuffix(_FACTORS[0])
            down, up = (tensors[module + each].float() for each in _FACTORS)
            module = module.removeprefix(_PREFIX)
            found[module] = down, up * _scale(config, module, len(down))
    return found


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return by what peft multiplies the product of a module's factors."""
    patterns = (config.get("alpha_pattern") or {}).items()
    alpha = next((own for key, own in patterns if re.match(rf"(.*\.)?({key})$", module)), config["lora_alpha"])
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
