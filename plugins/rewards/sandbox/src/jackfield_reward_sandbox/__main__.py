"""Prints which levels of isolation this machine allows: ``python -m jackfield_reward_sandbox``."""

from __future__ import annotations

import tempfile

import attrs

from jackfield_reward_sandbox.settings import Config
from jackfield_sandbox.box import LEVELS, attempt


def main() -> None:
    """Try each level, and print what was found."""
    config = Config()
    for level in LEVELS:
        reason = attempt(level, {**attrs.asdict(config), "program": config.program}, tempfile.gettempdir())
        print(f"{level}: {'allowed' if reason is None else reason}")


if __name__ == "__main__":
    main()
