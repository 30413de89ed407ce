"""Opens the sets of tasks of a run, and checks what they become as tokens."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.compose.libraries import archives, has_readers, pipelines, readers, recognised
from jackfield.compose.resolve import load_tokenizer
from jackfield.config import RunConfig
from jackfield.config.data import DataPaths, paths_of, sets_of
from jackfield.data.encoding import check_vocabulary, encode_answers, encode_prompt
from jackfield.data.formats import Conversation, TaskFormat
from jackfield.data.tasks import TaskSet
from jackfield.errors import JackfieldError
from jackfield.queue.sample_files import holds_samples

_ENCODED_PROMPTS = 64  #: how many of each set's longest texts are tokenised before the run starts


def task_files(config: RunConfig, algorithm: ResolvedAlgorithm) -> dict[str, DataPaths]:
    """Return the train, eval and expert tasks that are used, or raise ``config.missing-key`` if some are not given."""
    evaluates = config.evaluation.every and (config.data.eval or not config.evaluation.sets)
    used = {"train": config.mode != "train", "eval": evaluates, "expert": algorithm.experts}
    files = {which: getattr(config.data, which) for which, wanted in used.items() if wanted}
    for which in (which for which, file in files.items() if not paths_of(file)):
        what, expected = f"no {which} data is given", "the path of a file, or a name on the Hub"
        raise config.refusal(f"data.{which}", what, expected, code="config.missing-key")
    for which, file in files.items():
        sets_of(file, f"data.{which}")
    return files


def read_tasks(config: RunConfig, algorithm: ResolvedAlgorithm) -> dict[str, TaskSet]:
    """Open the tasks of the run and other sets of the evaluation, if they are used.

    Raise what :func:`task_files` raises, or an error of the data with file and line.
    """
    tasks, form = dict[str, TaskSet](), config.data.format
    for which, file in task_files(config, algorithm).items():
        answers = which == "expert" or (which == "train" and config.mode == "offline")
        if which == "train" and any(holds_samples(Path(path)) for path in paths_of(file)):
            tasks[which] = _archived_tasks(config, paths_of(file)[0], pairs=algorithm.pairs)
            continue
        limit = config.evaluation.tasks if which == "eval" else None
        if which == "train" and config.data.pipeline.tasks:
            tasks[which] = pipelines().prepare_tasks(config, answers=answers)
        else:
            tasks[which] = open_tasks(file, form, where=f"data.{which}", limit=limit, answers=answers)
        if which == "train" and config.data.order is not None:
            tasks[which].shuffle = config.data.order == "shuffled"
        if which == "train" and algorithm.pairs and tasks[which][0].rejected is None:
            what = "the algorithm compares two answers, and the first record has one"
            raise config.refusal("data.train", what, "chosen and rejected answers")
    for name, one in (config.evaluation.sets if config.evaluation.every else {}).items():
        tasks[name] = open_tasks(one.file, one.format or form, where=f"evaluation.sets.{name}.file", limit=one.tasks)
    return tasks


def open_tasks(given: DataPaths, form: TaskFormat, *, where: str, **options: Any) -> TaskSet:
    """Open one or several sets of tasks with the ``options`` of :class:`~jackfield.data.tasks.TaskSet`.

    One JSONL file whose keys are known needs no library.
    """
    first, *others = sets = sets_of(given, where)
    own, path = first.format or form, first.path
    known = own.is_given or not has_readers()
    if others or not known or Path(path).suffix != ".jsonl" or first.split or first.config:
        opened: TaskSet = readers().open_tasks(sets, form, **options)
        return opened
    return TaskSet(path, own, **options)


def prompts(config: RunConfig) -> Callable[[Mapping[str, Any]], Conversation]:
    """Return what makes the prompt of a record again; it is empty for a record from elsewhere."""
    data, more = config.data, config.evaluation.sets.values()
    given = (data.train, data.eval, data.expert, *(one.file for one in more))
    sets = [each for paths in given for each in sets_of(paths)]
    own = [data.format, *(each.format for each in sets), *(one.format for one in more)]
    forms = list(dict.fromkeys(form for form in own if form is not None))

    def prompt_of(record: Mapping[str, Any]) -> Conversation:
        for form in forms:
            with suppress(JackfieldError):
                return recognised([record], form).task(record, "", "").messages
        return ()

    return prompt_of


def _archived_tasks(config: RunConfig, file: str, *, pairs: bool) -> TaskSet:
    """Return the groups of an archive as tasks whose answers are tokens."""
    with TemporaryDirectory() as folder:
        made = Path(folder, "archive.jsonl")
        if config.mode != "offline" or not archives().write_tasks(Path(file), made, pairs=pairs):
            expected = "mode: offline, and for pairs samples of a group with different rewards"
            raise config.refusal("data.train", "no group of this archive can be learnt from", expected)
        return TaskSet(made, config.data.format, answers=True)


def fit_prompts(config: RunConfig, tasks: dict[str, TaskSet], limit: int | None) -> None:
    """Leave out tasks whose prompts are too long, or count those that will be cut, as ``data.prompt_overflow`` says."""
    if config.data.prompt_overflow == "stop" or not tasks:
        return
    if limit is None:
        what, expected = "nothing says how long a prompt may be", "a number as data.max_prompt_tokens, too"
        raise config.refusal("data.prompt_overflow", what, expected)
    leaves_out = config.data.prompt_overflow == "filter"
    tasks.update(readers().fitted(tasks, load_tokenizer(config), limit, leaves_out=leaves_out))


def check_tokens(config: RunConfig, tasks: Mapping[str, TaskSet], model: Mapping[str, Any], limit: int | None) -> None:
    """Check that the tokenizer fits the model, prompts are short enough and answers render, or raise a ``DataError``.

    Only the longest of the texts that were checked on opening a file are tokenised here. If another line is wrong, the
    run fails when it gets there. ``limit`` is that of a prompt.
    """
    tokenizer, vocabulary = load_tokenizer(config), model.get("vocab_size")
    limit = limit if config.data.prompt_overflow == "stop" else None  # fit_prompts has looked at every prompt
    if vocabulary is not None:
        check_vocabulary(tokenizer, vocabulary)
    for each in tasks.values():
        found = (each[number] for number in each.checked)
        for task in heapq.nlargest(_ENCODED_PROMPTS, found, key=lambda task: len(str(task.messages))):
            encode_prompt(tokenizer, task, limit)
            if each.answers:
                encode_answers(tokenizer, task)
