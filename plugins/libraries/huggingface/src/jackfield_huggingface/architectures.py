"""Which architectures the engine ``fsdp`` trains and the rollout server ``transformers`` serves, as runs have shown.

The results are data of this package, ``architectures.json``: by name of an architecture or a variant.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

Part = Literal["trained", "served"]


@cache
def results() -> dict[str, dict[str, Any]]:
    """Return the results of runs, by name."""
    found: dict[str, dict[str, Any]] = json.loads(files(__package__).joinpath("architectures.json").read_text("utf-8"))
    return found


def advice(folder: str, refused: Part) -> str:
    """Return where else a refused model runs: ``trained`` is the engine's refusal, ``served`` the server's."""
    kind, other = _model_type(folder), {"trained": "served", "served": "trained"}[refused]
    known = [result for result in results().values() if result["model_type"] == kind]
    if any(result[refused] is True for result in known):
        return f"tiny models of {kind} are {refused}: compare this one's config.json with the library's defaults"
    if any(result[other] is True for result in known):
        who = "engine fsdp trains" if other == "trained" else "rollout server transformers serves"
        rest = "; another rollout server may serve it: vllm, sglang or trtllm" if refused == "served" else ""
        return f"the {who} {kind}{rest}"
    what = repr(kind) if kind else "this one"
    return f"use a model of another architecture: no run has shown that {what} works (docs: Model architectures)"


def _model_type(folder: str) -> str:
    try:
        described = json.loads(Path(folder, "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return ""
    return str(described.get("model_type", "")) if isinstance(described, dict) else ""
