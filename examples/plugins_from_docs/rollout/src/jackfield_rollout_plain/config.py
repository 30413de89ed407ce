"""Settings of the server; importable without torch."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Config:
    """It has no settings."""
