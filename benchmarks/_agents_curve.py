"""The curve of ``benchmarks/agents.py``: what a turn takes, over the number of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

AIM = 0.5  #: ms of a turn beyond bare, at the median and with 1,000 rollouts
_TITLES = {"instant": "Servers that answer at once", "delays": "Servers that take 0.5 to 1.5 s, beyond their time"}


def draw(found: Sequence[Any], file: Path) -> None:
    """Draw what a turn takes, over the number of rollouts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, places = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, (kind, title) in zip(places, _TITLES.items(), strict=True):
        for side, colour in (("hosted", "tab:blue"), ("bare", "tab:gray")):
            for part, line in (("p50", "-"), ("p99", ":")):
                values = [getattr(getattr(each, side), kind)[part] for each in found]
                axes.plot([each.rollouts for each in found], values, line, color=colour, label=f"{side}, {part}")
        axes.axhline(AIM, color="tab:red", linewidth=0.8, label="aim at 1,000, p50 beyond bare")
        axes.set(xscale="log", yscale="log", title=title, xlabel="rollouts at a time", ylabel="ms per turn")
        axes.legend()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
