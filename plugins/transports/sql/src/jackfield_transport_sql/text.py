"""What people read of a row beside its typed blobs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jackfield.errors import ConfigError, PluginError
from jackfield.sdk.cells import Cell, ColumnType, join

_TEXTS = {"prompt_ids": "prompt", "response_ids": "response"}


class Reader:
    """Rewards as numbers and, with a tokenizer, token ids as text."""

    def __init__(self, tokenizer: str | None) -> None:
        self._tokenizer = None if tokenizer is None else _load(Path(tokenizer))

    def columns(self, cells: Mapping[str, Cell]) -> dict[str, Any]:
        """``reward``, ``prompt`` and ``response`` of a row; None where ``cells`` do not say."""
        found: dict[str, Any] = {"reward": None, "prompt": None, "response": None}
        if "reward" in cells:
            found["reward"] = _sum(cells["reward"])
        for name, column in _TEXTS.items():
            if self._tokenizer is not None and name in cells:
                ids = join(name, [cells[name]]).values.reshape(-1).tolist()
                found[column] = self._tokenizer.decode(ids, skip_special_tokens=False).replace("\0", "\ufffd")
        return found


def _sum(cell: Cell) -> float | None:
    values = join("reward", [cell]).values
    if not values.numel() or values.is_complex() or ColumnType.parse(cell[0]).kind == "json":
        return None
    total = float(values.double().sum())
    return total if math.isfinite(total) else None


def _load(folder: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        message = "texts need the package tokenizers"
        raise PluginError(message, where="tokenizer", fix="pip install 'jackfield-transport-sql[text]'") from error
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError("the folder has no tokenizer.json", where="tokenizer", found=str(folder))
    return Tokenizer.from_file(str(file))
