"""How much the GPUs of this machine are used, by NVIDIA's NVML through the package nvidia-ml-py."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any


class GpuUse:
    """Samples of NVML at the end of each stage, weighted by its seconds; none without the package or a GPU.

    NVML's utilisation is that of about the last second before.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._gpus: list[Any] = []
        self._samples: list[tuple[float, list[float], float]] = []  #: seconds, use (0 to 1) by GPU, most bytes on one
        with suppress(Exception):  # no package, no driver or no GPU
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._gpus = [self._nvml.nvmlDeviceGetHandleByIndex(at) for at in range(self._nvml.nvmlDeviceGetCount())]

    def sample(self, seconds: float) -> None:
        """Take a sample after a stage that took so long."""
        try:
            use = [self._nvml.nvmlDeviceGetUtilizationRates(each).gpu / 100.0 for each in self._gpus]
            memory = [float(self._nvml.nvmlDeviceGetMemoryInfo(each).used) for each in self._gpus]
        except Exception:  # a GPU that cannot be asked any more must not end the run
            self._gpus, use = [], []
        if use:
            self._samples.append((seconds, use, max(memory)))

    def drain(self) -> dict[str, float]:
        """Return the metrics since the last call; none without a sample."""
        samples, self._samples = self._samples, []
        if not (total := sum(seconds for seconds, _, _ in samples)):
            return {}
        by_gpu = zip(*([seconds * one for one in use] for seconds, use, _ in samples), strict=True)
        shares = [sum(each) / total for each in by_gpu]
        named = {"gpu/utilization/mean": sum(shares) / len(shares), "gpu/utilization/min": min(shares)}
        return {**named, "gpu/memory_bytes/max": max(memory for _, _, memory in samples)}
