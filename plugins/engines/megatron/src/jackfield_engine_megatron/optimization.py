"""AdamW on this rank's parameters: gradients and their norm, learning-rate schedule, and the optimizer's state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from jackfield.abc.engine import OptimizerSpec
from jackfield.errors import PluginError
from jackfield_engine_megatron.architecture import invalid
from jackfield_engine_megatron.config import Config
from jackfield_engine_megatron.quiet import quiet
from jackfield_engine_megatron.ranks import Ranks
from jackfield_engine_megatron.weights import Weights

with quiet(imports=True):
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

#: The optimizer's tensors of a parameter, in float32. ``master``: the weights before their cast to the model's dtype.
KINDS = ("master", "exp_avg", "exp_avg_sq")


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """Return the learning rate of step ``step`` (the first is 0): linear warm-up, then the spec's schedule."""
    if step < spec.warmup_steps:
        return spec.lr * step / spec.warmup_steps
    if spec.scheduler == "constant":
        return spec.lr
    assert spec.total_steps is not None, "checked by check_spec"
    progress = min(1.0, (step - spec.warmup_steps) / max(1, spec.total_steps - spec.warmup_steps))
    rest = 1.0 - progress if spec.scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return spec.lr * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * rest)


def check_spec(spec: OptimizerSpec) -> None:
    """Refuse what this engine's optimizer does not have."""
    if spec.scheduler != "constant" and spec.total_steps is None:
        raise invalid(
            f"the {spec.scheduler} schedule has no length",
            where="OptimizerSpec.total_steps",
            expected="the number of optimizer steps of the whole run",
            found=None,
        )
    if spec.name != "adamw" or spec.options or spec.no_decay or spec.lr_factors or spec.ema_decay:
        raise PluginError(
            "the engine megatron has AdamW with one learning rate only",
            code="plugin.capability",
            where="optimizer",
            expected="name: adamw, without options, no_decay, lr_factors and ema_decay",
            found=spec.name,
            fix="leave these settings out, or use engine.name: fsdp",
        )


