"""The state of the controller's random generators."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any


def random_state() -> dict[str, Any]:
    """Return the state of this process's random generators as plain values.

    These are Python's, and those of numpy and torch if loaded. Engines and rollout servers have their own.
    """
    state: dict[str, Any] = {"python": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    if "torch" in sys.modules:
        state["torch"] = base64.b64encode(bytes(sys.modules["torch"].get_rng_state().tolist())).decode("ascii")
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore what :func:`random_state` returned, but for libraries that this process has not loaded."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "torch" in state and "torch" in sys.modules:
        torch = sys.modules["torch"]
        words = list(base64.b64decode(state["torch"]))
        torch.set_rng_state(torch.tensor(words, dtype=torch.uint8))
