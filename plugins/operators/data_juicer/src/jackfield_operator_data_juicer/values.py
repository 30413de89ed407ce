"""Values of rows and of Data-Juicer's samples."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_BYTES = "base64"


def texts(sample: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return a sample with the contents of conversations as texts, for operators that only look at them."""
    for key in keys:
        value = sample.get(key)
        if isinstance(value, list) and value and all(isinstance(each, dict) and "content" in each for each in value):
            sample[key] = "\n".join(str(each["content"]) for each in value)
    return sample


def plain(value: Any) -> Any:
    """Return JSON values; raise ``TypeError`` or ``ValueError`` for others."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a value is {value}")
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"a value is a {type(value).__name__}")


def packed(value: Any) -> Any:
    """Return a value in which bytes are ``{"base64": text}``."""
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {name: packed(each) for name, each in value.items()}
    return [packed(each) for each in value] if isinstance(value, list | tuple) else value


def unpacked(value: Any) -> Any:
    """Return the value of which :func:`packed` made this one."""
    if isinstance(value, dict) and value.keys() == {_BYTES}:
        return base64.b64decode(value[_BYTES])
    if isinstance(value, dict):
        return {name: unpacked(each) for name, each in value.items()}
    return [unpacked(each) for each in value] if isinstance(value, list) else value


class Recorded(dict[str, Any]):
    """Statistics that remember which of them were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read = dict[str, None]()

    def __getitem__(self, name: str) -> Any:
        self.read[name] = None
        return super().__getitem__(name)
