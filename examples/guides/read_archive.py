"""How the mean reward of what a run has trained on changed by step: ``python read_archive.py runs/mine-archive``."""

import sys
from pathlib import Path

from pyarrow import dataset


def rewards_by_step(archive: Path) -> dict[int, float]:
    """The mean of the samples' rewards for each step that used them."""
    columns = ["status", "steps", "columns.reward"]
    found: dict[int, list[float]] = {}
    for row in dataset.dataset(archive, format="parquet").to_table(columns=columns).to_pylist():
        for step in row["steps"] if row["status"] == "trained" else ():
            found.setdefault(step, []).append(sum(row["columns.reward"]))
    return {step: sum(each) / len(each) for step, each in sorted(found.items())}


if __name__ == "__main__":
    for step, reward in rewards_by_step(Path(sys.argv[1])).items():
        print(f"step {step + 1}: {reward:.3f}")
