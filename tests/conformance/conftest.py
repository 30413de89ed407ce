"""Makes ``mutants`` importable for the tests here; it is not part of the wheel."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
