"""Tasks with answers in tokens, for supervised and preference training, from the groups of an archive."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from jackfield.sdk.archive import SavedSample
from jackfield.sdk.cells import Cell
from jackfield_archive.files import files_of, read_samples, trained


@attrs.define
class _Group:
    """The best and the worst sample of a group; among equal ones the first."""

    best: SavedSample
    worst: SavedSample

    def add(self, sample: SavedSample) -> None:
        if reward_of(sample) > reward_of(self.best):
            self.best = sample
        if reward_of(sample) < reward_of(self.worst):
            self.worst = sample

    def record(self, name: str, *, pairs: bool) -> dict[str, Any]:
        chosen = [self.best, self.worst] if pairs else [self.best]
        answers = [[_numbers(one.cells["response_ids"], "q"), _mask(one)] for one in chosen]
        rewards = [reward_of(one) for one in chosen]
        prompt = _numbers(self.best.cells["prompt_ids"], "q")
        return {"id": name, "prompt_ids": prompt, "answers": answers, "rewards": rewards}


def write_tasks(archive: Path, out: Path, *, pairs: bool = False, min_reward: float | None = None) -> int:
    """Write each group of an archive as a task whose answer is its best sample; return their number.

    With ``pairs``, each task also has the worst sample as the rejected answer, and groups whose rewards are all equal
    are left out, as well as those whose samples have different prompts. Groups whose best reward is below
    ``min_reward`` are left out. Samples that failed or were dropped are not used. ``out`` is a file of JSON lines for
    ``data.train``, which has the tokens of prompt and answers, so that no text becomes tokens again. It is complete or
    absent. Without a file, or if one is damaged, raise ``queue.invalid``.
    """
    count, partial = 0, out.with_name(f".{out.name}.tmp")
    try:
        with partial.open("w", encoding="utf-8") as lines:
            for name, group in _groups(archive):
                same = group.best.cells["prompt_ids"][1] == group.worst.cells["prompt_ids"][1]
                good = min_reward is None or reward_of(group.best) >= min_reward
                if good and (not pairs or (same and reward_of(group.best) > reward_of(group.worst))):
                    lines.write(json.dumps(group.record(name, pairs=pairs)) + "\n")
                    count += 1
            lines.flush()
            os.fsync(lines.fileno())
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return count


def _groups(archive: Path) -> Iterator[tuple[str, _Group]]:
    """Yield the groups, of which each is in one file, with unique names."""
    seen: dict[str, int] = {}
    for file in files_of(archive):
        groups: dict[str, _Group] = {}
        for number, sample in enumerate(trained(read_samples(file))):
            name = sample.group or sample.key or f"{file.stem}:{number}"
            groups.setdefault(name, _Group(sample, sample)).add(sample)
        for name, group in groups.items():
            seen[name] = again = seen.get(name, 0) + 1
            yield name if again == 1 else f"{name}#{again}", group


def reward_of(sample: SavedSample) -> float:
    """Return the sum of a sample's reward; 0 if it has none."""
    return sum(_numbers(sample.cells["reward"], "f")) if "reward" in sample.cells else 0.0


def _mask(sample: SavedSample) -> list[int]:
    if "response_mask" in sample.cells:
        return list(bytes(sample.cells["response_mask"][1]))
    return [1] * (len(sample.cells["response_ids"][1]) // 8)


def _numbers(cell: Cell, code: str) -> list[Any]:
    found = array(code)
    found.frombytes(bytes(cell[1]))
    return found.tolist()
