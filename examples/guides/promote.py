"""Promote the model of a finished run that passed its evaluation: replicas that serve take it over.

    python examples/guides/promote.py RUN_FOLDER runs/promoted.json --score 0.8

The score is that of the run's last evaluation, at its last step. See docs/guides/serving.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def last_score(run: Path) -> tuple[int, int, float]:
    """Return the run's last step, the step of its last evaluation, and the score of that."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    scores = [(line["step"], line["score"]) for line in lines if line["kind"] == "evaluation"]
    if not steps or not scores:
        raise SystemExit(f"{run} has no evaluation: set evaluation.every")
    return steps[-1], *scores[-1]


def promote(run: Path, promoted: Path, threshold: float) -> str:
    """Write the file that names the model, or exit with the reason; return what was done."""
    model = (run / "model").resolve()
    if not (model / "config.json").is_file():
        raise SystemExit(f"{run} has no model: it has not finished")
    done, step, score = last_score(run)
    if step != done or not score >= threshold:
        raise SystemExit(f"not promoted: score {score:g} after step {step} of {done}; needed: {threshold:g} at the end")
    version = json.loads(promoted.read_text())["version"] + 1 if promoted.is_file() else 1
    partial = promoted.with_suffix(".partial")
    partial.write_text(json.dumps({"version": version, "model": str(model), "score": score}))
    partial.replace(promoted)
    return f"promoted {model} as version {version}, with score {score:g}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("promoted", type=Path)
    parser.add_argument("--score", type=float, required=True)
    arguments = parser.parse_args()
    print(promote(arguments.run, arguments.promoted, arguments.score))
