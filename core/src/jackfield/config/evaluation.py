"""The section ``evaluation`` of a run's configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping

import attrs
from attrs.validators import deep_mapping, ge, gt, instance_of, matches_re

from jackfield.abc.rollout import SamplingParams
from jackfield.config.data import DataPaths
from jackfield.data.formats import TaskFormat
from jackfield.errors import ConfigError
from jackfield.settings import option


@attrs.frozen(kw_only=True)
class EvaluationSampling(SamplingParams):
    """Sampling parameters of evaluation responses, greedy by default."""

    temperature: float = option(0.0, "0: greedy; else 0.01 to 100", attrs.fields(SamplingParams).temperature.validator)


@attrs.frozen(kw_only=True)
class SetSettings:
    """The evaluation of one set of held-out tasks. Several greedy rollouts of a task are refused."""

    tasks: int | None = option(None, "use the first n held-out tasks; null: all", gt(0))
    rollouts: int = option(1, "rollouts per task; more than 1 need a temperature above 0", gt(0))
    sampling: EvaluationSampling = option(factory=EvaluationSampling, help="sampling parameters")
    success: float = option(1.0, "score from which a rollout passes, for pass@k")
    answer: str = option(
        "(?s).+", "pattern whose last match (or its first group) votes in maj@k", lambda _, __, text: re.compile(text)
    )

    def __attrs_post_init__(self) -> None:
        if self.rollouts > 1 and self.sampling.temperature == 0:
            where, found = "sampling.temperature of an evaluation", f"0, rollouts: {self.rollouts}"
            raise ConfigError("greedy rollouts of a task are equal", where=where, expected="above 0", found=found)


@attrs.frozen(kw_only=True)
class EvaluationSet(SetSettings):
    """A further set of held-out tasks with its own settings."""

    file: DataPaths = option(help="held-out tasks, as for data.train")
    format: TaskFormat | None = option(None, "how records become tasks; null: as data.format says")


@attrs.frozen(kw_only=True)
class EvaluationConfig(SetSettings):
    """Evaluation on held-out tasks. Other settings than ``every`` and ``sets`` are those of the set ``data.eval``."""

    every: int = option(0, "evaluate every n steps (at the next weight sync) and at both ends; 0: never", ge(0))
    sets: Mapping[str, EvaluationSet] = option(
        factory=dict,
        help="further sets by name, each with its file, format and settings",
        validator=deep_mapping(matches_re(r"(?!(eval|expert|failed|human|train)$)[\w-]+"), instance_of(EvaluationSet)),
    )
