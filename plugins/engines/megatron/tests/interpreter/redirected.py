"""Sends Megatron-Core's calls of ``torch.cuda`` to the CPU. It is for tests alone.

Megatron-Core makes tensors with ``device="cuda"`` and asks for streams, random states and the current device. Here
they are CPU tensors, and streams and random states that do nothing: the engine draws no random numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensordict  # noqa: F401, it looks at torch while it is as it was
import torch
import torch.distributed
import torch.utils._device

CPU = torch.device("cpu")


class Stream:
    """A stream or an event of a device that works in order anyway."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    def wait_stream(self, _: Any) -> None:
        """Do nothing."""

    def record_event(self, *_: Any) -> Stream:
        """Return an event that has happened."""
        return self

    def synchronize(self) -> None:
        """Do nothing."""


_STREAM = Stream()
_NO_STATE = torch.zeros(16, dtype=torch.uint8)


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*arguments: Any, **options: Any) -> torch.Tensor:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = CPU
        options.pop("pin_memory", None)  # there is no device to copy to
        return make(*arguments, **options)

    return made


def _nothing() -> Callable[..., None]:
    return lambda *_, **__: None  # a new one each time: torch.compile tells functions apart


_TENSOR_TYPE = torch.Tensor.type


def _cuda_type(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    """Name a CUDA tensor's type: the distributed optimizer knows no other."""
    found = _TENSOR_TYPE(self, *arguments, **options)
    return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found


def _uncompiled(function: Any = None, **_: Any) -> Any:
    """Take the place of ``torch.compile``, which would only slow tests down."""
    return function if function is not None else lambda inner: inner


def _listed(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Take tensors of sizes, too: Megatron-Core makes arrays of CUDA tensors only."""

    def exchanged(*arguments: Any, **options: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(options.get(name), torch.Tensor):
                options[name] = options[name].tolist()
        return exchange(*arguments, **options)

    return exchanged


def redirect() -> None:
    """Redirect ``torch.cuda`` in this process."""
    torch.utils._device._device_constructors()  # ``with torch.device(...)`` keeps the functions that it changes
    for name in ("zeros", "ones", "empty", "tensor"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    replaced: dict[str, Any] = {
        "current_device": lambda: CPU,
        "get_rng_state": lambda *_, **__: _NO_STATE.clone(),
        "current_stream": lambda *_, **__: _STREAM,
        "default_stream": lambda *_, **__: _STREAM,
        "stream": lambda _: contextlib.nullcontext(),
        "Stream": Stream,
        "Event": Stream,
        "_lazy_call": _nothing(),
    }
    for name in ("set_rng_state", "manual_seed", "synchronize", "empty_cache"):
        replaced[name] = _nothing()
    for name, function in replaced.items():
        setattr(torch.cuda, name, function)
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, function)
    torch.distributed.all_to_all_single = _listed(torch.distributed.all_to_all_single)
    torch.compile = _uncompiled  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    torch.Tensor.type = _cuda_type  # type: ignore[assignment,method-assign]
