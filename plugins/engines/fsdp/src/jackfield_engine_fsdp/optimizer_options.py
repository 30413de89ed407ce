"""The optimizers by name, with their further settings. Importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs.validators import ge, gt, le, lt

from jackfield.abc.engine import OptimizerSpec
from jackfield.errors import EngineError
from jackfield.sdk import option, structure


@attrs.frozen(kw_only=True)
class NoOptions:
    """An optimizer whose settings are all in ``OptimizerSpec``."""


@attrs.frozen(kw_only=True)
class EightBitOptions:
    """Further settings of 8-bit AdamW (Dettmers et al. 2021)."""

    block_size: int = option(256, "numbers that share a scale; a part of another size stays in float32", gt(1))


@attrs.frozen(kw_only=True)
class MuonOptions:
    """Further settings of Muon (Jordan 2024)."""

    momentum: float = option(0.95, "decay of the running average of gradients", [ge(0.0), lt(1.0)])
    nesterov: bool = option(True, "use the gradient beside the average, as Nesterov's momentum does")
    ns_steps: int = option(5, "Newton-Schulz iterations", [gt(0), lt(100)])
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = option(
        "match_rms_adamw", "scale of an update: that of AdamW, so that one lr fits both, or that of Jordan's Muon"
    )


@attrs.frozen(kw_only=True)
class AdafactorOptions:
    """Further settings of Adafactor (Shazeer and Stern 2018)."""

    beta2_decay: float = option(-0.8, "exponent of the decay of squared gradients", [ge(-10.0), le(0.0)])
    d: float = option(1.0, "bound of the root mean square of an update", [ge(1.0), le(1e6)])
    eps2: float = option(1e-3, "least root mean square of a parameter that scales its rate", [gt(0.0), le(1.0)])


@attrs.frozen(kw_only=True)
class SGDOptions:
    """Further settings of stochastic gradient descent."""

    momentum: float = option(0.0, "decay of the running sum of gradients", [ge(0.0), lt(1.0)])
    nesterov: bool = option(False, "use Nesterov's momentum; needs a momentum")


_OPTIONS: Mapping[str, type[Any]] = {
    "adafactor": AdafactorOptions,
    "adamw": NoOptions,
    "adamw_8bit": EightBitOptions,
    "muon": MuonOptions,
    "sgd": SGDOptions,
}

#: Fields of the spec without an effect.
_UNUSED = {"adafactor": ("betas", "eps"), "sgd": ("betas", "eps")}


def read_options(spec: OptimizerSpec) -> Any:
    """Return the further settings of an optimizer.

    Unknown names and options are refused, as are settings without an effect (``config.invalid-value``).
    """
    if spec.name not in _OPTIONS:
        what, expected = f"unknown optimizer {spec.name!r}", "one of " + ", ".join(_OPTIONS)
        raise _refusal(what, where="optimizer.name", expected=expected, found=repr(spec.name))
    options: Any = structure(_OPTIONS[spec.name], dict(spec.options), "optimizer.options", EngineError)
    defaults = OptimizerSpec()
    for field in _UNUSED.get(spec.name, ()):
        if getattr(spec, field) != getattr(defaults, field):
            expected, found = f"{getattr(defaults, field)}, the default", getattr(spec, field)
            what, where = f"the optimizer {spec.name} has no {field}", f"optimizer.{field}"
            raise _refusal(what, where=where, expected=expected, found=found, fix=f"leave out {where}")
    if isinstance(options, SGDOptions) and options.nesterov and not options.momentum:
        what, fix = "Nesterov's momentum needs a momentum", "set options.momentum, or nesterov to false"
        raise _refusal(what, where="optimizer.options.nesterov", expected=False, found=True, fix=fix)
    return options


def _refusal(message: str, **details: Any) -> EngineError:
    return EngineError(message, code="config.invalid-value", **details)
