"""Checks of engines: AdamW, its schedule, determinism, offloading, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import attrs
import torch

from jackfield.abc.engine import BaseEngine, LoadCheckpointRequest, OptimizerSpec, SaveCheckpointRequest, TokenOutput
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support import engine as support

_OPTIMIZER = "docs/plugins/engine.md#optimizer"
_CHECKPOINTS = "docs/plugins/engine.md#checkpoints"
_STATE = "docs/plugins/engine.md#state"

#: A schedule on which every step has another rate.
COSINE = OptimizerSpec(lr=2e-2, weight_decay=0.1, scheduler="cosine", warmup_steps=2, total_steps=9, min_lr_ratio=0.1)


def _assert_follows_adamw(engine: BaseEngine, spec: OptimizerSpec, rates: Iterator[float], what: str) -> None:
    """Require that three steps move the weights as AdamW in float64 does on the same gradients."""
    start = support.weights(engine)
    plain = {name: tensor.double().requires_grad_() for name, tensor in start.items()}
    optimizer = torch.optim.AdamW(
        plain.values(), lr=next(rates), betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
    )
    with engine.train_mode():
        for _ in range(3):
            found = support.gradients(engine)
            for name, tensor in plain.items():
                tensor.grad = found[name].double()
            if spec.clip_grad is not None:
                torch.nn.utils.clip_grad_norm_(plain.values(), spec.clip_grad)
            optimizer.step()
            engine.optimizer_step()
            engine.lr_scheduler_step()
            optimizer.param_groups[0]["lr"] = next(rates)
    end = support.weights(engine)
    moved = {name: plain[name].detach() - start[name].double() for name in plain}
    found = {name: end[name].double() - start[name].double() for name in plain}
    support.assert_close(moved, found, 2e-3, what)


@check("ENG-040", page=_OPTIMIZER)
def steps_are_adamw(subject: Subject) -> None:
    """A step is AdamW's, with the spec's rate, betas, eps and weight decay, on gradients clipped to the global norm."""
    for clip_grad in (0.05, None):
        spec = OptimizerSpec(lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.2, clip_grad=clip_grad)
        with support.opened(subject, optimizer=spec) as engine:
            what = f"changes of three steps with clip_grad={clip_grad}"
            _assert_follows_adamw(engine, spec, iter([spec.lr] * 4), what)


@check("ENG-041", page=_OPTIMIZER)
def the_norm_is_the_one_before_clipping(subject: Subject) -> None:
    """``optimizer_step`` returns the global gradient norm before clipping."""
    for clip_grad in (0.05, None):
        with support.opened(subject, optimizer=attrs.evolve(support.OPTIMIZER, clip_grad=clip_grad)) as engine:
            found = support.gradients(engine)
            wanted = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in found.values()))
            with engine.train_mode():
                norm = engine.optimizer_step()
        close = abs(wanted - norm) <= 1e-4 * wanted
        assert close, f"with clip_grad={clip_grad} the norm is {norm:g}, expected {wanted:g}"


@check("ENG-042", page=_OPTIMIZER)
def a_norm_that_is_not_finite_skips_the_step(subject: Subject) -> None:
    """A gradient norm that is not finite is returned unchanged, and weights and optimizer state do not change."""
    spec = attrs.evolve(support.OPTIMIZER, on_nonfinite="skip")
    with support.opened(subject, optimizer=spec) as engine, support.opened(subject, optimizer=spec) as other:
        for each in (engine, other):
            support.train(each)
        before = support.weights(engine)
        for bad in (math.nan, math.inf):

            def broken(output: TokenOutput, micro: object, bad: float = bad) -> tuple[torch.Tensor, dict[str, float]]:
                return (output.log_probs * bad).sum(), {}

            with engine.train_mode():
                support.gradients(engine, loss=broken)
                norm = engine.optimizer_step()
            assert not math.isfinite(norm), f"gradients of {bad} have the norm {norm:g}"
            support.assert_same_tensors(before, support.weights(engine), f"weights after gradients of {bad}")
        for each in (engine, other):
            support.train(each)
        support.assert_same_tensors(
            support.weights(other), support.weights(engine), "weights of the step after a skipped one"
        )


def _rates(spec: OptimizerSpec) -> Iterator[float]:
    """Yield the rate of each step, from the first on: linear from 0 over the warm-up, then the decay."""
    step = 0
    while True:
        if step < spec.warmup_steps:
            factor = step / spec.warmup_steps
        elif spec.scheduler == "constant":
            factor = 1.0
        else:
            length = (spec.total_steps or 0) - spec.warmup_steps
            progress = min(1.0, (step - spec.warmup_steps) / length)
            left = 1.0 - progress if spec.scheduler == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
            factor = spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * left
        yield spec.lr * factor
        step += 1


@check("ENG-043", page=_OPTIMIZER)
def schedules_have_their_closed_form(subject: Subject) -> None:
    """``lr_scheduler_step`` returns the next step's rate: constant, linear or cosine, after a linear warm-up from 0."""
    data = support.batch()
    for scheduler in ("constant", "linear", "cosine"):
        spec = attrs.evolve(COSINE, scheduler=scheduler)
        rates = _rates(spec)
        next(rates)  # the rate of the first step, which no call returns
        wanted = [next(rates) for _ in range(11)]
        with support.opened(subject, optimizer=spec) as engine, engine.train_mode():
            engine.forward_backward_batch(data, support.Loss())
            engine.optimizer_step()  # some schedulers insist on it
            found = [engine.lr_scheduler_step() for _ in wanted]
        close = all(abs(one - other) <= 1e-6 * spec.lr for one, other in zip(wanted, found, strict=True))
        assert close, f"rates of the {scheduler} schedule are {found}, expected {wanted}"


