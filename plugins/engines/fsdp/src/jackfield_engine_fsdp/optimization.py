"""The steps on sharded parameters: learning-rate schedule, gradient norm, and placement of the state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from jackfield.abc.engine import OptimizerSpec
from jackfield.errors import EngineError
from jackfield_engine_fsdp.averages import Averages
from jackfield_engine_fsdp.config import Config
from jackfield_engine_fsdp.mesh import norm_share
from jackfield_engine_fsdp.model import TokenModel
from jackfield_engine_fsdp.optimizers import make_optimizers
from jackfield_engine_fsdp.process_group import Ranks
from jackfield_engine_fsdp.trained import local, sharded_as, trained_parameters


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """Return the learning rate of step ``step`` (the first is 0).

    ``lr * step / warmup_steps`` while warming up; then, with progress p from 0 to 1 at ``total_steps`` and
    r = ``min_lr_ratio``: ``lr`` (constant), ``lr * (r + (1 - r) * (1 - p))`` (linear) or
    ``lr * (r + (1 - r) * (1 + cos(pi * p)) / 2)`` (cosine).
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
    """The optimizers of the trained parameters, their place in the schedule, and the average of the weights.

    A decay without a length is refused (``config.invalid-value``).
    """

    def __init__(self, model: TokenModel, spec: OptimizerSpec, ranks: Ranks) -> None:
        if spec.scheduler != "constant" and spec.total_steps is None:
            raise EngineError(
                f"the {spec.scheduler} schedule has no length",
                code="config.invalid-value",
                where="OptimizerSpec.total_steps",
                expected="the number of optimizer steps of the whole run",
                found=None,
            )
        self.spec = spec
        trained = trained_parameters(model, spec)
        self.parameters = {name: each.parameter for name, each in trained.items()}
        self.schedule_step = 0
        self._ranks = ranks
        self._optimizers = make_optimizers(trained, spec)
        self.averages = None if spec.ema_decay is None else Averages(self.parameters, spec.ema_decay)
        self.set_schedule_step(0)

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self) -> float:
        """Clip and step; return the norm before clipping. A norm that is not finite skips the step."""
        norm = self._gradient_norm()
        if not math.isfinite(norm):
            return norm
        if self.spec.clip_grad is not None and norm > self.spec.clip_grad:
            scale = self.spec.clip_grad / norm
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    local(parameter.grad).mul_(scale)
        for optimizer in self._optimizers:
            optimizer.step()
        if self.averages is not None:
            self.averages.update()
        return norm

    def _gradient_norm(self) -> float:
        """Return the 2-norm over all parameters and ranks, summed in float64."""
        device = self._ranks.device
        squares = [
            torch.linalg.vector_norm(local(p.grad), dtype=torch.float32).double() ** 2
            * norm_share(p.grad, self._ranks.size)
            for p in self.parameters.values()
            if p.grad is not None
        ]
        total = (
            torch.stack(squares).sum().to(device) if squares else torch.zeros((), dtype=torch.float64, device=device)
        )
        return math.sqrt(self._ranks.sum(total).item())

    def set_schedule_step(self, step: int) -> float:
        """Move the schedule to ``step``; return the learning rate there."""
        self.schedule_step = step
        rate = learning_rate(self.spec, step)
        for optimizer in self._optimizers:
            optimizer.set_rate(rate)
        return rate

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the optimizers' live tensors by parameter name; their initial values if there are none yet.

        Those with the shape of a parameter are sharded like it.
        """
        found: dict[str, dict[str, torch.Tensor]] = {}
        for optimizer in self._optimizers:
            found |= optimizer.state()
        return found

    def averaged(self) -> dict[str, torch.Tensor]:
        """Return the live averages by parameter name, sharded like the parameters; empty without averages."""
        parts = {} if self.averages is None else self.averages.parts
        return {name: sharded_as(self.parameters[name], part) for name, part in parts.items()}

    def move(self, device: torch.device) -> None:
        """Move the optimizers' tensors and the averages."""
        for optimizer in self._optimizers:
            optimizer.move(device)
        if self.averages is not None:
            self.averages.move(device)


class Placement:
    """The place of the sharded state, and its moves.

    With ``cpu_offload`` FSDP itself keeps all of it on the CPU, with ``optimizer_offload`` the optimizer's state is
    there but for its steps.
    """

    def __init__(
        self, model: TokenModel, optimization: Optimization | None, device: torch.device, config: Config
    ) -> None:
        self._model = model
        self._optimization = optimization
        self._device = device
        self._streamed = config.cpu_offload and device.type != "cpu"
        self._steps_only = config.optimizer_offload and not self._streamed
        self._at = {"model": device, "optimizer": device, "grad": device}
        self._aside: list[tuple[nn.Parameter, torch.Tensor]] = []  # gradients that are not where their parameters are

    def move(self, device: str, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move the chosen state to the CPU or the engine's own device, without changing a bit."""
        known = {"cpu": torch.device("cpu"), self._device.type: self._device, str(self._device): self._device}
        target = known.get(str(device))
        if target is None:
            raise EngineError(
                f"the engine cannot move to {device!r}",
                code="config.invalid-value",
                where="device",
                expected=f"cpu or {self._device}",
                found=repr(device),
            )
        chosen = {"model": model, "optimizer": optimizer and not self._steps_only, "grad": grad}
        if not self._streamed:
            self._move({part: target for part, wanted in chosen.items() if wanted})

    @contextmanager
    def on_device(self, training: bool) -> Iterator[None]:
        """Keep weights (for training, all state) on the device inside the block; then move it back."""
        before = dict(self._at)
        parts = ["model", "grad", "optimizer"][: 1 if not training else 2 if self._steps_only else 3]
        self._move(dict.fromkeys(parts, self._device))
        try:
            yield
        finally:
            self._move({part: before[part] for part in parts})

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Have the optimizer's state on the device inside the block, also with ``optimizer_offload``."""
        if self._steps_only:
            self._move({"optimizer": self._device})
        yield
        if self._steps_only:
            self._move({"optimizer": torch.device("cpu")})

    def _move(self, targets: dict[str, torch.device]) -> None:
        targets = {part: device for part, device in targets.items() if device != self._at[part]}
        if not targets:
            return
        if "optimizer" in targets and self._optimization is not None:
            self._optimization.move(targets["optimizer"])
        if "model" in targets or "grad" in targets:
            self._move_model(targets)
        self._at |= targets
        if self._device.type == "cuda" and torch.device("cpu") in targets.values():
            torch.cuda.empty_cache()

    def _move_model(self, targets: dict[str, torch.device]) -> None:
        model_at = targets.get("model", self._at["model"])
        grad_at = targets.get("grad", self._at["grad"])
        gradients = self._aside + [(p, p.grad) for p in self._model.parameters() if p.grad is not None]
        for parameter, _ in gradients:
            parameter.grad = None
        if "model" in targets:
            self._model.to(model_at)
        moved = [(parameter, gradient.to(grad_at)) for parameter, gradient in gradients]
        self._aside = moved if model_at != grad_at else []
        if model_at == grad_at:
            for parameter, gradient in moved:
                parameter.grad = gradient