class Inner(Protocol):
    """An optimizer of this rank's parameters, on gradients in ``main_grad``."""

    def step(self, rate: float) -> None:
        """Apply one step of AdamW at a learning rate."""

    def part(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return the range of a parameter's elements that this rank optimizes."""

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the optimizer's tensors of this rank's range, by kind; they are live."""

    def steps(self) -> int:
        """Return the number of steps so far."""

    def loaded(self, steps: int) -> None:
        """Take up tensors that were written into :meth:`state`, after ``steps`` steps."""


class Replicated:
    """AdamW on whole parameters; data-parallel ranks do the same work."""

    def __init__(self, parameters: list[nn.Parameter], spec: OptimizerSpec) -> None:
        self._masters = {each: nn.Parameter(each.detach().float()) for each in parameters}
        for parameter, master in self._masters.items():
            if parameter.dtype == torch.float32:
                master.data = parameter.detach()  # one memory
        self._adamw = torch.optim.AdamW(
            self._masters.values(), betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, fused=True
        )

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply one step, and cast the result into half-precision parameters."""
        self._adamw.param_groups[0]["lr"] = rate
        for parameter, master in self._masters.items():
            if parameter.dtype == torch.float32:
                master.data = parameter.detach()  # it may have moved
            master.grad = parameter.main_grad  # type: ignore[attr-defined]
        self._adamw.step()
        for parameter, master in self._masters.items():
            master.grad = None
            if parameter.dtype != torch.float32:
                parameter.copy_(master)

    def part(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return the whole of the parameter."""
        return 0, parameter.numel()

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return master and moments; zeros are made if there was no step."""
        master = self._masters[parameter]
        state = self._adamw.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state |= {kind: torch.zeros_like(master) for kind in KINDS[1:]}
        return {"master": master.detach().view(-1), **{kind: state[kind].view(-1) for kind in KINDS[1:]}}

    def steps(self) -> int:
        """Return the number of steps so far."""
        first = next(iter(self._masters.values()), None)
        state = None if first is None else self._adamw.state.get(first)
        return int(state["step"]) if state else 0

    @torch.no_grad()
    def loaded(self, steps: int) -> None:
        """Set the number of steps, and cast masters into the parameters."""
        for parameter, master in self._masters.items():
            self.state(parameter)
            self._adamw.state[master]["step"].fill_(steps)
            if parameter.dtype != torch.float32:
                parameter.copy_(master)


class Distributed:
    """Megatron-Core's distributed optimizer: each data-parallel rank has the state of a range of the elements."""

    def __init__(self, chunks: list[Any], spec: OptimizerSpec, dtype: torch.dtype) -> None:
        config = OptimizerConfig(
            optimizer="adam",
            lr=spec.lr,
            weight_decay=spec.weight_decay,
            adam_beta1=spec.betas[0],
            adam_beta2=spec.betas[1],
            adam_eps=spec.eps,
            clip_grad=0.0,  # Optimization clips
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        with quiet():
            self._optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
        for group in self._optimizer.param_groups:
            group["weight_decay"] = spec.weight_decay  # Megatron exempts vectors
        self._inner = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        self._owners = {parameter: each for each in self._inner for parameter in each.model_param_gbuf_map}

    def step(self, rate: float) -> None:
        """Apply one step, and gather the parameters."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with quiet():
            self._optimizer.step()

    def part(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return the range of the parameter in this rank's shard; empty if there is none."""
        owner = self._owners.get(parameter)  # absent: the whole parameter is in other ranks' shards
        if owner is None or parameter not in owner.model_param_group_index_map:
            return 0, 0
        found = owner._get_model_param_range_map(parameter)["param"]
        return found.start, found.end

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return master and moments of this rank's range; zeros are made if there was no step."""
        start, end = self.part(parameter)
        if start == end:
            empty = torch.zeros(0, dtype=torch.float32, device=parameter.device)
            return dict.fromkeys(KINDS, empty)
        found = self._tensors(parameter)
        return {"master": found["param"].detach(), **{kind: found[kind] for kind in KINDS[1:]}}

    def _tensors(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        owner = self._owners[parameter]
        group, order = owner.model_param_group_index_map[parameter]
        main = owner.optimizer.param_groups[group]["params"][order]
        state = owner.optimizer.state[main]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {kind: torch.zeros_like(main, dtype=torch.float32) for kind in KINDS[1:]}
        return {"param": main, **state}

    def _held(self) -> Iterator[nn.Parameter]:
        for parameter in self._owners:
            start, end = self.part(parameter)
            if start != end:
                yield parameter

    def steps(self) -> int:
        """Return the number of steps so far."""
        first = next(self._held(), None)
        return 0 if first is None else int(self._tensors(first)["step"])

    def loaded(self, steps: int) -> None:
        """Set the number of steps, and gather the parameters."""
        for parameter in self._held():
            self._tensors(parameter)["step"].fill_(steps)
        for each in self._inner:
            each._copy_main_params_to_model_params()
            with quiet():
                for chunk in each.model_chunks:
                    chunk.start_param_sync(force_sync=True)


class Optimization:
    """The gradients and the optimizer of the trained parameters, and its place in the schedule.

    Gradients are reduced over ranks when they are read, so that passes may follow each other.
    """

    def __init__(
        self, config: Config, spec: OptimizerSpec, weights: Weights, ranks: Ranks, chunks: list[Any], dtype: torch.dtype
    ) -> None:
        self.spec, self.schedule_step = spec, 0
        self._weights, self._ranks, self._chunks = weights, ranks, chunks
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._distributed = config.distributed_optimizer
        self.inner: Inner = Distributed(chunks, spec, dtype) if self._distributed else Replicated(parameters, spec)
        self._reduced = False
        self._everywhere = True  # whether each data-parallel rank has the whole of reduced gradients
        self._before: list[torch.Tensor] = []  # reduced gradients of earlier passes, by buffer

    def gradient_buffers(self) -> Iterator[torch.Tensor]:
        """Yield the memory of all gradients, float32."""
        for chunk in self._chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._reduced, self._before = False, []

    def begin_pass(self) -> None:
        """Keep gradients that are reduced already apart from those that the next pass adds."""
        if self._reduced:
            self.reduce(everywhere=True)
            self._before = [each.clone() for each in self.gradient_buffers()]
            for each in self.gradient_buffers():
                each.zero_()
            self._reduced = False

    @torch.no_grad()
    def reduce(self, *, everywhere: bool) -> None:
        """Sum gradients over all ranks that have a part in them. A collective operation.

        With a distributed optimizer and without ``everywhere``, each data-parallel rank gets the sums of its range.
        """
        if self._reduced:
            assert self._everywhere or not everywhere, "gradients are read before the step"
            return
        self._everywhere = everywhere or not self._distributed
        with quiet():
            finalize_model_grads(self._chunks, None, force_all_reduce=self._everywhere)
        for buffer, earlier in zip(self.gradient_buffers(), self._before or (), strict=False):
            buffer.add_(earlier)
        self._reduced, self._before = True, []

    def step(self) -> float:
        """Clip and step; return the norm before clipping. A norm that is not finite skips the step."""
        self.reduce(everywhere=not self._distributed)
        norm = self._norm()
        if math.isfinite(norm):
            if self.spec.clip_grad is not None and norm > self.spec.clip_grad:
                for buffer in self.gradient_buffers():
                    buffer.mul_(self.spec.clip_grad / norm)
            self.inner.step(learning_rate(self.spec, self.schedule_step))
            self.zero_grad()
        return norm

    def _norm(self) -> float:
        """Return the 2-norm over all parameters and ranks, summed in float64."""
        total = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        for piece, parameter in self._weights.named():
            if self._weights.counts(piece, every_replica=self._distributed):
                start, end = self.inner.part(parameter)
                part = parameter.main_grad.view(-1)[start:end]  # type: ignore[attr-defined]
                total += torch.linalg.vector_norm(part, dtype=torch.float32).double() ** 2
        return math.sqrt(float(self._ranks.sum(total)))

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return a parameter's gradient on this rank, float32; reduce first."""
        found: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
        return found

    def whole_state(self, kind: str, parameter: nn.Parameter, replicas: Any) -> torch.Tensor:
        """Return the optimizer's tensor in the parameter's shape; collective over ``replicas`` if it is shared."""
        part = self.inner.state(parameter)[kind]
        if not self._distributed:
            return part.view(parameter.shape)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        start, end = self.inner.part(parameter)
        whole[start:end] = part
        return self._ranks.sum(whole, replicas).view(parameter.shape)

    def set_schedule_step(self, step: int) -> float:
        """Move the schedule to ``step``; return the learning rate there."""
        self.schedule_step = step
        return learning_rate(self.spec, step)
