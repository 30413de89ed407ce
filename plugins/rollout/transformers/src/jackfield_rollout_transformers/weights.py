"""New weights into a loaded model, in place, and weights out of the way while the server sleeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from jackfield.abc.rollout import UpdateWeightsRequest
from jackfield.errors import WeightsError
from jackfield_rollout_transformers.model import LoadedModel

__all__ = ["AdapterUpdate", "FullUpdate", "ModelWeights"]

#: ``digest(tensor) -> str``; handed in, so that this module can be tested alone
Digest = Callable[[Tensor], str]


class ModelWeights:
    """The parameters of one model: where they are and how they change.

    ``bases`` holds the unadapted weight of every parameter that an adapter is merged into.
    """

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.bases: dict[str, Tensor] = {}
        self.intact = True  #: whether the base weights are known to be whole
        self._shapes: list[torch.Size] = [parameter.shape for parameter in model.parameters()]

    def targets(self) -> dict[str, Tensor]:
        """Parameters and saved buffers by Hugging Face name; a tied parameter has several."""
        return dict(self.model.module.state_dict(keep_vars=True))

    def begin(self, request: UpdateWeightsRequest, digest: Digest) -> FullUpdate | AdapterUpdate:
        """An empty update of the kind that is asked for."""
        if request.kind == "adapter":
            return AdapterUpdate(self, request.peft_config or {}, digest)
        return FullUpdate(self, digest)

    def to(self, device: torch.device | Literal["cpu"]) -> int:
        """Move every parameter; return the bytes that left their device."""
        moved = 0
        for tensor in [*self.model.parameters(), *self.bases.values()]:
            if tensor.device != torch.device(device):
                moved += tensor.nbytes
                tensor.data = tensor.data.to(device)
        return moved

    def drop(self) -> int:
        """Give the parameters' memory back, their contents with it; return the bytes."""
        freed = sum(tensor.nbytes for tensor in [*self.model.parameters(), *self.bases.values()])
        self.bases, self.intact = {}, False
        for parameter in self.model.parameters():
            parameter.data = parameter.data.new_empty(0)
        return freed

    def allocate(self) -> None:
        """Take memory for the parameters again. What was dropped has no contents until a full update."""
        for parameter, shape in zip(self.model.parameters(), self._shapes, strict=True):
            if parameter.shape != shape:
                parameter.data = torch.zeros(shape, dtype=parameter.dtype, device=self.model.device)


