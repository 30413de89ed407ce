"""Whether curation and shaping help: the quickstart's task with and without each of them, with several seeds.

    python benchmarks/pipelines_quality.py [--seeds 1 2 3 4 5] [--steps 40] [--folder F] [--quick] [--json]

Each seed has one warm-up, from whose model every condition trains. A run that has finished is not made again, so the
benchmark goes on where it was stopped. It prints held-out score, reward, entropy and length at the end, and the score
over all evaluations; differences are taken seed by seed. ``--quick`` makes three short runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from schedules_quality import EXAMPLE, THREADS, call, folder_of, warmed_up

_HARDNESS = "{name: difficulty_rules}"
#: Asks the policy for another answer to the same question, up to four times, and keeps one that is right.
_REPAIR = "{name: repair, template: '{prompt}', attempts: 4, max_tokens: 12}"
#: Overrides of the quickstart's run, by question and condition. Others are compared with the first condition.
CONDITIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "order of tasks": {
        "shuffled": (),
        "easy to hard": (f"data.pipeline.tasks=[{_HARDNESS}, {{name: priority, weights: {{difficulty: -1.0}}}}]",),
        "hard to easy": (f"data.pipeline.tasks=[{_HARDNESS}, {{name: priority, weights: {{difficulty: 1.0}}}}]",),
        "Thompson": (
            f"data.pipeline.tasks=[{_HARDNESS}]",
            "data.curriculum={name: thompson, options: {by: difficulty}}",
        ),
        "adaptive": (
            f"data.pipeline.tasks=[{_HARDNESS}]",
            "data.curriculum={name: adaptive_difficulty}",
        ),
    },
    "diversity": {
        "shuffled": (),
        "diversity": ("data.pipeline.experiences=[{name: diversity}]",),
    },
    "failures": {
        "shuffled": (),
        "dropped": ("data.pipeline.experiences=[{name: reward_filter, minimum: 0.5}]",),
        "repaired": (
            "algorithm={name: mix}",
            "mixing.made={ratio: 0.5}",
            f"data.pipeline.experiences=[{_REPAIR}]",
        ),
    },
}


def overrides(steps: int, quick: bool) -> list[str]:
    """Return the overrides that all runs share."""
    tasks = 40 if quick else 200
    return [
        f"schedule.steps={steps}",
        f"optimizer.total_steps={steps}",
        "optimizer.lr=4.0e-4",
        f"evaluation.every={max(steps // 8, 1)}",
        f"evaluation.tasks={tasks}",
        "checkpoint.at_end=false",
        THREADS,
    ]


def learnt(seed: int, name: str, made: Path, shared: list[str], own: tuple[str, ...]) -> list[dict[str, Any]]:
    """Train under a condition, unless that is done; return the lines of its metrics."""
    folder = folder_of(made, name.replace(" ", "_"))
    if not (folder / "model").exists():
        paths = [
            f"seed={seed}",
            f"folder={folder}",
            f"model.path={made / 'warmup' / 'model'}",
            "checkpoint.resume=false",
        ]
        paths += [f"data.train={made / 'made' / 'problems.jsonl'}", f"data.eval={made / 'made' / 'held_out.jsonl'}"]
        call("run", str(EXAMPLE / "grpo.yaml"), *paths, *shared, *own, folder=folder)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def figures(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return what a run came to: the last score, the mean score over its evaluations, and means of its last steps."""
    scores = [line["score"] for line in lines if line["kind"] == "evaluation"]
    last = [line for line in lines if line["kind"] == "step"][-5:]
    found = {"score": scores[-1], "mean score": statistics.fmean(scores)}
    names = {"reward": ("reward/unshaped/mean", "reward/mean"), "entropy": ("policy/entropy_estimate",)}
    names["length"] = ("response_tokens/mean",)
    for shown, choices in names.items():
        if name := next((each for each in choices if each in last[0]), None):
            found[shown] = statistics.fmean(line[name] for line in last)
    return found


def compared(found: dict[str, dict[int, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the means of each condition, and its difference from the first one with the standard error over seeds."""
    base, *_ = found.values()
    summary = dict[str, dict[str, float]]()
    for name, seeds in found.items():
        shared = sorted(base.keys() & seeds.keys())
        own = {figure: statistics.fmean(seeds[seed][figure] for seed in shared) for figure in seeds[shared[0]]}
        for figure in ("score", "mean score"):
            pairs = [seeds[seed][figure] - base[seed][figure] for seed in shared]
            own[f"{figure} more"] = statistics.fmean(pairs)
            own[f"{figure} error"] = statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else 0.0
        summary[name] = {**own, "seeds": float(len(shared))}
    return summary


def draw(curves: dict[str, dict[str, list[list[tuple[int, float]]]]], file: Path) -> None:
    """Draw the mean held-out score over steps, one picture per question and one line per condition."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(4 * len(curves), 3.6), sharey=True, layout="constrained")
    for axis, (question, conditions) in zip(axes if len(curves) > 1 else [axes], curves.items(), strict=True):
        for name, seeds in conditions.items():
            rows = list(zip(*seeds, strict=False))
            steps = [row[0][0] for row in rows]
            means = [statistics.fmean(each[1] for each in row) for row in rows]
            (line,) = axis.plot(steps, means, label=f"{name} ({len(seeds)})", linewidth=1.4)
            if len(seeds) > 1:
                errors = [statistics.stdev(each[1] for each in row) / len(row) ** 0.5 for row in rows]
                low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
                axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        axis.set(xlabel="step", title=question)
        axis.legend(fontsize=8)
    figure.supylabel("held-out score")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--questions", nargs="+", choices=list(CONDITIONS), default=list(CONDITIONS))
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark_pipelines"))
    parser.add_argument(
        "--plot", type=Path, help="file of the picture (.png, .svg, .pdf); default: pipelines.svg in the folder"
    )
    parser.add_argument("--quick", action="store_true", help="short runs of one seed")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    seeds, steps = (arguments.seeds[:1], 8) if arguments.quick else (arguments.seeds, arguments.steps)
    found, curves = dict[str, dict[str, dict[int, dict[str, float]]]](), dict[str, Any]()
    for seed, question in itertools.product(seeds, arguments.questions):
        made = warmed_up(seed, arguments.folder, arguments.quick)
        for name, own in CONDITIONS[question].items():
            lines = learnt(seed, name, made, overrides(steps, arguments.quick), own)
            found.setdefault(question, {}).setdefault(name, {})[seed] = figures(lines)
            scores = [(line["step"], line["score"]) for line in lines if line["kind"] == "evaluation"]
            curves.setdefault(question, {}).setdefault(name, []).append(scores)
            told = "  ".join(f"{figure} {value:.3f}" for figure, value in figures(lines).items())
            print(f"seed {seed}  {question}: {name:14} {told}", flush=True)
    summaries = {question: compared(conditions) for question, conditions in found.items()}
    for question, conditions in summaries.items():
        for name, each in conditions.items():
            print(f"{question}: {name:14} " + "  ".join(f"{key} {value:.3f}" for key, value in each.items()))
    draw(curves, arguments.plot or arguments.folder / "pipelines.svg")
    if arguments.json:
        print(json.dumps(summaries))


if __name__ == "__main__":
    main()
