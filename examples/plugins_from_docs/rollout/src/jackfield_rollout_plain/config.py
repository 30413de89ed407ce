"""Settings of the server; importable without torch."""

from __future__ import annotations

import attrs

__all__ = ["Config"]


@attrs.frozen(kw_only=True)
class Config:
    """It has no settings."""
