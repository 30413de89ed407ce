"""Late labels: numbers of samples that come after these were scored, in files of a run's folder.

Each file ``labels/VERSION.json`` is written once and not changed. The trainer reads new ones between two steps, and a
checkpoint says which ones it has. Samplers see the numbers as tags ``reward/NAME``; ``reward`` replaces the reward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from jackfield.errors import QueueError
from jackfield.files import unseal
from jackfield.queue.meta import group_of
from jackfield.queue.store import Controller

FOLDER = "labels"
_VERSION = re.compile(r"(\d{8})\.json")


@attrs.frozen(kw_only=True)
class Labels:
    """A version of late labels."""

    version: int  #: from 1
    by: str  #: a person or program
    numbers: Mapping[str, Mapping[str, float]]  #: by the sample's key, numbers by name


def read_labels(folder: Path, after: int = 0) -> Iterator[Labels]:
    """Yield the versions of a run's labels after a version, in order; ``queue.invalid`` if a file is damaged."""
    found = (_VERSION.fullmatch(path.name) for path in (folder / FOLDER).glob("*.json"))
    for version in sorted(int(match[1]) for match in found if match):
        if version > after:
            path = folder / FOLDER / f"{version:08}.json"
            try:
                yield Labels(**unseal(path.read_bytes()))
            except (ValueError, TypeError) as error:
                fix = "remove the file, and label again"
                what = "a file of labels is damaged"
                raise QueueError(what, where=str(path), expected="what was written", found=error, fix=fix) from error


def label_samples(
    core: Controller, numbers: Mapping[str, Mapping[str, float]], by: str, version: int
) -> tuple[str, ...]:
    """Add numbers to the tags of samples, as ``reward/NAME``; return the keys of those that are in the queue."""
    known = list[str]()
    for key, own in numbers.items():
        if core.state.knows(key):
            group = core.state.groups[group_of(key)]
            sample = group.samples[key]
            sample.tags = {**sample.tags, **{_tag(name): value for name, value in own.items()}}
            core.touch(group)
            known.append(key)
    core.record("label", by=by, version=version, keys=known)
    return tuple(known)


def _tag(name: str) -> str:
    return f"reward/{'late' if name == 'reward' else name}"
