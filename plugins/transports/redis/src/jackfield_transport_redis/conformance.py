"""Which server ``jackfield plugins check redis`` tries the plugin with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jackfield.errors import PluginError

URL_VARIABLE = "JACKFIELD_REDIS_URL"


def server(folder: Path) -> dict[str, Any]:
    """Settings: the server of the environment variable ``JACKFIELD_REDIS_URL``; its rows stay on it.

    Raises:
        PluginError: the variable is not set.
    """
    url = os.environ.get(URL_VARIABLE)
    if not url:
        raise PluginError(
            "the checks need a Redis server",
            code="plugin.check",
            where=URL_VARIABLE,
            fix=f"start one (redis-server --appendonly yes) and set {URL_VARIABLE}=redis://127.0.0.1:6379/0",
        )
    return {"settings": {"url": url}}
