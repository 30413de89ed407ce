"""The settings of the observers."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs.validators import ge, in_

from jackfield.settings import option

__all__ = ["ObserveConfig"]


@attrs.frozen(kw_only=True)
class ObserveConfig:
    """What the run writes and shows."""

    metrics_file: bool = option(True, help="write metrics.jsonl")
    tensorboard: bool = option(True, help="write TensorBoard event files to tensorboard/")
    sample_table: bool = option(True, help="write samples/train.jsonl, samples/eval.jsonl and samples/failed.jsonl")
    timeline: bool = option(True, help="write trace.json, which Perfetto opens")
    curve: bool = option(True, help="draw learning_curve.png at the end")
    progress: bool = option(True, help="show progress: a bar on a terminal, text lines elsewhere")
    samples_per_step: int = option(8, help="rows of the sample table per step, at most", validator=ge(0))
    samples_per_evaluation: int = option(32, help="rows of the sample table per evaluation, at most", validator=ge(0))
    progress_interval: float = option(
        1.0, help="least seconds between progress lines where there is no terminal; 0: every step", validator=ge(0)
    )
    on_error: Literal["stop", "warn"] = option(
        "stop",
        help="when an observer fails: stop the run, or warn and go on without it",
        validator=in_(("stop", "warn")),
    )
