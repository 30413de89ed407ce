"""Megatron-Core warns of libraries and defaults that it does without on purpose."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(*, imports: bool = False) -> Iterator[None]:
    """Hide Megatron-Core's own warnings inside the block, and with ``imports`` those of what it imports."""
    with warnings.catch_warnings():
        if imports:
            warnings.simplefilter("ignore")
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.", category=FutureWarning)  # of old names
        yield
