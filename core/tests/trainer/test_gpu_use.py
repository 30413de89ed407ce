"""Use of GPUs by a false NVML. With a real one it is unverified: ``pip install nvidia-ml-py`` and any run on CUDA."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jackfield.trainer.gpu_use import GpuUse


def false_nvml(busy: list[int], fails: list[bool]) -> Any:
    module: Any = ModuleType("pynvml")

    def rates(at: int) -> SimpleNamespace:
        if fails:
            raise OSError("the GPU is lost")
        return SimpleNamespace(gpu=busy[at])

    module.nvmlInit = lambda: None
    module.nvmlDeviceGetCount = lambda: 2
    module.nvmlDeviceGetHandleByIndex = lambda at: at
    module.nvmlDeviceGetUtilizationRates = rates
    module.nvmlDeviceGetMemoryInfo = lambda at: SimpleNamespace(used=1000 * (at + 1))
    return module


def test_samples_are_weighted_by_the_seconds_of_their_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, fails = [100, 20], list[bool]()
    monkeypatch.setitem(sys.modules, "pynvml", false_nvml(busy, fails))
    use = GpuUse()
    use.sample(3.0)
    busy[:] = [0, 40]
    use.sample(1.0)
    expected = {"gpu/utilization/mean": 0.5, "gpu/utilization/min": 0.25, "gpu/memory_bytes/max": 2000.0}
    assert pytest.approx(expected) == use.drain()
    assert {} == use.drain()
    fails.append(True)
    use.sample(1.0)
    assert {} == use.drain()


def test_without_a_gpu_there_is_no_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    use = GpuUse()
    use.sample(1.0)
    assert {} == use.drain()
