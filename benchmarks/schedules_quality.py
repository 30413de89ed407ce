"""Whether schedules learn as well as on-policy training: the quickstart's task under each of them, with several seeds.

    python benchmarks/schedules_quality.py [--seeds 1 2 3 4 5] [--steps 40] [--folder F] [--quick] [--json]

Each seed has one warm-up, from whose model every schedule trains. A run that has finished is not made again, so the
benchmark goes on where it was stopped. It prints the held-out score at the end and draws the mean reward over samples
and over seconds. Seconds compare schedules only if nothing else used the machine. ``--quick`` makes two short runs.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "quickstart"
THREADS = "cluster.threads=1"  #: two threads wait for each other if other work uses the cores
_ASYNC = ("schedule.mode=async", "schedule.max_staleness=2")
#: Overrides of the quickstart's run.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "on-policy": (),
    "k = 2": ("schedule.sync_interval=2",),
    "k = 10": ("schedule.sync_interval=10",),
    "one-step": ("schedule.sync_offset=1",),
    "pipeline": ("schedule.stream_mini_batches=true", "algorithm.mini_batches=2"),
    "async": (*_ASYNC, "algorithm.correction.enabled=true"),
    "async, uncorrected": (*_ASYNC, "algorithm.correction.enabled=false"),
}


def overrides(steps: int, quick: bool) -> list[str]:
    """Return the overrides that all runs share."""
    tasks = 40 if quick else 200
    return [
        f"schedule.steps={steps}",
        f"optimizer.total_steps={steps}",
        "optimizer.lr=4.0e-4",
        f"evaluation.every={steps}",
        f"evaluation.tasks={tasks}",
        "checkpoint.at_end=false",
        THREADS,
    ]


def call(*arguments: str, folder: Path) -> None:
    """Run a command of Jackfield; what it prints is in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.txt").open("w") as output:
        command = [str(Path(sys.executable).with_name("jackfield")), *arguments]
        subprocess.run(command, check=True, timeout=3600, stdout=output, stderr=subprocess.STDOUT)


def warmed_up(seed: int, folder: Path, quick: bool) -> Path:
    """Make the task and the warm-up of a seed, unless they are there; return its folder."""
    made = folder / f"seed{seed}"
    if not (made / "warmup" / "model").exists():
        sys.path.insert(0, str(EXAMPLE))
        importlib.import_module("make_task").make_task(made / "made", seed)
        steps = 40 if quick else 400
        own = [f"seed={seed}", f"folder={made / 'warmup'}", f"model.path={made / 'made' / 'model'}"]
        own += [f"data.train={made / 'made' / 'demonstrations.jsonl'}", "evaluation.every=0"]
        own += [f"schedule.steps={steps}", f"optimizer.total_steps={steps}", "checkpoint.at_end=false", THREADS]
        own += ["data.groups_per_batch=64", "optimizer.lr=2.0e-3"]
        call("run", str(EXAMPLE / "warmup.yaml"), *own, folder=made / "warmup")
    return made


def folder_of(made: Path, name: str) -> Path:
    """Return the folder of a run."""
    return made / name.replace(" ", "").replace(",", "-").replace("=", "")