@check("ENG-044", page=_OPTIMIZER)
def steps_use_the_schedule(subject: Subject) -> None:
    """Each step uses the schedule's rate: 0 at the first step of a warm-up, then the returned rate."""
    spec = attrs.evolve(COSINE, eps=1e-3, clip_grad=None)
    with support.opened(subject, optimizer=spec) as engine:
        _assert_follows_adamw(engine, spec, _rates(spec), "what three steps on a cosine schedule change")


@check("ENG-050", page=_CHECKPOINTS)
def save_load_step_is_step(subject: Subject) -> None:
    """A step after save and load into a new engine is bitwise the step without them: moments and schedule are saved."""
    with support.opened(subject, optimizer=COSINE) as engine:
        support.train(engine, steps=3)
        saved = support.weights(engine)
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(subject.folder / "native")))
        support.assert_same_tensors(saved, support.weights(engine), "weights after a checkpoint was saved")
        support.train(engine, steps=2)
        wanted, rate = support.weights(engine), engine.lr_scheduler_step()
    with support.opened(subject, optimizer=COSINE, seed=8) as engine:
        engine.load_checkpoint(LoadCheckpointRequest(folder=str(subject.folder / "native")))
        support.assert_same_tensors(saved, support.weights(engine), "weights after a checkpoint was loaded")
        support.train(engine, steps=2)
        found = support.weights(engine)
        support.assert_same_tensors(wanted, found, "weights two steps after a checkpoint was loaded")
        other = engine.lr_scheduler_step()
    assert rate == other, f"the schedule goes on with {other:g}, expected {rate:g}"


@check("ENG-051", page=_CHECKPOINTS)
def random_state_is_saved(subject: Subject) -> None:
    """A checkpoint has the state of the random generators: dropout continues as if nothing had been saved."""
    what = "weights of a model with dropout, after a checkpoint"
    support.assert_goes_on(subject, what, **support.dropout(subject))


@check("ENG-052", page=_CHECKPOINTS)
def model_only_leaves_the_rest(subject: Subject) -> None:
    """``model_only`` loads the weights and leaves optimizer and schedule as they are."""
    with support.opened(subject, optimizer=COSINE) as engine:
        support.train(engine, steps=3)
        saved = support.weights(engine)
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(subject.folder / "native")))
    rates = _rates(COSINE)
    wanted = [next(rates) for _ in range(2)][1]
    with support.opened(subject, optimizer=COSINE) as engine:
        engine.load_checkpoint(LoadCheckpointRequest(folder=str(subject.folder / "native"), model_only=True))
        support.assert_same_tensors(saved, support.weights(engine), "weights after a checkpoint was loaded, model_only")
        with engine.train_mode():
            engine.forward_backward_batch(support.batch(), support.Loss())
            engine.optimizer_step()
        support.assert_same_tensors(saved, support.weights(engine), "weights after a step with the warm-up's rate 0")
        found = engine.lr_scheduler_step()
        assert abs(wanted - found) <= 1e-6 * COSINE.lr, f"after model_only the rate is {found:g}, expected {wanted:g}"


@check("ENG-053", page=_CHECKPOINTS, using=support.opened)
def saving_tells_what_was_written(subject: Subject, engine: BaseEngine) -> None:
    """The result of ``save_checkpoint`` names the folder and files that exist in it, in both formats."""
    forms: tuple[Literal["native", "huggingface"], ...] = ("native", "huggingface")
    for form in forms:
        folder = subject.folder / form
        result = engine.save_checkpoint(SaveCheckpointRequest(folder=str(folder), format=form))
        assert str(folder) == result.folder, f"{form}: the result names {result.folder!r}, expected {str(folder)!r}"
        assert result.files, f"{form}: the result names no files"
        absent = [name for name in result.files if not (folder / name).is_file()]
        assert not absent, f"{form}: files in the result that are not there: {absent[:4]}"


@check("ENG-060", page=_STATE)
def offloading_changes_nothing(subject: Subject) -> None:
    """Moving weights, optimizer state and gradients to the CPU and back changes nothing."""
    with support.opened(subject) as engine, support.opened(subject) as other:
        for each in (engine, other):
            support.train(each)
            support.gradients(each)
            if each is engine:
                for parts in ((True, True, True), (True, False, False), (False, True, True)):
                    each.to("cpu", *parts)
                    each.to(each.context.device, *parts)
            with each.train_mode():
                each.optimizer_step()
        support.assert_same_tensors(support.weights(other), support.weights(engine), "weights after offloading")


def _trained(subject: Subject, seed: int, disturbance: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(disturbance)
    with support.opened(subject, **support.dropout(subject), seed=seed) as engine:
        for step in range(2):
            support.train(engine)
            torch.rand(1 + disturbance + step)
        return support.weights(engine)


@check("ENG-061", page=_STATE)
def one_seed_gives_one_engine(subject: Subject) -> None:
    """Two engines with one seed and one context are equal, whatever else draws random numbers in the process."""
    one, other = _trained(subject, 5, 0), _trained(subject, 5, 1)
    support.assert_same_tensors(one, other, "weights of two engines of one seed, trained with dropout")


@check("ENG-062", capability="dropout", page=_STATE)
def another_seed_gives_another_engine(subject: Subject) -> None:
    """Random numbers follow the seed: training with dropout differs under another seed."""
    one, other = _trained(subject, 5, 0), _trained(subject, 6, 0)
    same = all(torch.equal(one[name], other[name]) for name in one)
    assert not same, "engines of two seeds, trained with dropout, are equal"
