"""GRPO with TRL and with Jackfield, side by side: samples per second and learning curves.

    python benchmarks/vs_trl.py [--seeds 1 2 3 4 5] [--steps 24] [--threads 1] [--extra-threads 0]
                                [--folder F] [--quick] [--json]

Both train the same Qwen3 of 1.77 million parameters from the same saved weights on the same prompts, in float32 on the
CPU: 32 prompts x 8 completions x 32 tokens a step (the end token is a token like any other), the same reward function,
GRPO's loss, AdamW and learning rate. Each run has a process of its own; the two sides alternate. The clock runs from
the end of the second step to the end of the last, so loading is not in it.

Then the same with twice the threads: TRL uses them for everything, Jackfield trains with one half while the other half
generates the next step's samples (``schedule.sync_offset: 1``). Its samples are one step older, and so is its curve.
With ``--extra-threads 1`` training also uses the other half once it has generated (``engine.extra_threads``).

Exit code 1: the learning curves differ by more than the seeds do (an exact permutation test, from five seeds on), or a
side failed. 2: TRL is not installed. ``--quick`` runs one seed with few steps: its figures mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean, median
from typing import Any

HERE = Path(__file__).resolve().parent
PEER = "1.16.0"
SAMPLES = 32 * 8  #: of a step
SKIPPED = 2  #: first steps, which warm caches up
SIDES = ("trl", "jackfield")  #: on as many threads
TWICE = ("trl_twice", "jackfield_one_step")  #: on twice as many
RUN_SECONDS = 3600


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in both")
    parser.add_argument("--extra-threads", type=int, default=0, help="of one step off-policy's engine")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark_vs_trl"))
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    require_peer()
    seeds, steps = (arguments.seeds[:1], 3) if arguments.quick else (arguments.seeds, arguments.steps)
    if steps <= SKIPPED:
        parser.error(f"--steps must be more than {SKIPPED}")
    runs = measure(arguments.folder.resolve(), seeds, steps, arguments.threads, arguments.extra_threads)
    result = summarise(runs, arguments.threads)
    show(runs, result)
    if not arguments.quick:
        draw(arguments.folder / "learning_curves.png", runs)
    if arguments.json:
        print(json.dumps(result))
    sys.exit(1 if result["curves"]["differ"] else 0)


def require_peer() -> None:
    """End with exit code 2 where TRL is missing or another version."""
    try:
        found = version("trl")
    except PackageNotFoundError:
        found = None
    if found != PEER:
        installed = "TRL is not installed" if found is None else f"TRL {found} is installed"
        print(f"{installed}; this benchmark compares with TRL {PEER}: run `make benchmark-peers`", file=sys.stderr)
        sys.exit(2)


def measure(folder: Path, seeds: list[int], steps: int, threads: int, extra: int) -> dict[str, list[dict[str, Any]]]:
    """Run both sides with every seed, each time in the other order; the results by side."""
    from _vs_trl_task import make_task

    folder.mkdir(parents=True, exist_ok=True)
    parameters = make_task(folder / "task", prompts=512, seed=0)
    print(f"model: Qwen3, {parameters:,} parameters; {SAMPLES} samples of 32 tokens a step; {steps} steps", flush=True)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in (*SIDES, *TWICE)}
    for position, seed in enumerate(seeds):
        for side in (*SIDES, *TWICE) if position % 2 == 0 else (*TWICE[::-1], *SIDES[::-1]):
            run = run_side(side, folder, seed, steps, threads, extra)
            if not runs[side]:
                print(f"{side}: {json.dumps(run['config'])}", flush=True)
            runs[side].append(run)
            rates = f"{run['samples_per_second']:.1f} samples/s, {run['samples_per_cpu_second']:.1f} per CPU second"
            print(
                f"seed {seed}  {side:18}  {rates}  reward {run['curve'][0]:.3f} to {run['curve'][-1]:.3f}", flush=True
            )
    return runs


def run_side(side: str, folder: Path, seed: int, steps: int, threads: int, extra: int) -> dict[str, Any]:
    """One training run in a process of its own."""
    place = folder / f"{side}{seed}"
    place.mkdir(parents=True, exist_ok=True)
    threads = threads * 2 if side == "trl_twice" else threads
    one_step = side == "jackfield_one_step"
    settings = {
        "side": side.partition("_")[0],
        "task": str(folder / "task"),
        "folder": str(place / "run"),
        "seed": seed,
        "steps": steps,
        "threads": threads,
        "sync_offset": int(one_step),
        "extra_threads": extra if one_step else 0,
    }
    (place / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, str(HERE / "_vs_trl_sides.py"), str(place / "settings.json"), str(place / "result.json")]
    variables = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (place / "output.txt").open("w", encoding="utf-8") as output:
        done = subprocess.run(
            command, stdout=output, stderr=output, env={**os.environ, **variables}, timeout=RUN_SECONDS, check=False
        )
    if done.returncode:
        print(f"{side} failed with {done.returncode}; the end of {place / 'output.txt'}:", file=sys.stderr)
        print("\n".join((place / "output.txt").read_text(encoding="utf-8").splitlines()[-15:]), file=sys.stderr)
        sys.exit(1)
    result = json.loads((place / "result.json").read_text(encoding="utf-8"))
    first, last = result["steps"][SKIPPED - 1], result["steps"][-1]
    samples = SAMPLES * (steps - SKIPPED)
    return {
        "config": result["config"],
        "stages": result["stages"],
        "curve": [step["reward"] for step in result["steps"]],
        "samples_per_second": samples / (last["seconds"] - first["seconds"]),
        "samples_per_cpu_second": samples / (last["cpu_seconds"] - first["cpu_seconds"]),
    }


def summarise(runs: dict[str, list[dict[str, Any]]], threads: int) -> dict[str, Any]:
    """Rates, their ratios (medians over seeds; neighbours in time are compared) and the curves' comparison."""
    import attrs
    from _vs_trl_curves import compare

    result: dict[str, Any] = {}
    curves = {side: [run["curve"] for run in runs[side]] for side in runs}
    for (peer, side), end in ((SIDES, ""), (TWICE, "_one_step")):
        for name in ("samples_per_second", "samples_per_cpu_second"):
            ratios = [ours[name] / theirs[name] for ours, theirs in zip(runs[side], runs[peer], strict=True)]
            result[f"{name}_ratio{end}"] = round(median(ratios), 3)
            result[f"{name}_ratio{end}_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
        result[f"curves{end}"] = attrs.asdict(compare(curves[peer], curves[side]))
    for side in runs:
        result[side] = {
            "samples_per_second": round(median(run["samples_per_second"] for run in runs[side]), 1),
            "samples_per_cpu_second": round(median(run["samples_per_cpu_second"] for run in runs[side]), 1),
            "mean_curve": [round(mean(rewards), 4) for rewards in zip(*curves[side], strict=True)],
            "share_of_time": shares([run["stages"] for run in runs[side]]),
        }
    versions = {name: version(name) for name in ("torch", "transformers", "trl")}
    return {**result, "seeds": len(runs["trl"]), "threads": threads, "versions": versions}


def shares(stages: list[dict[str, float]]) -> dict[str, float]:
    """Where a step's wall-clock time goes: each stage's share, over all runs."""
    totals = {name: sum(run[name] for run in stages) for name in stages[0]}
    return {name: round(seconds / totals["step"], 3) for name, seconds in totals.items() if name != "step"}


def show(runs: dict[str, list[dict[str, Any]]], result: dict[str, Any]) -> None:
    """Tables for people."""
    print("\nmean reward of all seeds, least to largest seed in brackets")
    print(f"{'samples':>9}  " + "  ".join(f"{side:^22}" for side in runs))
    steps = len(runs["trl"][0]["curve"])
    for step in sorted({*range(0, steps, max(1, steps // 8)), steps - 1}):
        values = {side: [run["curve"][step] for run in runs[side]] for side in runs}
        cells = [f"{mean(each):.3f} [{min(each):.3f}, {max(each):.3f}]" for each in values.values()]
        print(f"{(step + 1) * SAMPLES:>9}  " + "  ".join(f"{cell:^22}" for cell in cells))
    print("\nshare of a step's time")
    for side in runs:
        print(
            f"{side:18}  " + "  ".join(f"{name} {share:.2f}" for name, share in result[side]["share_of_time"].items())
        )
    for sides, end in ((SIDES, ""), (TWICE, "_one_step")):
        for name, text in (("samples_per_second", "samples per second"), ("samples_per_cpu_second", "per CPU second")):
            low, high = result[f"{name}_ratio{end}_range"]
            rates = ", ".join(f"{side} {result[side][name]}" for side in sides)
            print(f"{text}: {rates}; ratio {result[f'{name}_ratio{end}']} (seeds: {low} to {high})")
        curves = result[f"curves{end}"]
        verdict = "differ beyond seed noise" if curves["differ"] else "agree within seed noise"
        if not curves["tested"]:
            verdict = "not tested, which takes five seeds"
        difference, p = curves["largest_difference"], curves["p"]
        print(f"learning curves: largest difference {difference:.4f}, p = {p:.3f}: {verdict}")


def draw(file: Path, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Both sides' curves over samples."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for side, colour in zip(SIDES, ("tab:orange", "tab:blue"), strict=True):
        curves = [run["curve"] for run in runs[side]]
        samples = [(step + 1) * SAMPLES for step in range(len(curves[0]))]
        for curve in curves:
            axes.plot(samples, curve, color=colour, alpha=0.25, linewidth=1)
        axes.plot(samples, [mean(each) for each in zip(*curves, strict=True)], color=colour, label=side)
    axes.set(xlabel="samples", ylabel="mean reward", title="GRPO, the same work: one line per seed, and their mean")
    axes.legend()
    figure.savefig(file, dpi=120)
    print(f"learning curves: {file}")


if __name__ == "__main__":
    main()
