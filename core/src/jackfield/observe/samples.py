"""Tables of samples for people to read."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield.observe.metrics import cut_after, encode, read_lines, strict
from jackfield.observe.observer import Observer, listens
from jackfield.plugins.hooks import RunStarted, SampleRecord, SamplesFailed, SamplesRecorded

if TYPE_CHECKING:
    from rich.console import Console


class SampleTables(Observer):
    """Writes ``samples/PARTITION.jsonl`` (``train``, ``eval``) and ``samples/failed.jsonl``, one object per sample.

    A sample has ``step``, ``key``, ``prompt``, ``response``, ``reward``, ``response_ids``, ``response_mask``,
    ``mask_text`` (the mask in words) and ``tags``; a failed one has ``step``, ``key`` and ``reason``.
    """

    name = "sample table"
    output = "samples"

    @listens()
    def run_started(self, event: RunStarted) -> None:
        """Cut what a resumed run does again, and remove the tables of a run that starts from the beginning."""
        self.path.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.path.glob("*.jsonl")):
            if event.first_step > 0:
                cut_after(path, event.first_step)
            else:
                path.unlink()

    @listens()
    def samples_recorded(self, event: SamplesRecorded) -> None:
        """Write the first samples of a step or an evaluation, as many as the settings say."""
        most = self.settings.samples_per_step if event.partition == "train" else self.settings.samples_per_evaluation
        self._write(event.partition, [_row(event.step, sample) for sample in event.samples[:most]])

    @listens()
    def samples_failed(self, event: SamplesFailed) -> None:
        """Write all failures."""
        rows = [{"step": event.step, "key": key, "reason": reason} for key, reason in event.reasons.items()]
        self._write("failed", rows)

    def _write(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        name = re.sub(r"[^\w-]+", "_", table)
        path = self.path / f"{name}.jsonl"
        if rows and path not in self._files:
            self.open_file(path)
        if rows:
            self._files[path].append(b"".join(encode(row) + b"\n" for row in rows))


def read_samples(path: Path, step: int | None = None) -> list[dict[str, Any]]:
    """Read the rows of a sample table.

    Args:
        path: a file that :class:`SampleTables` wrote; without it there are no rows.
        step: rows of this step only; -1 means the last step in the file.
    """
    rows = list(read_lines(path))
    if step == -1:
        step = max((row["step"] for row in rows), default=None)
    return [row for row in rows if step is None or row["step"] == step]


def render_samples(samples: Sequence[Mapping[str, Any] | SampleRecord], console: Console, title: str = "") -> None:
    """Print samples as a table: key, prompt, response, reward and mask.

    Args:
        samples: rows of :func:`read_samples`, or the records of an event.
        console: where to print.
        title: a line above the table.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, box=SIMPLE_HEAD, show_lines=True, expand=True)
    table.add_column("key", ratio=2, min_width=12, overflow="fold")
    table.add_column("prompt", ratio=6, overflow="fold")
    table.add_column("response", ratio=6, overflow="fold")
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column("mask", ratio=2, min_width=12)
    for sample in samples:
        row = _row(0, sample) if isinstance(sample, SampleRecord) else sample
        reward = row.get("reward")
        shown = "-" if reward is None else f"{reward:.3g}"
        cells = (row["key"], row["prompt"], row["response"], shown, row.get("mask_text", ""))
        table.add_row(*(Text(cell.rstrip("\n")) for cell in cells))
    console.print(table)


def _row(step: int, sample: SampleRecord) -> dict[str, Any]:
    not_finite: list[str] = []
    row = {
        "step": step,
        "key": sample.key,
        "prompt": sample.prompt,
        "response": sample.response,
        "reward": strict(sample.reward, not_finite, "reward"),
        "response_ids": [int(token) for token in sample.response_ids],
        "response_mask": [int(bit) for bit in sample.response_mask],
        "mask_text": _mask_text(sample.response_mask),
        "tags": strict(sample.tags, not_finite, "tags"),
    }
    return {**row, "not_finite": not_finite} if not_finite else row


def _mask_text(mask: Sequence[int]) -> str:
    """Describe the runs of a mask: ``12 model, 5 inserted, 7 model`` (tokens)."""
    runs = [(len(list(run)), "model" if bit else "inserted") for bit, run in itertools.groupby(mask)]
    return ", ".join(f"{length} {who}" for length, who in runs)
