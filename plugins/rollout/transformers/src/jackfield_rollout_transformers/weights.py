"""Load new weights into a model in place, and move weights away while the server sleeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from jackfield.abc.engine import Box
from jackfield.errors import PluginError, WeightsError
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import HeldWeights
from jackfield_huggingface.adapters import MergedAdapter, refuse_tensors
from jackfield_huggingface.names import TensorGroup
from jackfield_rollout_transformers.model import LoadedModel, rounded

_MISSHAPEN = "tensors have another shape than the model's"


class ModelWeights:
    """The parameters of one model: their place and their updates.

    New values have the checkpoint's names. Tensors that the model holds in another form are kept until their group is
    complete, and then converted: see :mod:`jackfield_huggingface.names`.
    """

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self._targets: dict[str, Tensor] = dict(model.module.state_dict(keep_vars=True))
        self.adapter = MergedAdapter(self._weight_of, self._modules)
        self.held = HeldWeights(self._in_place)
        self.intact = True  #: whether the base weights are known to be whole
        self._shapes: list[torch.Size] = [parameter.shape for parameter in model.parameters()]

    def targets(self) -> dict[str, Tensor]:
        """Return parameters and saved buffers by their names in the model; a tied one has several."""
        return self._targets

    def layout(self) -> tuple[Box, ...]:
        """Return the box of each tensor under its checkpoint's name: the one worker has all of it."""
        shapes = [item for group in self.model.names.groups for item in group.shapes.items()]
        return tuple(Box(name=name, shape=shape, start=(0,) * len(shape), length=shape) for name, shape in shapes)

    def _weight_of(self, module: str) -> Tensor | None:
        target = self._targets.get(f"{module}.weight")
        return None if target is None else target.data

    def _modules(self) -> list[str]:
        return [name.removesuffix(".weight") for name in self._targets if name.endswith(".weight")]

    def _in_place(self, name: str) -> Tensor | None:
        """Return the parameter that holds a checkpoint's tensor byte for byte, if any."""
        found = self.model.names.find(name)
        if found is None or not found[1].only_renamed or found[1].parts[0] in self.model.float8:
            return None
        return self._targets[found[1].parts[0]]

    def store(self, group: TensorGroup, tensors: Mapping[str, Tensor]) -> None:
        """Copy all tensors of a group into its parameters, cast to their dtypes."""
        for part, tensor in self.model.names.to_model(group, tensors).items():
            self._targets[part].data.copy_(rounded(tensor) if part in self.model.float8 else tensor)

    def stored(self, group: TensorGroup) -> dict[str, Tensor]:
        """Return a group's parameters in checkpoint form; empty if they were rounded."""
        if any(part in self.model.float8 for part in group.parts):
            return {}
        return self.model.names.to_checkpoint(group, [self._targets[part].data for part in group.parts])

    @torch.no_grad()
    def apply(self, changes: Mapping[str, Tensor], version: int) -> dict[str, str]:
        """Load the changes from ``WeightReceiver.changes``; return the digests of changed tensors by name.

        It raises ``weights.missing`` for a name, ``weights.transfer`` for a shape or blocks that do not fit.
        """
        digests: dict[str, str] = {}
        converted: dict[TensorGroup, None] = {}
        self.intact = False
        for sent_name, tensor in self.held.apply(changes, version, digests):
            found = self.model.names.find(sent_name)
            if found is None:
                refuse_tensors("the model has no such parameter", [sent_name])
                continue
            name, group = found
            if group.shapes[name] != tuple(tensor.shape):
                wrong = f"{sent_name} (model {group.shapes[name]}, sent {tuple(tensor.shape)})"
                refuse_tensors(_MISSHAPEN, [wrong], "weights.transfer")
            if group.only_renamed:
                self.store(group, {name: tensor})
            else:
                converted[group] = None
        for group in converted:
            self.store(group, {name: self.held.tensor(name).to(self.model.device) for name in group.shapes})
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
        """Release the parameters' memory and contents; return the bytes."""
        freed = sum(tensor.nbytes for tensor in [*self.model.parameters(), *self.adapter.bases.values()])
        self.adapter.forget()
        self.held.forget()
        self.intact = False
        for parameter in self.model.parameters():
            parameter.data = parameter.data.new_empty(0)
        return freed

    def allocate(self) -> None:
        """Allocate the parameters' memory again; contents are undefined until a full update."""
        for parameter, shape in zip(self.model.parameters(), self._shapes, strict=True):
            if parameter.shape != shape:
                parameter.data = torch.zeros(shape, dtype=parameter.dtype, device=self.model.device)


