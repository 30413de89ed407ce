"""The section ``data.pipeline``: operators that tasks and experiences pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs.validators import ge, gt, le

from jackfield.settings import option


@attrs.frozen(kw_only=True)
class PipelineConfig:
    """Operators, each with its ``name`` and settings, in the order in which rows pass them.

    The key ``interpreter`` of an operator has it run in a process of its own, with an interpreter of this path, or that
    of this name under ``environments``.
    """

    tasks: tuple[Mapping[str, Any], ...] = option((), "operators of the training tasks, which pass before the run")
    experiences: tuple[Mapping[str, Any], ...] = option(
        (), "operators of the samples of whole groups, after they were scored and before they are trained on"
    )
    rows_per_request: int = option(512, "rows that an operator gets at a time", gt(0))
    seconds_per_request: float = option(600.0, "deadline of a request", gt(0.0))
    concurrent_requests: int = option(
        1, "requests at a time of an operator on tasks; one of an operator that has a state or compares rows", gt(0)
    )
    maximum_rows: int | None = option(None, "most rows that a stage reads; null: all", gt(0))
    maximum_seconds: float | None = option(
        None, "most time of a stage, after which the rows so far go on; null: any", gt(0.0)
    )
    maximum_tokens: float | None = option(
        None, "most tokens that the models of a stage use, after which the rows so far go on; null: any", gt(0.0)
    )
    maximum_cost: float | None = option(
        None, "most that these cost, by the prices in the settings of operators; null: any", gt(0.0)
    )
    maximum_set_aside: float = option(
        0.1, "share of a stage's rows that may be set aside because they cannot be processed", [ge(0.0), le(1.0)]
    )
    folder: str | None = option(
        None,
        "where the rows after each stage are kept, and found again by other runs; null: `data` in the run's folder",
    )
    service: str | None = option(
        None,
        "the folder of a service (`jackfield data serve`), or its address.json, which applies all operators; null: "
        "the run does",
    )

    @property
    def entries(self) -> tuple[Mapping[str, Any], ...]:
        """Return the settings of all operators."""
        return (*self.tasks, *self.experiences)
