"""Ranks of an engine as forks of a process that has imported torch: importing it costs more than a scenario."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jackfield_commands import CommandServer

#: Ranks meet on the loopback interface, and find the modules that tests share.
VARIABLES = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).parent), "PYTHONWARNINGS": "error"}


def run_ranks(
    server: CommandServer, script: Path, folder: Path, world: int, settings: Mapping[str, Any], seconds: float
) -> None:
    """Run ``script SETTINGS.json`` for each rank; the settings have ``rank``, ``world`` and ``out``, the folder, too.

    Raises:
        AssertionError: a rank fails, or does not end in time; the message has what it printed.
    """
    commands = []
    for rank in range(world):
        path = folder / f"settings_{rank}.json"
        path.write_text(json.dumps({**settings, "rank": rank, "world": world, "out": str(folder)}))
        log = folder / f"log_{rank}.txt"
        commands.append(server.start(str(script), str(path), program="python", output=log, environment=VARIABLES))
    ends = time.monotonic() + seconds
    try:
        codes = [command.wait(max(0.0, ends - time.monotonic())).code for command in commands]
    finally:
        for command in commands:
            command.kill()
    assert [0] * world == codes, "\n".join(command.out[-3000:] for command in commands)
