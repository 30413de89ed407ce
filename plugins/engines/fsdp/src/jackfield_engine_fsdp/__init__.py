"""Jackfield's training engine on PyTorch FSDP2; the manifest ``plugin.toml`` beside this file names its parts."""

from __future__ import annotations

__all__: list[str] = []
