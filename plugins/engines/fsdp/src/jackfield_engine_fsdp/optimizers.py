"""Optimizers by name, on sharded parameters.

AdamW, 8-bit AdamW and SGD work element by element, on each rank's parts. Muon and Adafactor need whole matrices: they
gather one parameter at a time, so that a step does not depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from jackfield.abc.engine import OptimizerSpec
from jackfield.errors import EngineError
from jackfield_engine_fsdp.optimizer_options import AdafactorOptions, MuonOptions, NoOptions, read_options
from jackfield_engine_fsdp.trained import Trained, full, local, sharded_as

State = dict[str, dict[str, torch.Tensor]]  #: tensors by parameter and kind


class Optimizer(ABC):
    """Updates some trained parameters from their gradients."""

    def __init__(self, trained: Mapping[str, Trained], spec: OptimizerSpec, options: Any) -> None:
        self.trained, self.spec, self.settings = trained, spec, options
        self.rate = spec.lr

    def set_rate(self, rate: float) -> None:
        """Set the learning rate, before the factors of parameters."""
        self.rate = rate

    @abstractmethod
    def step(self) -> None:
        """Update the parameters that have a gradient."""

    @abstractmethod
    def state(self) -> State:
        """Return the live state, sharded like the parameters; its initial values if there is none yet."""

    @abstractmethod
    def move(self, device: torch.device) -> None:
        """Move the state."""


class ElementWise(Optimizer):
    """An optimizer of torch on this rank's parts, as plain tensors.

    It needs no ``DTensor``, whose first step spends 0.2 s on planning.
    """

    kinds: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")  #: of the state, shaped like the parameters

    def __init__(self, trained: Mapping[str, Trained], spec: OptimizerSpec, options: Any) -> None:
        super().__init__(trained, spec, options)
        self._parts = {name: nn.Parameter(local(each.parameter).detach()) for name, each in trained.items()}
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, each in trained.items():
            groups.setdefault((each.decay, each.factor), []).append(self._parts[name])
        self._factors = [factor for _, factor in groups]
        self._optimizer = self.make(
            [{"params": parts, "weight_decay": decay} for (decay, _), parts in groups.items()] or [{"params": []}]
        )

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Create torch's optimizer of the groups."""
        spec = self.spec
        # fused: 1.3 ms for 0.8M parameters on two cores; foreach needs twice that
        return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of each group."""
        super().set_rate(rate)
        for factor, group in zip(self._factors, self._optimizer.param_groups, strict=False):
            self._set(group, rate * factor)

    def _set(self, group: dict[str, Any], rate: float) -> None:
        group["lr"] = rate

    def step(self) -> None:
        """Update the parts."""
        for name, each in self.trained.items():
            self._parts[name].data = local(each.parameter).detach()  # it may have moved
            gradient = each.parameter.grad
            self._parts[name].grad = None if gradient is None else local(gradient)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state(self) -> State:
        """Return the tensors of torch's optimizer."""
        found: State = {}
        for name, each in self.trained.items():
            state = self._optimizer.state[self._parts[name]]
            if not state:
                state |= self.fresh(local(each.parameter).detach())
            found[name] = {
                kind: sharded_as(each.parameter, value) if kind in self.kinds else value
                for kind, value in state.items()
            }
        return found

    def fresh(self, part: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the initial state of a part."""
        zeros = {kind: torch.zeros_like(part) for kind in self.kinds}
        return {"step": torch.zeros((), dtype=torch.float32, device=part.device), **zeros}

    def move(self, device: torch.device) -> None:
        """Move the tensors of torch's optimizer."""
        for state in self._optimizer.state.values():
            for name, value in state.items():
                state[name] = value.to(device)


class AdamW(ElementWise):
    """AdamW (Loshchilov and Hutter 2019), fused."""


class EightBitAdamW(ElementWise):
    """AdamW with moments of 8 bits in blocks, by torchao. Parts of less than 4,096 numbers keep float32."""

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Create torchao's optimizer."""
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise EngineError(
                "the optimizer adamw_8bit needs torchao",
                code="plugin.environment",
                where="optimizer.name",
                expected="torchao >= 0.18 in the engine's environment",
                found=str(error),
                fix="pip install torchao, or optimizer.name: adamw",
            ) from error
        spec = self.spec
        made: torch.optim.Optimizer = AdamW8bit(
            groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, block_size=self.settings.block_size
        )
        return made

    def _set(self, group: dict[str, Any], rate: float) -> None:
        group["lr"].fill_(rate)

    def step(self) -> None:
        """Update the parts; on a CPU, without a compiler."""
        on_cpu = all(part.device.type == "cpu" for part in self._parts.values())
        with torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext():
            super().step()

    def fresh(self, part: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return zeros in 8 bits, where the size of the part allows it."""
        new: Callable[[torch.Tensor, bool], torch.Tensor] = self._optimizer._new_buffer  # type: ignore[attr-defined]
        return {"step": torch.tensor(0.0), "exp_avg": new(part, True), "exp_avg_sq": new(part, False)}


class SGD(ElementWise):
    """Stochastic gradient descent, with decoupled weight decay."""

    kinds = ("momentum_buffer",)

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Create torch's optimizer."""
        settings, spec = self.settings, self.spec
        plain = [{"params": group["params"]} for group in groups]
        return torch.optim.SGD(plain, lr=spec.lr, momentum=settings.momentum, nesterov=settings.nesterov)

    def step(self) -> None:
        """Decay the weights, then step."""
        for each in self.trained.values():
            if each.decay and each.parameter.grad is not None:
                local(each.parameter).detach().mul_(1.0 - self.rate * each.factor * each.decay)
        super().step()

    def fresh(self, part: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a momentum of zero, which the first gradient replaces, or nothing without momentum."""
        return {"momentum_buffer": torch.zeros_like(part)} if self.settings.momentum else {}


class Muon(Optimizer):
    """Muon on the hidden matrices: orthogonal updates by Newton-Schulz iterations on whole matrices, from torch.

    The momentum is sharded; each matrix is gathered for its update. Stacked experts are a matrix each.
    """

    def __init__(self, trained: Mapping[str, Trained], spec: OptimizerSpec, options: MuonOptions) -> None:
        if not hasattr(torch.optim, "Muon"):
            found, fix = torch.__version__, "install a newer torch, or optimizer.name: adamw"
            what, code = "the optimizer muon needs torch >= 2.9", "plugin.environment"
            raise EngineError(what, code=code, where="optimizer.name", expected=">= 2.9", found=found, fix=fix)
        super().__init__(trained, spec, options)
        self._averages = {name: torch.zeros_like(local(each.parameter).detach()) for name, each in trained.items()}

    @torch.no_grad()
    def step(self) -> None:
        """Update the matrices, one after the other. A collective operation."""
        momentum = self.settings.momentum
        for name, each in self.trained.items():
            if each.parameter.grad is None:
                continue
            gradient, average, rate = local(each.parameter.grad), self._averages[name], self.rate * each.factor
            average.lerp_(gradient, 1.0 - momentum)
            update = gradient.lerp(average, momentum) if self.settings.nesterov else average
            whole = full(sharded_as(each.parameter, update))
            change = _own(each.parameter, self._orthogonal(whole, rate))
            local(each.parameter).detach().mul_(1.0 - rate * each.decay).add_(change)

    def _orthogonal(self, update: torch.Tensor, rate: float) -> torch.Tensor:
        """Return the change of a matrix ``[m, n]``, or of several, ``[e, m, n]``."""
        matrices = [nn.Parameter(torch.zeros_like(each)) for each in (update if update.ndim == 3 else [update])]
        for matrix, each in zip(matrices, update if update.ndim == 3 else [update], strict=True):
            matrix.grad = each.contiguous()
        settings = self.settings
        more: dict[str, Any] = {"ns_steps": settings.ns_steps, "adjust_lr_fn": settings.adjust_lr_fn}
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, momentum=0.0, nesterov=False, **more).step()
        return torch.stack([each.detach() for each in matrices]).view_as(update)

    def state(self) -> State:
        """Return the running averages of the gradients."""
        return {
            name: {"momentum_buffer": sharded_as(each.parameter, self._averages[name])}
            for name, each in self.trained.items()
        }

    def move(self, device: torch.device) -> None:
        """Move the running averages."""
        self._averages = {name: value.to(device) for name, value in self._averages.items()}


class Adafactor(Optimizer):
    """Adafactor by torch: squared gradients as the product of a row and a column, which every rank keeps."""

    def __init__(self, trained: Mapping[str, Trained], spec: OptimizerSpec, options: AdafactorOptions) -> None:
        super().__init__(trained, spec, options)
        self._state: State = {}

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters, one after the other. A collective operation."""
        for name, each in self.trained.items():
            if each.parameter.grad is None:
                continue
            whole = nn.Parameter(full(each.parameter))
            whole.grad = full(each.parameter.grad)
            settings = self.settings
            optimizer = torch.optim.Adafactor(
                [whole],
                lr=self.rate * each.factor,
                beta2_decay=settings.beta2_decay,
                eps=(None, settings.eps2),
                d=settings.d,
                weight_decay=each.decay,
            )
            optimizer.state[whole] = self._state.setdefault(name, self._fresh(each))
            optimizer.step()
            local(each.parameter).detach().copy_(_own(each.parameter, whole.detach()))

    @staticmethod
    def _fresh(each: Trained) -> dict[str, torch.Tensor]:
        shape, device = each.parameter.shape, local(each.parameter).device
        zeros = functools.partial(torch.zeros, device=device, dtype=each.parameter.dtype)
        if len(shape) > 1:
            kinds = {"row_var": zeros((*shape[:-1], 1)), "col_var": zeros((*shape[:-2], 1, shape[-1]))}
        else:
            kinds = {"variance": zeros(shape)}
        return {"step": torch.zeros((), dtype=torch.float32), **kinds}

    def state(self) -> State:
        """Return the factors; they are whole on each rank."""
        return {name: self._state.setdefault(name, self._fresh(each)) for name, each in self.trained.items()}

    def move(self, device: torch.device) -> None:
        """Move the factors."""
        for state in self._state.values():
            for kind, value in state.items():
                state[kind] = value if kind == "step" else value.to(device)


OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    "adafactor": Adafactor,
    "adamw": AdamW,
    "adamw_8bit": EightBitAdamW,
    "muon": Muon,
    "sgd": SGD,
}


def make_optimizers(trained: Mapping[str, Trained], spec: OptimizerSpec) -> list[Optimizer]:
    """Return the optimizers of the parameters: one, or Muon of the matrices and AdamW of the others.

    Unknown names and options are refused, as are settings without an effect (``config.invalid-value``).
    """
    options, cls = read_options(spec), OPTIMIZERS[spec.name]
    if cls is not Muon:
        return [cls(trained, spec, options)]
    matrices = {name: each for name, each in trained.items() if each.kind == "matrix"}
    others = {name: each for name, each in trained.items() if each.kind != "matrix"}
    if not matrices:
        found = f"{len(others)} parameters, none of them a hidden matrix"
        what, fix = "muon has nothing to update", "optimizer.name: adamw"
        where, expected = "optimizer.name", "hidden matrices that are trained"
        raise EngineError(what, code="config.invalid-value", where=where, expected=expected, found=found, fix=fix)
    return [Muon(matrices, spec, options), *([AdamW(others, spec, NoOptions())] if others else [])]


def _own(parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that each rank has whole, sharded like ``parameter``."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, parameter.placements).to_local()
