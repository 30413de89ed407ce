"""Which samples each step of a run was trained on: ``python read_ledger.py runs/mine``."""

import sys
from collections import Counter
from pathlib import Path

from jackfield.queue import effective_acks, read_ledger


def samples_by_step(folder: Path) -> Counter[int]:
    """How many samples each step used, replayed ones included. A sample counts for the last step that used it."""
    acks = effective_acks(read_ledger(folder))
    return Counter(acks.get("trainer", {}).values())


if __name__ == "__main__":
    for step, samples in sorted(samples_by_step(Path(sys.argv[1])).items()):
        print(f"step {step + 1}: {samples} samples")
