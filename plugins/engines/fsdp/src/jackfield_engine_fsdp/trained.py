"""The trained parameters: which are frozen, and the decay and learning-rate factor of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import attrs
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd

from jackfield.abc.engine import OptimizerSpec
from jackfield.errors import EngineError
from jackfield_engine_fsdp.model import TokenModel, has_adapter

Kind: TypeAlias = Literal["matrix", "norms", "biases", "embeddings", "other"]
_SHOWN = 4  #: names in a message


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor: a view of the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sharded tensor, detached, in its own memory. A collective operation."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    whole = tensor.full_tensor()
    shares = whole.untyped_storage().data_ptr() == tensor.to_local().untyped_storage().data_ptr()
    return whole.clone() if shares else whole  # with one rank there is nothing to gather


def sharded_as(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Wrap a part's tensor as a tensor that is sharded like ``parameter``."""
    if not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(value, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def published_name(name: str) -> str:
    """Return the name of an adapter's parameter in PEFT's files: without the adapter's name."""
    name = name.replace(".lora_magnitude_vector.default.weight", ".lora_magnitude_vector")
    return ".".join(part for part in name.split(".") if part != "default")


def name_of(model: TokenModel, name: str) -> str:
    """Return the name of a module's parameter as ``get_per_tensor_grad`` and settings have it."""
    inner = name.removeprefix("language_model.")
    return published_name(inner) if has_adapter(model.language_model) and inner != name else inner


@attrs.frozen(kw_only=True, eq=False)
class Trained:
    """A trained parameter, and how it is updated."""

    name: str  #: as in settings
    parameter: nn.Parameter  #: of the sharded model
    kind: Kind
    decay: float = 0.0
    factor: float = 1.0  #: of the learning rate


def trained_parameters(model: TokenModel, spec: OptimizerSpec) -> dict[str, Trained]:
    """Return the trained parameters by their names in the module.

    A pattern of ``lr_factors`` in no name is refused (``config.invalid-value``).
    """
    kinds, found = _kinds(model), dict[str, Trained]()
    patterns = {pattern: _compiled(pattern, "optimizer.lr_factors") for pattern in spec.lr_factors}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            public, kind = name_of(model, name), kinds[id(parameter)]
            first = next((pattern for pattern, compiled in patterns.items() if compiled.search(public)), None)
            found[name] = Trained(
                name=public,
                parameter=parameter,
                kind=kind,
                decay=0.0 if kind in spec.no_decay else spec.weight_decay,
                factor=1.0 if first is None else spec.lr_factors[first],
            )
    names = [each.name for each in found.values()]
    for pattern, compiled in patterns.items():
        if not any(compiled.search(name) for name in names):
            raise _without_effect("optimizer.lr_factors", pattern, "the name of a trained parameter", names)
    for pattern, factor in spec.lr_factors.items():
        if not 0.0 <= factor <= 1e6:
            where = f"optimizer.lr_factors.{pattern}"
            raise _invalid("a factor of the learning rate is out of range", where, "0 to 1e6", factor)
    return found


def freeze(model: TokenModel, patterns: Iterable[str]) -> None:
    """Stop the training of parameters in whose names a pattern is found.

    A pattern that freezes nothing is refused (``config.invalid-value``), as are patterns that freeze everything.
    """
    trained = {name_of(model, name): each for name, each in model.named_parameters() if each.requires_grad}
    for pattern in patterns:
        compiled = _compiled(pattern, "model.freeze")
        chosen = [name for name in trained if compiled.search(name)]
        if not chosen:
            raise _without_effect("model.freeze", pattern, "the name of a parameter that would be trained", trained)
        for name in chosen:
            trained[name].requires_grad_(False)
    if trained and not any(parameter.requires_grad for parameter in trained.values()):
        expected = "a parameter that is trained"
        raise _invalid("everything is frozen", "model.freeze", expected, f"{len(trained)} frozen parameters")


def _kinds(model: TokenModel) -> Mapping[int, Kind]:
    """Return the kind of each parameter by its identity; tied parameters are embeddings."""
    found: dict[int, Kind] = {}
    output = model.causal_lm.get_output_embeddings()
    embeddings = {id(each) for module in model.modules() if isinstance(module, nn.Embedding) for each in _own(module)}
    for module in model.modules():
        outside = module is output or module is model.value_head or isinstance(module, _ConvNd)
        for name, parameter in module.named_parameters(recurse=False):
            kind: Kind = "other"
            if id(parameter) in embeddings:
                kind = "embeddings"
            elif parameter.ndim <= 1:
                kind = "biases" if name.endswith("bias") else "norms"
            elif parameter.ndim in (2, 3) and not outside:
                kind = "matrix"
            found.setdefault(id(parameter), kind)
    return found


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise _invalid(f"not a regular expression: {error}", where, "a regular expression", pattern) from error


def _without_effect(where: str, pattern: str, expected: str, names: Iterable[str]) -> EngineError:
    names = list(names)
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return _invalid(
        f"the pattern {pattern!r} has no effect", f"{where}: {pattern}", f"a pattern in {expected}", f"names: {shown}"
    )


def _invalid(message: str, where: str, expected: str, found: object) -> EngineError:
    return EngineError(message, code="config.invalid-value", where=where, expected=expected, found=found)
