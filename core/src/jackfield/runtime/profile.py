"""Profiles of a step: a torch trace of this process, and a flame graph of its event loop."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch.profiler import profile

T = TypeVar("T")

_trace: profile | None = None  #: of this process; torch records one at a time


def begin_trace() -> None:
    """Record what torch does in all threads of this process, if a trace has not begun."""
    global _trace
    if _trace is None:
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import profile

        every_thread = _ExperimentalConfig(profile_all_threads=True)  # the engine's and those of replicas
        _trace = profile(experimental_config=every_thread)
        _trace.start()


def end_trace(file: str | None = None) -> None:
    """End the trace, if one has begun, and write it to ``file`` in the Chrome trace event format."""
    global _trace
    if _trace is not None:
        ended, _trace = _trace, None
        ended.stop()
        if file is not None:
            ended.export_chrome_trace(file)


def labelled(label: str, call: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a call, which has this label in the trace, if there is one."""
    if _trace is None:
        return call(*arguments)
    from torch.profiler import record_function

    with record_function(label):
        return call(*arguments)


@contextmanager
def flame_graph(file: Path, title: str) -> Iterator[None]:
    """Sample the stack of this thread every millisecond, and write them as a web page, which loads no other."""
    from pyinstrument import Profiler

    sampler = Profiler(async_mode="disabled")  # the whole event loop, not one task
    sampler.start(target_description=title)
    try:
        yield
    finally:
        sampler.stop()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(re.sub(r"https://fonts\.[^\"']*", "data:text/css,", sampler.output_html()), encoding="utf-8")
