"""VeOmni's optimizer with the schedule of the contract: learning rate, gradient norm, state by parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from veomni.optim import build_optimizer

from jackfield.abc.engine import OptimizerSpec
from jackfield.errors import EngineError, PluginError
from jackfield_engine_veomni.tensors import Part, Sharding


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """Return the learning rate of step ``step`` (the first is 0).

    ``lr * step / warmup_steps`` while warming up; then, with progress p from 0 to 1 at ``total_steps`` and
    r = ``min_lr_ratio``: ``lr`` (constant), ``lr * (r + (1 - r) * (1 - p))`` (linear) or
    ``lr * (r + (1 - r) * (1 + cos(pi * p)) / 2)`` (cosine). VeOmni's own linear schedule has another form: it stops
    at the minimum early.
    """
    if step < spec.warmup_steps:
        return spec.lr * step / spec.warmup_steps
    if spec.scheduler == "constant":
        return spec.lr
    assert spec.total_steps is not None, "checked by Optimization"
    progress = min(1.0, (step - spec.warmup_steps) / max(1, spec.total_steps - spec.warmup_steps))
    rest = 1.0 - progress if spec.scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return spec.lr * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * rest)


class Optimization:
    """AdamW of the model's parameters, and its place in the schedule.

    Refused are a decay without a length (``config.invalid-value``) and settings beyond AdamW with one rate
    (``plugin.capability``).
    """

    def __init__(self, model: nn.Module, spec: OptimizerSpec, sharding: Sharding) -> None:
        if spec.scheduler != "constant" and spec.total_steps is None:
            raise EngineError(
                f"the {spec.scheduler} schedule has no length",
                code="config.invalid-value",
                where="OptimizerSpec.total_steps",
                expected="the number of optimizer steps of the whole run",
                found=None,
            )
        wanted: dict[str, object] = {"optimizer.options": spec.options, "optimizer.no_decay": spec.no_decay}
        wanted |= {"optimizer.lr_factors": spec.lr_factors, "optimizer.ema_decay": spec.ema_decay}
        wanted |= {"optimizer.name": spec.name != "adamw"}
        for where, value in wanted.items():
            if value:
                message = "the engine veomni has AdamW with one rate for all parameters alone"
                raise PluginError(message, code="plugin.capability", where=where, expected="its default")
        self.spec, self._model, self._sharding = spec, model, sharding
        self.parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        # AdamW works element by element and needs no DTensor, whose first step spends a second on planning
        self._local = {name: nn.Parameter(local(each)) for name, each in self.parameters.items()}
        built = build_optimizer(
            nn.ParameterList(self._local.values()),
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            optimizer_type="adamw",
        )
        several = getattr(built, "optimizers_dict", None)  # with expert parallelism
        self._optimizer: torch.optim.Optimizer = built if several is None else several["non_extra_parallel"]
        self.set_schedule_step(0)

    def set_schedule_step(self, step: int) -> float:
        """Go to a step of the schedule; return its learning rate."""
        self.schedule_step = step
        rate = learning_rate(self.spec, step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def zero_grad(self) -> None:
        """Drop accumulated gradients."""
        self._model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def step(self) -> float:
        """Clip by the global norm, step, and return the norm before clipping. If it is not finite, do not step."""
        gradients = {name: local(each.grad) for name, each in self.parameters.items() if each.grad is not None}
        norm = self._norm(gradients)
        if not math.isfinite(norm):
            return norm
        bound = self.spec.clip_grad
        for name, gradient in gradients.items():
            if bound is not None and norm > bound:
                gradient.mul_(bound / (norm + 1e-6))
            self._local[name].grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _norm(self, gradients: Mapping[str, torch.Tensor]) -> float:
        """Return the norm of the whole gradient; each element counts on one of the ranks that have it."""
        device = next(iter(self._local.values())).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for name, gradient in gradients.items():
            if self._sharding.part(name, self.parameters[name]).first:
                total += torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return float(total.sqrt())

    def state(self) -> dict[str, dict[str, Part]]:
        """Return this rank's parts of the state by parameter: averages and steps; made where it is missing."""
        found: dict[str, dict[str, Part]] = {}
        for name, parameter in self._local.items():
            state = self._optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            part = self._sharding.part(name, self.parameters[name])
            found[name] = {kind: attrs.evolve(part, values=state[kind].detach()) for kind in ("exp_avg", "exp_avg_sq")}
            first = dist.get_rank() == 0
            found[name]["step"] = Part(values=state["step"], shape=(), start=(), first=first)
        return found

    def move(self, device: torch.device) -> None:
        """Move the averages to a device."""
        for state in self._optimizer.state.values():
            for kind in ("exp_avg", "exp_avg_sq"):
                if kind in state:
                    state[kind] = state[kind].to(device)

    def follow(self) -> None:
        """Look at the parameters again, after the model was moved."""
        for name, parameter in self.parameters.items():
            self._local[name].data = local(parameter)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, detached: a view of the same memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
