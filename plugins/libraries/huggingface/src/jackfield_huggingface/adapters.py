"""LoRA adapters (Hu et al. 2021), merged into the weights that they adapt: ``W = W_0 + scale * B A``.

DoRA (Liu et al. 2024) also trains the norm ``m`` of each row: ``W = m * (W_0 + scale * B A) / |W_0 + scale * B A|``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from jackfield.abc.engine import ModelSpec
from jackfield.errors import WeightsError
from jackfield_huggingface.names import auto_class

if TYPE_CHECKING:
    import torch

_SHOWN = 8  #: names in a message
_NAME = re.compile(
    r"(base_model\.model\.)?(?P<module>.+)\."
    r"((?P<factor>lora_A|lora_B)(\.default)?\.weight|(?P<norms>lora_magnitude_vector)(\.default\.weight|\.weight)?)"
)
#: PEFT settings beyond two matrices and DoRA's norms, with the values that switch them off.
_MORE: Mapping[str, tuple[Any, ...]] = {
    "peft_type": (None, "LORA"),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "modules_to_save": (None, [], ()),
}


#: The parts of one layer's adapter, by name: lora_A, ``[r, in]``, lora_B, ``[out, r]``, and for DoRA
#: lora_magnitude_vector, ``[out]``.
_Pair: TypeAlias = "dict[str, torch.Tensor]"


class MergedAdapter:
    """A LoRA adapter that is merged into weights. It keeps the original weights to replace the adapter.

    ``find`` returns the weight of a module (part or all of a parameter), or None if there is no whole one. ``modules``
    are the names of all modules with a weight, which show a layer that an adapter lacks.
    """

    def __init__(
        self, find: Callable[[str], torch.Tensor | None], modules: Callable[[], Iterable[str]] = tuple
    ) -> None:
        self._find = find
        self._modules = modules
        self.bases: dict[str, torch.Tensor] = {}  #: unadapted weights, by module

    def forget(self) -> None:
        """Drop the original weights, because all weights are new."""
        self.bases.clear()

    def merge(self, tensors: Mapping[str, torch.Tensor], peft_config: Mapping[str, Any]) -> None:
        """Merge an adapter in the place of the earlier one. Check all of it before changing anything.

        The product is computed in float32, and the sum is stored in the weight's dtype. ``tensors`` are all of the
        adapter's, under PEFT's names; ``peft_config`` is PEFT's ``LoraConfig``.

        Raises:
            WeightsError: ``weights.missing`` for an unknown tensor, half a pair or a layer without any;
                ``weights.transfer`` for a wrong shape, or a setting beyond LoRA of linear layers.
        """
        import torch

        _check_config(peft_config)
        pairs = self._pairs(tensors)
        weights = {module: self._find(module) for module in pairs}
        homeless = [module for module, weight in weights.items() if weight is None]
        refuse_tensors("the model has no place for these adapter tensors", homeless)
        refuse_tensors("adapter tensors did not arrive", self._missing(pairs, peft_config))
        _check_shapes(pairs, weights, peft_config)
        with torch.no_grad():
            for module in set(self.bases) - set(pairs):
                weight = self._find(module)
                assert weight is not None, "it has been adapted before"
                weight.copy_(self.bases.pop(module))
            for module, pair in pairs.items():
                weight = weights[module]
                assert weight is not None
                base = self.bases.setdefault(module, weight.detach().clone())
                weight.copy_(merged_weight(module, base, pair, peft_config))

    def _pairs(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, _Pair]:
        """Group an adapter's tensors by module."""
        found: dict[str, _Pair] = {}
        unknown = []
        for name, tensor in tensors.items():
            match = _NAME.fullmatch(name)
            if match is None:
                unknown.append(name)
                continue
            found.setdefault(match["module"], {})[match["factor"] or match["norms"]] = tensor
        refuse_tensors("these are no tensors of a LoRA adapter", unknown)
        return found

    def _missing(self, pairs: Mapping[str, _Pair], peft_config: Mapping[str, Any]) -> list[str]:
        """List missing halves of pairs, and missing layers if the config names layers."""
        factors = ("lora_A", "lora_B", *(["lora_magnitude_vector"] if peft_config.get("use_dora") else []))
        missing = [f"{module}.{factor}" for factor in factors for module, pair in pairs.items() if factor not in pair]
        wanted = peft_config.get("target_modules")
        if wanted is None or isinstance(wanted, str) or peft_config.get("layers_to_transform") is not None:
            return missing
        endings = tuple(f".{ending}" for ending in wanted)
        excluded = tuple(f".{ending}" for ending in peft_config.get("exclude_modules") or ())
        return missing + [
            module
            for module in self._modules()
            if f".{module}".endswith(endings) and module not in pairs and not f".{module}".endswith(excluded)
        ]


