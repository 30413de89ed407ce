"""A part's description as plain values, for the command line and for the reference page."""

from __future__ import annotations

from typing import Any

from jackfield.algorithms.named import Algorithm
from jackfield.algorithms.options import ranges
from jackfield.algorithms.registry import Part

#: Inputs that the trainer always has, and that need no mention.
_ALWAYS = frozenset(
    {"global_sequences", "global_tokens", "kept", "length_norm", "log_probs", "mask", "response_mask", "token_rewards"}
)


def describe(chosen: Part) -> dict[str, Any]:
    """Return equation, paper, options, needs and scope of a part as plain values."""
    fields: dict[str, Any] = {
        "kind": chosen.kind,
        "name": chosen.name,
        "equation": chosen.equation,
        "paper": chosen.paper,
        "scope": chosen.scope,
        "batch_options": dict(chosen.batch_options),
    }
    if chosen.kind == "algorithm":
        algorithm: Algorithm = chosen.function()
        return fields | {
            "advantages": algorithm.advantages,
            "advantages_options": dict(algorithm.advantages_options),
            "loss": algorithm.loss,
            "loss_options": dict(algorithm.loss_options),
            "aggregation": algorithm.aggregation,
            "needs": list(algorithm.needs),
            "differs": chosen.differs,
        }
    return fields | {
        "needs": [name for name in chosen.needs if name not in _ALWAYS],
        "optional": [name for name in chosen.accepts if name not in _ALWAYS],
        "options": {name: None if repr(value).startswith("<") else value for name, value in chosen.options.items()},
        "ranges": ranges(chosen),
        "precomputed": list(chosen.whole_batch),
        "differs": chosen.differs,
    }
