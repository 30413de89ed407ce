"""What runs in a worker process of the tool `sandbox`: it starts a box for each call."""

from __future__ import annotations

from typing import Any

from jackfield_sandbox.box import Box, Lost, last_line, probe


class Code:
    """Runs code of the model in boxes."""

    def __init__(self, **limits: Any) -> None:
        self._limits = limits

    def run(self, task: dict[str, Any]) -> dict[str, Any]:
        """Find the level of isolation, or run code: return what it wrote, and how it ended."""
        if "probe" in task:
            return probe(task["probe"], {**self._limits, "command": None}, task["folder"])
        try:
            box = Box(task["level"], {**self._limits, "seconds": task["seconds"]}, task["folder"])
            try:
                message = {"do": "stdin", "code": task["code"], "stdin": "", "seconds": task["seconds"]}
                reply: dict[str, Any] = box.ask(message)
            finally:
                box.close()
        except Lost as error:
            return {"end": "lost", "out": "", "err": str(error), "status": 1}
        return {**reply, "last": last_line(reply["err"])}