class FullUpdate:
    """All parameters, each copied into its place as it arrives."""

    def __init__(self, weights: ModelWeights, digest: Digest) -> None:
        self._weights = weights
        self._digest = digest
        self._targets = weights.targets()
        self._loaded: dict[str, torch.dtype] = {}
        self._unknown: list[str] = []
        self._misshapen: list[str] = []

    @torch.no_grad()
    def load(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor. A wrong one is remembered, so that the sender is not cut off and all are named."""
        self._weights.intact = False
        target = self._targets.get(name)
        if target is None:
            self._unknown.append(name)
        elif target.shape != tensor.shape:
            self._misshapen.append(f"{name} (model {tuple(target.shape)}, sent {tuple(tensor.shape)})")
        else:
            target.data.copy_(tensor)
            self._loaded[name] = tensor.dtype

    def finish(self, received: Mapping[str, str]) -> dict[str, str]:
        """Check that the model is complete; return the digests of what it holds now, by name.

        Where a tensor was cast to the model's dtype, the digest is that of the tensor ``received``.

        Raises:
            WeightsError: ``weights.missing`` for names, ``weights.transfer`` for shapes.
        """
        _refuse_names("the model has no such parameter", self._unknown)
        _refuse_shapes(self._misshapen)
        _refuse_names("parameters did not arrive", self._missing())
        self._weights.bases, self._weights.intact = {}, True
        return {
            name: self._digest(self._targets[name].data) if self._targets[name].dtype == dtype else received[name]
            for name, dtype in self._loaded.items()
        }

    def _missing(self) -> list[str]:
        arrived = {id(self._targets[name]) for name in self._loaded}
        missing: dict[int, str] = {}
        for name, target in self._targets.items():
            if isinstance(target, torch.nn.Parameter) and id(target) not in arrived:
                missing.setdefault(id(target), name)
        return list(missing.values())


@attrs.define(eq=False)
class _Pair:
    """The two factors of one layer's adapter: ``down`` is ``[r, in]`` (lora_A), ``up`` is ``[out, r]`` (lora_B)."""

    down: Tensor | None = None
    up: Tensor | None = None


class AdapterUpdate:
    """A LoRA adapter (Hu et al. 2021), merged: ``W = W_0 + scale * B A``, in float32, then in the model's dtype."""

    _REFUSED: Mapping[str, tuple[Any, ...]] = {
        "peft_type": (None, "LORA"),
        "bias": (None, "none"),
        "use_dora": (None, False),
        "modules_to_save": (None, [], ()),
        "fan_in_fan_out": (None, False),
    }

    def __init__(self, weights: ModelWeights, config: Mapping[str, Any], digest: Digest) -> None:
        self._weights = weights
        self._config = config
        self._digest = digest
        self._pairs: dict[str, _Pair] = {}
        self._loaded: dict[str, Tensor] = {}
        self._unknown: list[str] = []
        self._targets = weights.targets()
        if not weights.intact:
            raise WeightsError(
                "an adapter arrived for a model whose base weights are lost", fix="send a full update first"
            )
        self._check_config()

    def load(self, name: str, tensor: Tensor) -> None:
        """Keep one of the adapter's tensors, named as PEFT names them."""
        parts = name.removeprefix("base_model.model.").removesuffix(".weight").split(".")
        if parts[-1] == "default":
            parts.pop()
        module, factor = ".".join(parts[:-1]), parts[-1]
        if factor not in ("lora_A", "lora_B") or f"{module}.weight" not in self._targets:
            self._unknown.append(name)
            return
        own = tensor.detach().to(self._weights.model.device, copy=True)
        self._loaded[name] = own
        pair = self._pairs.setdefault(module, _Pair())
        if factor == "lora_A":
            pair.down = own
        else:
            pair.up = own

    @torch.no_grad()
    def finish(self, received: Mapping[str, str]) -> dict[str, str]:
        """Merge; return the digests of the adapter's tensors as they lie here.

        Raises:
            WeightsError: ``weights.missing`` for names, ``weights.transfer`` for shapes.
        """
        _refuse_names("the model has no place for these adapter tensors", self._unknown)
        _refuse_names("adapter tensors did not arrive", self._missing())
        _refuse_shapes(self._misshapen())
        bases = self._weights.bases
        for name in set(bases) - {f"{module}.weight" for module in self._pairs}:
            self._targets[name].data.copy_(bases.pop(name))  # adapted before, not any more
        for module, pair in self._pairs.items():
            assert pair.up is not None
            assert pair.down is not None
            target = self._targets[f"{module}.weight"]
            base = bases.setdefault(f"{module}.weight", target.data.clone())
            product = pair.up.float() @ pair.down.float()
            target.data.copy_(base.float() + self._scale(module) * product)
        return {name: self._digest(tensor) for name, tensor in self._loaded.items()}

    def _check_config(self) -> None:
        if "r" not in self._config or "lora_alpha" not in self._config:
            raise WeightsError("an adapter update has no PEFT config", expected="r and lora_alpha", found=self._config)
        for key, allowed in self._REFUSED.items():
            value = self._config.get(key)
            if getattr(value, "value", value) not in allowed:
                raise WeightsError(
                    f"this adapter cannot be served: {key}={value!r}", expected=f"{key} of {allowed[-1]!r}", found=value
                )

    def _scale(self, module: str) -> float:
        rank = _by_pattern(self._config.get("rank_pattern"), module, self._config["r"])
        alpha = _by_pattern(self._config.get("alpha_pattern"), module, self._config["lora_alpha"])
        return float(alpha) / (float(rank) ** 0.5 if self._config.get("use_rslora") else float(rank))

    def _missing(self) -> list[str]:
        """Halves of pairs, and whole layers where the config lists the layers' names."""
        missing = []
        for module, pair in self._pairs.items():
            if pair.down is None:
                missing.append(f"{module}.lora_A")
            if pair.up is None:
                missing.append(f"{module}.lora_B")
        wanted = self._config.get("target_modules")
        if wanted is None or isinstance(wanted, str) or self._config.get("layers_to_transform") is not None:
            return missing
        modules = [name.removesuffix(".weight") for name in self._targets if name.endswith(".weight")]
        endings = tuple(f".{ending}" for ending in wanted)
        excluded = tuple(f".{ending}" for ending in self._config.get("exclude_modules") or ())
        return missing + [
            module
            for module in modules
            if f".{module}".endswith(endings) and module not in self._pairs and not f".{module}".endswith(excluded)
        ]

    def _misshapen(self) -> list[str]:
        wrong = []
        for module, pair in self._pairs.items():
            assert pair.up is not None
            assert pair.down is not None
            shape = self._targets[f"{module}.weight"].shape
            if (pair.up.shape[0], *pair.down.shape[1:]) != tuple(shape) or pair.up.shape[1:] != pair.down.shape[:1]:
                sent = f"B {tuple(pair.up.shape)}, A {tuple(pair.down.shape)}"
                wrong.append(f"{module} (model {tuple(shape)}, sent {sent})")
        return wrong


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """PEFT's exceptions per layer: the first key that is the end of the layer's name."""
    for key, value in (patterns or {}).items():
        if module == key or module.endswith(f".{key}"):
            return value
    return default


def _refuse_names(message: str, names: list[str]) -> None:
    if names:
        raise WeightsError(
            f"{message}: {_some(names)}",
            code="weights.missing",
            expected="exactly the model's parameters, under Hugging Face names",
            found=f"{len(names)} wrong",
            fix="check that engine and rollout server load the same model folder",
        )


def _refuse_shapes(names: list[str]) -> None:
    if names:
        raise WeightsError(
            f"tensors have another shape than the model's: {_some(names)}",
            code="weights.transfer",
            fix="check that engine and rollout server load the same model folder",
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
