"""Settings of the single-turn agent: it has none."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Config:
    """Nothing to set: the prompt limit and the sampling parameters belong to the run."""
