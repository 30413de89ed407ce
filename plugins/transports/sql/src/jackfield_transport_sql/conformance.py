"""Which database ``jackfield plugins check sql`` tries the plugin with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

URL_VARIABLE = "JACKFIELD_SQL_URL"


def database(folder: Path) -> dict[str, Any]:
    """Settings: the database of the environment variable ``JACKFIELD_SQL_URL``; without it, SQLite."""
    url = os.environ.get(URL_VARIABLE)
    return {"settings": {} if url is None else {"url": url}}
