"""An engine's own random numbers (dropout), apart from everything else that draws in the process."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class RandomStreams:
    """The states of torch's, numpy's and Python's generators, swapped in while the engine computes.

    So two engines in one process, or a sampler beside an engine, do not disturb each other, and a checkpoint of
    this engine is complete.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        outside = self._read()
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        self._inside = self._read()
        self._write(outside)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, random numbers come from this engine's streams."""
        outside = self._read()
        self._write(self._inside)
        try:
            yield
        finally:
            self._inside = self._read()
            self._write(outside)

    def state(self) -> dict[str, Any]:
        """The streams as JSON-ready values."""
        inside = self._inside
        kind, keys, position, has_gauss, gauss = inside["numpy"]
        version, words, next_gauss = inside["python"]
        return {
            "torch": _encode(inside["torch"]),
            "accelerator": None if inside["accelerator"] is None else _encode(inside["accelerator"]),
            "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
            "python": [version, list(words), next_gauss],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state` was taken."""
        kind, keys, position, has_gauss, gauss = state["numpy"]
        version, words, next_gauss = state["python"]
        accelerator = state["accelerator"]
        if self._inside["accelerator"] is None or accelerator is None:
            accelerator = self._inside["accelerator"]
        else:
            accelerator = _decode(accelerator)
        self._inside = {
            "torch": _decode(state["torch"]),
            "accelerator": accelerator,
            "numpy": (kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss),
            "python": (version, tuple(words), next_gauss),
        }

    def _read(self) -> dict[str, Any]:
        accelerator = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return {
            "torch": torch.get_rng_state(),
            "accelerator": accelerator,
            "numpy": np.random.get_state(),
            "python": random.getstate(),
        }

    def _write(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        if state["accelerator"] is not None:
            torch.cuda.set_rng_state(state["accelerator"], self._device)
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
