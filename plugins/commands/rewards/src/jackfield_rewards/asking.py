"""Asks a service what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jackfield.clock import Clock
from jackfield.sdk.rpc import Address, Contract, connect, stub
from jackfield_rewards.serving import ADDRESS_FILE, Overview

_SECONDS = 10.0


async def ask(place: Path) -> list[dict[str, Any]]:
    """Return what each reward of a service is doing; ``rpc.address`` or ``rpc.lost`` if there is no service."""
    address = Address.read(place / ADDRESS_FILE if place.is_dir() else place)
    overview = Contract(Overview)
    connection = await connect(address, "jackfield rewards status", Clock(), {"service": overview}, kills=False)
    try:
        return await stub(connection, "service", overview, Overview, _SECONDS).overview()
    finally:
        await connection.close()