def merged_weight(
    module: str, base: torch.Tensor, parts: Mapping[str, torch.Tensor], peft_config: Mapping[str, Any]
) -> torch.Tensor:
    """Return the weight of a module with its adapter, float32, in the layout of its weight ``base``.

    ``parts`` are lora_A, ``[r, in]``, lora_B, ``[out, r]``, and for DoRA lora_magnitude_vector, ``[out]``.
    """
    import torch

    down, up = (parts[name].to(base.device, torch.float32) for name in ("lora_A", "lora_B"))
    weight = base.float() + _scale(module, peft_config) * _stored(up @ down, peft_config)
    if peft_config.get("use_dora"):
        rows = _stored(weight, peft_config)
        factor = parts["lora_magnitude_vector"].to(base.device, torch.float32) / torch.linalg.vector_norm(rows, dim=1)
        weight = _stored(factor.unsqueeze(1) * rows, peft_config)
    return weight


def merge_folder(spec: ModelSpec, folder: Path) -> None:
    """Replace the adapter in ``folder`` by its base model with the adapter merged; other files stay there."""
    import torch
    from safetensors.torch import load_file

    file, settings = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    model = auto_class(Path(spec.path), spec.trust_remote_code).from_pretrained(
        spec.path, dtype=getattr(torch, spec.dtype), trust_remote_code=spec.trust_remote_code, local_files_only=True
    )
    weights = model.state_dict(keep_vars=True)
    named = {name.removesuffix(".weight"): weight.data for name, weight in weights.items() if name.endswith(".weight")}
    MergedAdapter(named.get, lambda: named).merge(load_file(file), json.loads(settings.read_text(encoding="utf-8")))
    model.save_pretrained(folder)
    file.unlink()
    settings.unlink()


def _stored(product: torch.Tensor, peft_config: Mapping[str, Any]) -> torch.Tensor:
    """Lay out a product ``[out, in]`` like its weight: gpt2's ``Conv1D`` keeps ``[in, out]``."""
    return product.T if peft_config.get("fan_in_fan_out") else product


def _check_shapes(
    pairs: Mapping[str, _Pair], weights: Mapping[str, torch.Tensor | None], peft_config: Mapping[str, Any]
) -> None:
    wrong = []
    for module, pair in pairs.items():
        weight = weights[module]
        assert weight is not None
        up, down = tuple(pair["lora_B"].shape), tuple(pair["lora_A"].shape)
        shape = tuple(_stored(weight, peft_config).shape) if weight.ndim == 2 else tuple(weight.shape)
        norms = pair.get("lora_magnitude_vector")
        if (up[0], *down[1:]) != shape or up[1:] != down[:1]:
            wrong.append(f"{module} (model {tuple(weight.shape)}, sent B {up}, A {down})")
        elif (norms is not None) != bool(peft_config.get("use_dora")) or (norms is not None and norms.shape != up[:1]):
            sent = "no magnitudes" if norms is None else f"magnitudes {tuple(norms.shape)}"
            wrong.append(f"{module} (model {tuple(weight.shape)}, sent {sent})")
    refuse_tensors("adapter tensors have another shape than the model's", wrong, "weights.transfer")


def _check_config(peft_config: Mapping[str, Any]) -> None:
    if not {"r", "lora_alpha"} <= peft_config.keys():
        raise WeightsError("an adapter has no PEFT config", expected="r and lora_alpha", found=dict(peft_config))
    for name, off in _MORE.items():
        value = peft_config.get(name)
        if getattr(value, "value", value) not in off:
            raise WeightsError(
                f"an adapter with {name}={value!r} cannot be served",
                expected="LoRA of linear layers alone",
                found=f"{name}={value!r}",
            )


def _scale(module: str, peft_config: Mapping[str, Any]) -> float:
    rank = _of(module, peft_config.get("rank_pattern"), peft_config["r"])
    alpha = _of(module, peft_config.get("alpha_pattern"), peft_config["lora_alpha"])
    return float(alpha) / (float(rank) ** 0.5 if peft_config.get("use_rslora") else float(rank))


def _of(module: str, pattern: Mapping[str, Any] | None, default: Any) -> Any:
    """Look a module up by PEFT's own rule: a pattern matches the end of its name."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def refuse_tensors(message: str, names: list[str], code: str = "weights.missing") -> None:
    """Raise a ``WeightsError`` that names tensors, if there are any."""
    if names:
        rest = len(names) - _SHOWN
        raise WeightsError(
            f"{message}: {', '.join(names[:_SHOWN])}" + (f" and {rest} more" if rest > 0 else ""),
            code=code,
            where=names[0].partition(" ")[0],
            fix="check that engine and rollout server load the same model folder",
        )
