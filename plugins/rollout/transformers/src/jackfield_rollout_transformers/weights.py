"""New weights into a loaded model, in place, and weights out of the way while the server sleeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from jackfield.abc.rollout import UpdateWeightsRequest
from jackfield.errors import PluginError, WeightsError
from jackfield.weights import HeldWeights, MergedAdapter
from jackfield_rollout_transformers.float8 import rounded
from jackfield_rollout_transformers.model import LoadedModel

__all__ = ["AdapterUpdate", "FullUpdate", "ModelWeights"]

#: ``digest(tensor) -> str``; handed in, so that this module can be tested alone
Digest = Callable[[Tensor], str]


class ModelWeights:
    """The parameters of one model: where they are and how they change."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.adapter = MergedAdapter(self._weight_of, self._modules)
        self.held = HeldWeights(lambda name: None if name in model.float8 else self.targets().get(name))
        self.intact = True  #: whether the base weights are known to be whole
        self._shapes: list[torch.Size] = [parameter.shape for parameter in model.parameters()]

    def targets(self) -> dict[str, Tensor]:
        """Parameters and saved buffers by Hugging Face name; a tied parameter has several."""
        return dict(self.model.module.state_dict(keep_vars=True))

    def _weight_of(self, module: str) -> Tensor | None:
        target = self.targets().get(f"{module}.weight")
        return None if target is None else target.data

    def _modules(self) -> list[str]:
        return [name.removesuffix(".weight") for name in self.targets() if name.endswith(".weight")]

    def begin(self, request: UpdateWeightsRequest, digest: Digest) -> FullUpdate | AdapterUpdate:
        """An empty update of the kind that is asked for."""
        if request.kind == "adapter":
            return AdapterUpdate(self, request.peft_config or {}, digest)
        return FullUpdate(self, digest)

    def store(self, name: str, target: Tensor, tensor: Tensor) -> None:
        """Copy a tensor into its parameter, cast to what that holds."""
        target.data.copy_(rounded(tensor) if name in self.model.float8 else tensor)

    def shows(self, name: str, dtype: torch.dtype) -> bool:
        """Whether the parameter holds what was sent, in ``dtype``, bit for bit."""
        return name not in self.model.float8 and self.targets()[name].dtype == dtype

    @torch.no_grad()
    def apply(self, changes: Mapping[str, Tensor], version: int) -> dict[str, str]:
        """Load what :meth:`~jackfield.weights.WeightReceiver.changes` received; digests of what has changed, by name.

        Raises:
            WeightsError: ``weights.missing`` for a name, ``weights.transfer`` for a shape or blocks that do not fit.
        """
        digests: dict[str, str] = {}
        self.intact = False
        targets = self.targets()
        for name, tensor in self.held.apply(changes, version, digests):
            if name not in targets:
                _refuse_names("the model has no such parameter", [name])
            if targets[name].shape != tensor.shape:
                _refuse_shapes([f"{name} (model {tuple(targets[name].shape)}, sent {tuple(tensor.shape)})"])
            self.store(name, targets[name], tensor)
        self.intact = True
        return digests

    def to(self, device: torch.device | Literal["cpu"]) -> int:
        """Move every parameter; return the bytes that left their device."""
        moved = 0
        for tensor in [*self.model.parameters(), *self.adapter.bases.values()]:
            if tensor.device != torch.device(device):
                moved += tensor.nbytes
                tensor.data = tensor.data.to(device)
        return moved

    def drop(self) -> int:
        """Give the parameters' memory back, their contents with it; return the bytes."""
        freed = sum(tensor.nbytes for tensor in [*self.model.parameters(), *self.adapter.bases.values()])
        self.adapter.forget()
        self.held.forget()
        self.intact = False
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
            self._weights.store(name, target, tensor)
            self._loaded[name] = tensor.dtype

    def finish(self, received: Mapping[str, str]) -> dict[str, str]:
        """Check that the model is complete; return the digests of what it holds now, by name.

        Where a tensor was cast, to the model's dtype or through float8, the digest is that of the tensor ``received``.

        Raises:
            WeightsError: ``weights.missing`` for names, ``weights.transfer`` for shapes.
        """
        _refuse_names("the model has no such parameter", self._unknown)
        _refuse_shapes(self._misshapen)
        _refuse_names("parameters did not arrive", self._missing())
        self._weights.adapter.forget()
        self._weights.intact = True
        return {
            name: self._digest(self._targets[name].data) if self._weights.shows(name, dtype) else received[name]
            for name, dtype in self._loaded.items()
        }

    def _missing(self) -> list[str]:
        arrived = {id(self._targets[name]) for name in self._loaded}
        missing: dict[int, str] = {}
        for name, target in self._targets.items():
            if isinstance(target, torch.nn.Parameter) and id(target) not in arrived:
                missing.setdefault(id(target), name)
        return list(missing.values())


class AdapterUpdate:
    """A LoRA adapter, merged once all of it is there."""

    def __init__(self, weights: ModelWeights, config: Mapping[str, Any], digest: Digest) -> None:
        self._weights = weights
        self._config = config
        self._digest = digest
        self._tensors: dict[str, Tensor] = {}
        if weights.model.float8:
            raise PluginError(
                "adapters cannot be merged into weights that were rounded through float8_e4m3fn",
                code="plugin.capability",
                expected="weights.dtype: bfloat16, float16 or float32",
            )
        if not weights.intact:
            raise WeightsError(
                "an adapter arrived for a model whose base weights are lost", fix="send a full update first"
            )

    def load(self, name: str, tensor: Tensor) -> None:
        """Keep one of the adapter's tensors, named as PEFT names them."""
        self._tensors[name] = tensor.detach().to(self._weights.model.device, copy=True)

    def finish(self, received: Mapping[str, str]) -> dict[str, str]:
        """Merge; return the digests of the adapter's tensors as they lie here.

        Raises:
            WeightsError: see :meth:`~jackfield.weights.MergedAdapter.merge`.
        """
        self._weights.adapter.merge(self._tensors, self._config)
        return {name: self._digest(tensor) for name, tensor in self._tensors.items()}


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
