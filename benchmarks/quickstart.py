"""The quickstart, seed by seed: how well it learns, and how long it takes.

    python benchmarks/quickstart.py [--seeds 1 2 3] [--folder F] [--quick] [--json]

Prints a row per seed and draws all curves in one picture. ``--quick`` runs one seed with few steps: it shows that the
benchmark works, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

QUICKSTART = Path(__file__).resolve().parent.parent / "examples" / "quickstart" / "quickstart.py"
QUICK = (
    "--warmup",
    "schedule.steps=40",
    "--warmup",
    "optimizer.total_steps=40",
    "schedule.steps=4",
    "evaluation.tasks=40",
)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark_quickstart"))
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    seeds = arguments.seeds[:1] if arguments.quick else arguments.seeds
    results = [measure(seed, arguments.folder / f"seed{seed}", arguments.quick) for seed in seeds]
    draw(arguments.folder, seeds)
    if arguments.json:
        print(json.dumps({"seeds": results, "lowest_final_score": min(result["final"] for result in results)}))


def measure(seed: int, folder: Path, quick: bool) -> dict[str, Any]:
    """Run the example with one seed."""
    command = [sys.executable, str(QUICKSTART), "--seed", str(seed), "--folder", str(folder), *(QUICK if quick else ())]
    started = time.monotonic()
    done = subprocess.run(command, check=True, timeout=1800, stdout=subprocess.PIPE, text=True)
    first, last = re.findall(r"learning curve after (\d+) s of processor time", done.stdout)
    seconds = time.monotonic() - started
    warmup, grpo = evaluations(folder / "warmup"), evaluations(folder / "grpo")
    result = {
        "seed": seed,
        "warm_up": warmup[-1]["score"],
        "final": grpo[-1]["score"],
        "tasks": grpo[-1]["tasks"],
        "first_point_seconds": round(warmup[0]["time"], 1),
        "warm_up_seconds": round(warmup[-1]["time"], 1),
        "grpo_seconds": round(grpo[-1]["time"], 1),
        "whole_seconds": round(seconds, 1),
        "first_curve_processor_seconds": int(first),
        "whole_processor_seconds": int(last),
    }
    print("  ".join(f"{name} {value}" for name, value in result.items()), flush=True)
    return result


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, in order; times are in seconds since the run began."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "evaluation"]


def draw(folder: Path, seeds: list[int]) -> None:
    """One curve per seed."""
    from jackfield.observe import plot_learning_curve

    curves = [[folder / f"seed{seed}" / name / "metrics.jsonl" for name in ("warmup", "grpo")] for seed in seeds]
    plot_learning_curve(
        curves,
        folder / "learning_curves.png",
        "SFT, then GRPO",
        labels=[f"seed {seed}" for seed in seeds],
        target=0.9,
    )


if __name__ == "__main__":
    main()
