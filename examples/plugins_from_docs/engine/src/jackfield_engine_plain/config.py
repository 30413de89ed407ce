"""Settings of the engine; importable without torch."""

from __future__ import annotations

from typing import Literal

import attrs

from jackfield.sdk import option


@attrs.frozen(kw_only=True)
class Config:
    """How the model is computed. What is trained stands in the engine's context."""

    attention: Literal["sdpa", "eager"] = option("sdpa", help="attention kernel of transformers")
