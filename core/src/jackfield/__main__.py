"""``python -m jackfield``: the command line."""

from __future__ import annotations

from jackfield.cli import main

if __name__ == "__main__":
    main(prog_name="python -m jackfield")