def _prove_whole(name: str, loaded: Tensor) -> dict[str, str]:
    return {name: digest(loaded)}


class FullUpdate:
    """An update of all tensors. Each group is copied into its place as soon as it is complete.

    ``prove`` returns what a receipt has of a tensor, by its name and loaded value: a digest of each piece that came.
    """

    def __init__(self, weights: ModelWeights, prove: Callable[[str, Tensor], dict[str, str]] = _prove_whole) -> None:
        self._weights, self._prove = weights, prove
        self._sent: dict[str, list[tuple[str, torch.dtype]]] = {}  # received, by the checkpoint's name
        self._waiting: dict[TensorGroup, dict[str, Tensor]] = {}
        self._unknown: list[str] = []
        self._misshapen: list[str] = []

    @torch.no_grad()
    def load(self, name: str, tensor: Tensor) -> None:
        """Load one tensor. Wrong ones are collected, so that the sender can finish and all are named."""
        self._weights.intact = False
        found = self._weights.model.names.find(name)
        if found is None:
            self._unknown.append(name)
        elif found[1].shapes[found[0]] != tuple(tensor.shape):
            self._misshapen.append(f"{name} (model {found[1].shapes[found[0]]}, sent {tuple(tensor.shape)})")
        else:
            saved_name, group = found
            self._sent.setdefault(saved_name, []).append((name, tensor.dtype))
            waiting = self._waiting.setdefault(group, {})
            copied = tensor if group.only_renamed else tensor.detach().to(self._weights.model.device, copy=True)
            waiting[saved_name] = copied  # the sender may reuse its memory
            if len(waiting) == len(group.shapes):
                self._weights.store(group, self._waiting.pop(group))

    def finish(self, received: Mapping[str, str]) -> dict[str, str]:
        """Check that the model is complete (``weights.missing``, ``weights.transfer``); return its tensors' digests.

        If a tensor was cast, to the model's dtype or through float8, the digest is that of the tensor ``received``.
        """
        refuse_tensors("the model has no such parameter", self._unknown)
        refuse_tensors(_MISSHAPEN, self._misshapen, "weights.transfer")
        refuse_tensors("parameters did not arrive", self._missing())
        self._weights.adapter.forget()
        self._weights.intact = True
        found = dict(received)
        for group in self._weights.model.names.groups:
            stored = self._weights.stored(group)
            for name in group.shapes:
                for sent_name, dtype in self._sent.get(name, ()):
                    if name in stored and stored[name].dtype == dtype:
                        found |= self._prove(sent_name, stored[name])
        return found

    def _missing(self) -> list[str]:
        targets = self._weights.targets()
        return [
            name
            for group in self._weights.model.names.groups
            if any(isinstance(targets[part], torch.nn.Parameter) for part in group.parts)
            for name in group.shapes
            if name not in self._sent
        ]


class AdapterUpdate:
    """An update of a LoRA adapter, which is merged once it is complete."""

    def __init__(self, weights: ModelWeights, config: Mapping[str, Any]) -> None:
        self._weights = weights
        self._config = config
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
        """Keep one of the adapter's tensors, under PEFT's name."""
        self._tensors[name] = tensor.detach().to(self._weights.model.device, copy=True)

    def finish(self, received: Mapping[str, str]) -> dict[str, str]:
        """Merge the adapter; return the digests of its tensors."""
        self._weights.adapter.merge(self._tensors, self._config)
        return {name: digest(tensor) for name, tensor in self._tensors.items()}
