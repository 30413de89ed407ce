"""The shapes of records: what their columns mean, as far as names and kinds of columns tell."""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

from jackfield.compose.libraries import readers
from jackfield.data.formats import Task, TaskFormat, refusal
from jackfield.errors import ConfigError, DataError, did_you_mean
from jackfield_formatter.examples import Example
from jackfield_formatter.installed import SHAPES, found_in

Record = Mapping[str, Any]
_TRUTHS = ("ground_truth", "answer", "solution")
_TOKENS = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "reward")
_SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


class Shape(ABC):
    """A shape of records. Packages add one by an entry point of the group ``jackfield.data_shapes``."""

    name: ClassVar[str]

    @property
    def described(self) -> str:
        """Return what it is in words."""
        return self.name

    @abstractmethod
    def fits(self, first: Record) -> bool:
        """Return whether records have this shape, by the columns that are not null, with their first values."""

    @abstractmethod
    def example(self, record: Record) -> Example:
        """Return what a record says; one that cannot be used raises :func:`jackfield.data.formats.refusal`."""


class Samples(Shape):
    """Lines of a queue's file: samples of tokens."""

    name = "samples"

    def fits(self, first: Record) -> bool:
        """Return whether there are columns of samples."""
        columns = first.get("columns", first)
        return isinstance(columns, Mapping) and "prompt_ids" in columns and "response_ids" in columns

    def example(self, record: Record) -> Example:
        """Return the tokens, and what is known of the task."""
        columns = record.get("columns", record)
        told = columns.get("task") if isinstance(columns.get("task"), Mapping) else {}
        group, task = name_of(record, "group"), record.get("task")
        return Example(
            id=task if isinstance(task, str) else name_of(record, "id"),
            group=group,
            data_source=told.get("data_source") or None,
            ground_truth=str(told.get("ground_truth") or ""),
            columns={name: columns[name] for name in _TOKENS if columns.get(name) is not None},
        )


class Responses(Shape):
    """A prompt and a response, with or without a reward, as collected from a model or from people."""

    name = "responses"

    def fits(self, first: Record) -> bool:
        """Return whether there are both."""
        return {"prompt", "response"} <= first.keys() and "rejected" not in first

    def example(self, record: Record) -> Example:
        """Return prompt, response and reward."""
        truth = next((name for name in _TRUTHS if record.get(name) is not None), None)
        form = TaskFormat(prompt_key="prompt", response_key="response", answer_key=truth, rejected_key=None)
        found = of_task(form.task(dict(record), "", ""), record)
        reward = _number(record, "reward" if record.get("reward") is not None else "score")
        return attrs.evolve(found, reward=reward, group=name_of(record, "group"))


class Transcripts(Shape):
    """Preferences as two texts that begin alike: transcripts of Human and Assistant, or any text."""

    name = "transcripts"

    def fits(self, first: Record) -> bool:
        """Return whether there are two texts and no prompt."""
        pair = [first.get(name) for name in ("chosen", "rejected")]
        return all(isinstance(each, str) for each in pair) and not first.keys() & {
            "prompt",
            "instruction",
            "conversations",
        }

    def example(self, record: Record) -> Example:
        """Return what both share as the prompt; of other texts than transcripts, the lines that both share."""
        chosen, rejected = (text_of(record, name) for name in ("chosen", "rejected"))
        if all(_SPEAKER.match(each) for each in (chosen, rejected)):
            pair = {"chosen": _turns(chosen), "rejected": _turns(rejected)}
            form = TaskFormat(prompt_key=None, response_key="chosen", rejected_key="rejected", answer_key=None)
            return of_task(form.task(pair, "", ""), record)
        shared = next((n for n, (one, two) in enumerate(zip(chosen, rejected, strict=False)) if one != two), 0)
        end = chosen.rfind("\n", 0, shared) + 1
        if not chosen[:end].strip():
            found = repr(chosen[:80])
            raise refusal("the two texts share no prompt", "one line or more that both begin with", found)
        asked = ({"role": "user", "content": chosen[:end].strip()},)
        return Example(prompt=asked, response=chosen[end:], rejected=rejected[end:], id=name_of(record, "id"))


