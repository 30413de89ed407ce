"""Results beside the reference: errors, tolerances and verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from jackfield.errors import some
from jackfield_parity.batch import Batch
from jackfield_parity.launch import Played
from jackfield_parity.reference import Expected

if TYPE_CHECKING:
    from torch import Tensor

#: Largest errors by precision and measure. log_probs in nats; loss absolute; gradients, grad_norm and parameters
#: relative. Measured on models of two layers, with room for larger ones.
TOLERANCES: Mapping[str, Mapping[str, float]] = {
    "float32": {
        "weights": 0.0,
        "log_probs": 1e-4,
        "loss": 1e-5,
        "grad_norm": 1e-4,
        "gradients": 1e-3,
        "parameters": 1e-2,
    },
    "bfloat16": {
        "weights": 0.0,
        "log_probs": 0.2,
        "loss": 3e-2,
        "grad_norm": 0.1,
        "gradients": 0.5,
        "parameters": 1.0,
    },
}
_FLOOR = 1e-3  #: a tensor's error is relative to its norm, or to this share of the norm of all tensors
MEASURES = tuple(TOLERANCES["float32"])


@attrs.frozen(kw_only=True)
class Line:
    """One comparison with the reference."""

    subject: str
    measure: str
    error: float
    tolerance: float
    where: str = ""  #: the worst token or parameter
    by_name: Mapping[str, float] = attrs.field(factory=dict)  #: errors of all tensors

    @property
    def ok(self) -> bool:
        """Return whether the error is within the tolerance; NaN is not."""
        return self.error <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready fields; an error that is not finite is a text."""

        def number(value: float) -> Any:
            return value if math.isfinite(value) else str(value)

        named = {"by_name": {name: number(value) for name, value in self.by_name.items()}} if self.by_name else {}
        values = {"subject": self.subject, "measure": self.measure, "error": number(self.error)}
        return {**values, "tolerance": self.tolerance, "where": self.where, "ok": self.ok, **named}


@attrs.frozen
class Judge:
    """Makes lines for one subject."""

    subject: str
    precision: str
    changes: Mapping[str, float] = attrs.field(factory=dict)  #: tolerances that replace those of the table

    def line(self, measure: str, error: float, where: str = "", of: str = "", **more: Any) -> Line:
        """Return a line; ``of`` goes after the measure."""
        table = TOLERANCES.get(self.precision, TOLERANCES["bfloat16"])
        table = TOLERANCES["float32"] if self.precision == "float64" else table
        tolerance = self.changes.get(measure, table[measure])
        return Line(subject=self.subject, measure=measure + of, error=error, tolerance=tolerance, where=where, **more)

    def log_probs(self, expected: Sequence[Tensor], found: Sequence[Tensor], of: str = "") -> Line:
        """Compare log-probs by row: the largest difference, in nats."""
        worst, where = 0.0, ""
        for row, (one, other) in enumerate(zip(expected, found, strict=True)):
            if one.shape != other.shape:
                return self.line("log_probs", math.inf, f"row {row}: {list(other.shape)}, not {list(one.shape)}", of)
            distance = (one.double() - other.double()).abs()
            distance = torch.where(torch.isnan(distance), torch.inf, distance)
            if len(distance) and float(distance.max()) >= worst:
                worst, where = float(distance.max()), f"row {row}, token {int(distance.argmax())}"
        return self.line("log_probs", worst, where, of)

    def tensors(self, measure: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor], scale: Any) -> Line:
        """Compare tensors by name; ``scale(name)`` is what a tensor's error is relative to."""
        lost, more = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        if lost or more:
            return self.line(measure, math.inf, f"missing: {some(lost)}; unexpected: {some(more)}")
        errors = {}
        for name, one in expected.items():
            other = found[name].double()
            if other.numel() != one.numel():
                return self.line(measure, math.inf, f"{name}: {list(other.shape)}, not {list(one.shape)}")
            distance = float((other.reshape(one.shape) - one).norm())
            errors[name] = distance / max(scale(name), 1e-300) if distance else 0.0
        worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
        return self.line(measure, errors[worst], worst, by_name=errors)


def engine_lines(judge: Judge, expected: Expected, played: Played, servers: Mapping[str, Batch]) -> list[Line]:
    """Compare an engine with the reference, and the log-probs of servers with those of the engine."""
    norm = played.norms[0]
    lines = [
        _weights(judge, expected, played),
        judge.log_probs(expected.log_probs, played.inference["batch"]),
        judge.log_probs(expected.log_probs, played.training, " (training)"),
        judge.line("loss", abs(played.loss - expected.loss)),
        judge.line("grad_norm", abs(norm - expected.grad_norm) / max(expected.grad_norm, 1e-300)),
        gradient_line(judge, expected, played.gradients),
        parameter_line(judge, expected, played.parameters),
    ]
    for name, batch in servers.items():
        own = played.inference[name]
        lines.append(judge.log_probs(expected.rollouts[name], own, f" of {name}'s tokens"))
        lines.append(judge.log_probs(own, batch.old_log_probs, f" of {name} beside this"))
    return lines


def _weights(judge: Judge, expected: Expected, played: Played) -> Line:
    wanted = _named(expected, expected.start, played.start)
    return judge.tensors("weights", wanted, played.start, lambda name: float(wanted[name].norm()))


def gradient_line(judge: Judge, expected: Expected, found: Mapping[str, Tensor]) -> Line:
    """Compare gradients by name, relative to their norms."""
    wanted = _named(expected, expected.gradients, found)
    least = _FLOOR * _norm(wanted.values())
    return judge.tensors("gradients", wanted, found, lambda name: max(float(wanted[name].norm()), least))


def parameter_line(judge: Judge, expected: Expected, found: Mapping[str, Tensor]) -> Line:
    """Compare parameters after the steps, relative to the norm of their change, or to rounding in their dtype."""
    wanted = _named(expected, expected.parameters, found)
    start = _named(expected, expected.start, found)
    change = {name: one - start[name] for name, one in wanted.items() if name in start}
    least = _FLOOR * _norm(change.values())

    def scale(name: str) -> float:
        rounding = torch.finfo(found[name].dtype).eps if found[name].is_floating_point() else 0.0
        return max(float(change[name].norm()), least, rounding * float(wanted[name].norm()))

    return judge.tensors("parameters", wanted, found, scale)


def _norm(tensors: Any) -> float:
    return math.sqrt(sum(float(one.square().sum()) for one in tensors))


def _named(expected: Expected, tensors: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors under the names of the parameters or, if ``found`` has those, of the checkpoint."""
    if tensors.keys() == found.keys():
        return tensors
    other = expected.as_checkpoint(tensors)
    return other if len(other.keys() ^ found.keys()) < len(tensors.keys() ^ found.keys()) else tensors
