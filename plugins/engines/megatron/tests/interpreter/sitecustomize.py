"""Python imports this at its start, where ``PYTHONPATH`` has this folder: Megatron-Core gets a CPU (``redirected``).

A process may run the file (``env.preload`` of ``jackfield parity``) instead.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class BeforeMegatron(MetaPathFinder):
    """Redirects ``torch.cuda`` in processes that import Megatron-Core, right before they do."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find nothing."""
        if name == "megatron.core":
            sys.meta_path.remove(self)
            runpy.run_path(str(Path(__file__).with_name("redirected.py")))["redirect"]()
        return None


sys.meta_path.insert(0, BeforeMegatron())