class Texts(Shape):
    """A corpus: texts without prompts."""

    name = "texts"

    def fits(self, first: Record) -> bool:
        """Return whether the text is all there is to read."""
        others = {"prompt", "messages", "conversations", "instruction", "question", "problem", "label", "chosen"}
        return isinstance(first.get("text"), str) and not first.keys() & others

    def example(self, record: Record) -> Example:
        """Return the text."""
        return Example(
            text=text_of(record, "text"), id=name_of(record, "id"), data_source=name_of(record, "data_source")
        )


@attrs.frozen
class Recognised(Shape):
    """A layout that jackfield-datasets recognises."""

    name = "layouts"
    form: TaskFormat

    @property
    def described(self) -> str:
        """The layout, and what its columns mean."""
        told: str = self.form.described() if hasattr(self.form, "described") else self.name
        return told

    def fits(self, first: Record) -> bool:
        """Return True: it was made for these records."""
        return True

    def example(self, record: Record) -> Example:
        """Return what the layout says."""
        return of_task(self.form.task(dict(record), "", ""), record)


def of_task(task: Task, record: Record) -> Example:
    """Return the example of a task; its id is the record's."""
    return Example(
        prompt=task.messages,
        response=task.response,
        rejected=task.rejected,
        ground_truth=task.ground_truth,
        id=task.id or None,
        data_source=task.data_source or None,
        group=name_of(record, "group"),
        tools=task.tools,
        template_options=task.template_options,
    )


_OWN: tuple[type[Shape], ...] = (Samples, Transcripts, Responses, Texts)


@functools.cache
def shapes() -> dict[str, Shape]:
    """Return all shapes by name, those of other packages first; layouts of jackfield-datasets are not among them."""
    found = {name: load() for name, load in found_in(SHAPES, Shape).items()}
    return {**{name: cls() for name, cls in found.items()}, **{cls.name: cls() for cls in _OWN}}


def shape_of(records: Sequence[Record], name: str | None = None) -> Shape:
    """Return the shape of records of which these are the first, or of that name; ``data.format`` if none fits."""
    known = shapes()
    if name is not None and name != Recognised.name:
        if name not in known:
            expected = ", ".join((*known, Recognised.name))
            what = f"there is no shape {name!r}{did_you_mean(name, known)}"
            raise ConfigError(what, where="shape", expected=expected, found=name)
        return known[name]
    columns = dict.fromkeys(column for record in records for column in record)
    values = ((column, [each[column] for each in records if each.get(column) is not None]) for column in columns)
    first = {column: there[0] for column, there in values if there}
    fitting = None if name else next((shape for shape in known.values() if shape.fits(first)), None)
    return fitting or _recognised(records)


def _recognised(records: Sequence[Record]) -> Shape:
    try:
        return Recognised(readers().recognise([dict(each) for each in records], TaskFormat()))
    except DataError as error:
        if error.code == "data.format":
            error.fix = "map the columns of the model, such as --map prompt=…, name a shape, or give a function"
        raise


def name_of(record: Record, key: str) -> str | None:
    """Return a text or an integer of a record as a text; None: there is none."""
    value = record.get(key)
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) and value != "" else None


def text_of(record: Record, key: str) -> str:
    """Return a text of a record; refuse one that is missing, empty or no text."""
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise refusal(f"column {key!r} has no text", "a text", repr(value)[:200], where=key)
    return value


def _number(record: Record, key: str) -> float | None:
    value = record.get(key)
    with_text = isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+(\.\d*)?([eE][+-]?\d+)?\s*", value)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)) or with_text:
        return None if value is None else float(value)
    if isinstance(value, bool):
        return float(value)
    raise refusal(f"column {key!r} is not a number", "a number", repr(value)[:200], where=key)


def _turns(transcript: str) -> list[dict[str, str]]:
    """Return the messages of a transcript."""
    _, *parts = _SPEAKER.split(transcript)
    return [
        {"role": _ROLES[speaker], "content": said.strip()}
        for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    ]
