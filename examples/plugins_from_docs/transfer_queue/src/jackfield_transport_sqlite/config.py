"""Settings of the backend; importable without torch."""

from __future__ import annotations

import attrs

from jackfield.sdk import option


@attrs.frozen(kw_only=True)
class Config:
    """Where the file is."""

    file: str = option("samples.sqlite", help="name of the file in the queue's folder")
