"""The wire format: an 8-byte length and a JSON header; after a tensor's header, its raw bytes."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any

import torch

_LENGTH = struct.Struct(">Q")
_LARGEST_HEADER = 1 << 16
END: Mapping[str, Any] = {"end": True}


def header_of(fields: Mapping[str, Any]) -> bytes:
    """A header, ready to be sent."""
    text = json.dumps(dict(fields)).encode()
    return _LENGTH.pack(len(text)) + text


def payload(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in row-major order; a copy only where it is not so in memory."""
    plain = tensor.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")


async def read_header(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next header.

    Raises:
        EOFError: the connection ended. ValueError: this is not our format.
    """
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > _LARGEST_HEADER:
        raise ValueError(f"a header of {size} bytes")
    fields = json.loads(await reader.readexactly(size))
    if not isinstance(fields, dict):
        raise ValueError(f"a header that is {fields!r}")
    return fields


async def read_tensor(reader: asyncio.StreamReader, fields: Mapping[str, Any]) -> torch.Tensor:
    """The tensor that a header announces."""
    tensor = torch.empty(fields["shape"], dtype=getattr(torch, fields["dtype"]))
    if tensor.numel():
        content = await reader.readexactly(tensor.nbytes)
        tensor.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return tensor
