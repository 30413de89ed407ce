"""The section ``data`` of a run's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs
from attrs.validators import ge, gt, le

from jackfield.config.pipeline import PipelineConfig
from jackfield.data.curriculum import CurriculumSpec
from jackfield.data.formats import TaskFormat
from jackfield.errors import ConfigError
from jackfield.settings import option


@attrs.frozen(kw_only=True)
class DataSet:
    """One of several sets of tasks."""

    path: str = option(help="a file, a folder of save_to_disk, or a name on the Hub")
    weight: float | None = option(
        None,
        "share of this set's tasks, relative to the weights of the others; null for all: each task once in an epoch",
        gt(0.0),
    )
    split: str | None = option(None, "the split of a set from the Hub or save_to_disk; null: the only one, or train")
    config: str | None = option(None, "the configuration of a set from the Hub")
    format: TaskFormat | None = option(None, "how its records become tasks; null: as data.format says")


DataPaths: TypeAlias = str | DataSet | tuple[str | DataSet, ...]


def sets_of(given: DataPaths | None, where: str = "data") -> list[DataSet]:
    """Return the sets that a setting names; refuse weights of only some of them."""
    several = [] if given is None else [given] if isinstance(given, str | DataSet) else list(given)
    found = [DataSet(path=each) if isinstance(each, str) else each for each in several]
    weights = [each.weight for each in found]
    if None in weights and any(weights):
        details = {"expected": "a weight of each set, or of none", "found": str(weights), "where": where}
        raise ConfigError("some sets have a weight and some have none", **details)
    return found


def paths_of(given: DataPaths | None) -> Sequence[str]:
    """Return the paths and names that a setting holds."""
    return [each.path for each in sets_of(given)]


@attrs.frozen(kw_only=True)
class DataConfig:
    """The task files, and how batches are made from them."""

    train: DataPaths | None = option(
        None,
        "training tasks: a file (.jsonl, .json, .csv, .parquet, .arrow, also with .gz), a folder of save_to_disk, a "
        "name on the Hub (org/name, org/name:split), or a list of such; with mode: offline also an archive",
    )
    eval: DataPaths | None = option(None, "held-out tasks, as for train")
    format: TaskFormat = option(
        factory=TaskFormat, help="how records become tasks; without keys, the first records say what they are"
    )
    pipeline: PipelineConfig = option(factory=PipelineConfig, help="operators that the rows pass")
    order: Literal["shuffled", "file"] | None = option(
        None,
        "order of the training tasks in each epoch: shuffled by the seed, or that of the rows; null: that of the rows "
        "if an operator of data.pipeline has put them into an order",
    )
    curriculum: CurriculumSpec | None = option(
        None, "chooses the training tasks by the rewards so far; null: data.order"
    )
    expert: DataPaths | None = option(
        None, "an expert's answers, as for train and in the same format (token ids: mixing.expert)"
    )
    expert_samples_per_batch: int = option(0, "expert answers per training batch", ge(0))
    samples: str | None = option(
        None, "mode: train: samples with rewards; a .jsonl or .parquet file, or the folder of a queue, run or archive"
    )
    epochs: int = option(1, "mode: train: how often each group of samples is used", gt(0))
    chat_template: str | None = option(None, "Jinja chat template that replaces the tokenizer's")
    share: float | None = option(
        None,
        "with --role explore: part of the batches that this explorer takes while others explore",
        [gt(0.0), le(1.0)],
    )
    groups_per_batch: int = option(32, "tasks (groups) per batch", gt(0))
    rollouts_per_group: int = option(8, "rollouts per task (the group size)", gt(0))
    minimum_rows: int | None = option(
        None,
        "rollouts with a sample and a score with which a group is complete, though others failed; null: all",
        gt(0),
    )
    max_prompt_tokens: int | None = option(
        None, "maximum tokens of a prompt; null: what leaves room for a response", gt(0)
    )
    prompt_overflow: Literal["stop", "filter", "truncate_left"] = option(
        "stop",
        "a prompt of more tokens: stop ends the run; filter leaves its task out before the run starts; truncate_left "
        "cuts off its first tokens",
    )
    tools: tuple[Mapping[str, Any], ...] = option(
        (), "schemas of tools in OpenAI's form that the chat template shows; a record's own tools replace them"
    )
    template_options: Mapping[str, Any] = option(
        factory=dict,
        help="variables of the chat template, such as enable_thinking; a record's chat_template_kwargs come on top",
    )