def learnt(seed: int, name: str, made: Path, shared: list[str]) -> list[dict[str, Any]]:
    """Train under a schedule, unless that is done; return the lines of its metrics."""
    folder = folder_of(made, name)
    metrics, done = folder / "metrics.jsonl", folder / "model"
    if not done.exists():
        own = [f"seed={seed}", f"folder={folder}", f"model.path={made / 'warmup' / 'model'}", "checkpoint.resume=false"]
        own += [f"data.train={made / 'made' / 'problems.jsonl'}", f"data.eval={made / 'made' / 'held_out.jsonl'}"]
        call("run", str(EXAMPLE / "grpo.yaml"), *own, *shared, *SCHEDULES[name], folder=folder)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def summary(scores: dict[str, dict[int, float]]) -> dict[str, dict[str, float]]:
    """Return the mean score of each schedule, its deviation, and how many deviations of a difference below on-policy.

    Differences are taken seed by seed. Noise is the standard error of their mean, and at least that of on-policy.
    """
    base, found = scores["on-policy"], dict[str, dict[str, float]]()
    for name, own in scores.items():
        pairs = [own[seed] - base[seed] for seed in own.keys() & base.keys()]
        spread = max(statistics.stdev(each) if len(each) > 1 else 0.0 for each in (pairs, list(base.values())))
        noise = spread / max(len(pairs), 1) ** 0.5
        mean = statistics.fmean(pairs) if pairs else 0.0
        found[name] = {
            "score": statistics.fmean(own.values()),
            "deviation": statistics.stdev(own.values()) if len(own) > 1 else 0.0,
            "difference": mean,
            "noise": noise,
            "below": mean / noise if noise else 0.0,
            "seeds": len(own),
        }
    return found


def draw(curves: dict[str, list[list[tuple[float, float, float]]]], file: Path) -> None:
    """Draw the mean reward over samples and over seconds, one line per schedule."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for name, seeds in curves.items():
        rows = list(zip(*seeds, strict=False))  # by step: of each seed
        means = [[statistics.fmean(each) for each in zip(*row, strict=True)] for row in rows]
        for axis, at in zip(axes, (0, 1), strict=True):
            # a mean of five steps, or the noise of a step hides the differences
            smooth = [statistics.fmean(each[2] for each in means[max(0, n - 4) : n + 1]) for n in range(len(means))]
            axis.plot([each[at] for each in means], smooth, label=f"{name} ({len(seeds)})", linewidth=1.2)
    axes[0].set(xlabel="samples", ylabel="mean reward of five steps")
    axes[1].set(xlabel="seconds")
    axes[0].legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="svg")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark_schedules"))
    parser.add_argument("--plot", type=Path, help="file of the picture, SVG; default: in the folder")
    parser.add_argument("--finished", action="store_true", help="start nothing, and show the runs that have finished")
    parser.add_argument("--quick", action="store_true", help="two short runs")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    seeds, names, steps = arguments.seeds, arguments.schedules, arguments.steps
    if arguments.quick:
        seeds, names, steps = seeds[:1], ["on-policy", "async"], 8
    curves, scores = dict[str, Any](), dict[str, dict[int, float]]()
    for seed, name in itertools.product(seeds, names):
        if arguments.finished and not (folder_of(arguments.folder / f"seed{seed}", name) / "model").exists():
            continue
        made = warmed_up(seed, arguments.folder, arguments.quick)
        lines = learnt(seed, name, made, overrides(steps, arguments.quick))
        trained = [line for line in lines if line["kind"] == "step"]
        ends = itertools.accumulate(line["seconds/step"] for line in trained)
        samples = itertools.accumulate(line["samples"] for line in trained)
        rewards = [line["reward/mean"] for line in trained]
        curves.setdefault(name, {})[seed] = list(zip(samples, ends, rewards, strict=True))
        scores.setdefault(name, {})[seed] = [line["score"] for line in lines if line["kind"] == "evaluation"][-1]
        print(
            f"seed {seed}  {name:20} score {scores[name][seed]:.3f}  reward {rewards[0]:.3f} to {rewards[-1]:.3f}",
            flush=True,
        )
    found = summary(scores)
    for name, each in found.items():
        print(f"{name:20} " + "  ".join(f"{key} {value:.3f}" for key, value in each.items()))
    shared = set.intersection(*(set(each) for each in curves.values()))  # means of other seeds would mislead
    drawn = {name: [each[seed] for seed in sorted(shared)] for name, each in curves.items()}
    draw(drawn, arguments.plot or arguments.folder / "schedules.svg")
    if arguments.json:
        print(json.dumps({"schedules": found}))


if __name__ == "__main__":
    main()
