"""How much the GPUs of this machine are used, by NVIDIA's NVML through the package nvidia-ml-py."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any


class GpuUse:
    """Samples of NVML at the end of each stage, weighted by the seconds of the stage.

    NVML's utilisation is that of about the last second before. Without the package or a GPU there are no samples.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._busy: list[float] = []  #: by GPU: utilisation (0 to 1) times seconds
        self._seconds = 0.0
        self._memory = 0.0  #: most bytes in use on a GPU
        with suppress(Exception):  # no package, no driver or no GPU
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(at) for at in range(self._nvml.nvmlDeviceGetCount())]

    def sample(self, seconds: float) -> None:
        """Take a sample after a stage that took so long."""
        if not self._handles:
            return
        try:
            used = [self._nvml.nvmlDeviceGetUtilizationRates(each).gpu / 100.0 for each in self._handles]
            memory = [float(self._nvml.nvmlDeviceGetMemoryInfo(each).used) for each in self._handles]
        except Exception:  # a GPU that cannot be asked any more must not end the run
            self._handles = []
            return
        self._busy = [old + new * seconds for old, new in zip(self._busy or [0.0] * len(used), used, strict=True)]
        self._seconds, self._memory = self._seconds + seconds, max(self._memory, *memory)

    def drain(self) -> dict[str, float]:
        """Return the metrics since the last call; none without a sample."""
        if not self._busy or not self._seconds:
            return {}
        shares, memory = [busy / self._seconds for busy in self._busy], self._memory
        self._busy, self._seconds, self._memory = [], 0.0, 0.0
        named = {"gpu/utilization/mean": sum(shares) / len(shares), "gpu/utilization/min": min(shares)}
        return {**named, "gpu/memory_bytes/max": memory}
