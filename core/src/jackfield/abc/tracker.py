"""The contract of trackers: where a run's configuration, metrics and samples are reported.

A tracker is an attrs class whose fields are its settings, registered by a package of hooks as a part of kind
``tracker``. A run makes one object, and calls its methods one after the other from one thread of its own, so they may
block. What they raise, or a call that takes longer than ``observe.tracker_deadline``, ends the reporting, not the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs


@attrs.frozen(kw_only=True)
class TrackedRun:
    """The run that is reported."""

    name: str
    folder: Path  #: the run's folder; a tracker that writes files writes them below ``trackers/`` there
    config: Mapping[str, Any]  #: the whole resolved configuration, plain values
    total_steps: int
    first_step: int  #: 0, or the step at which a resumed run continues
    id: str | None = None  #: what :meth:`Tracker.start` returned in the process that is resumed; None: a new run


class Tracker(ABC):
    """Reports a run to one service or file."""

    package: ClassVar[str] = ""  #: top-level module that it needs; a run without it is refused before its first step

    @abstractmethod
    def start(self, run: TrackedRun) -> str:
        """Begin a run, or continue the one of ``run.id``; return its id, which the run's folder keeps."""

    @abstractmethod
    def metrics(self, kind: Literal["step", "evaluation", "weights"], step: int, values: Mapping[str, float]) -> None:
        """Report finite and other numbers by their names in ``metrics.jsonl``.

        ``step`` counts completed steps, from 1; for ``evaluation`` and ``weights`` it is the weight version, from 0.
        A resumed run reports the steps after its checkpoint again.
        """

    def samples(self, step: int, partition: str, rows: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027
        """Report rows of the sample table, with ``key``, ``prompt``, ``response``, ``reward`` and more."""

    def end(self, error: str | None, curve: Path | None) -> None:  # noqa: B027
        """End the run: ``error`` is what ended it early, ``curve`` the picture of its learning curve, if it has one."""
