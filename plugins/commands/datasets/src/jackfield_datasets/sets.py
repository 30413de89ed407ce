"""Several sets of tasks as one, in the order of a mixture."""

from __future__ import annotations

import array
import bisect
import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import xxhash

from jackfield.abc.reward import ScoreRequest
from jackfield.config import RunConfig
from jackfield.config.data import DataSet, sets_of
from jackfield.data.encoding import encode_prompt
from jackfield.data.formats import Task, TaskFormat, naming, plain_text, refusal
from jackfield.data.tasks import SeededOrder, TaskSet
from jackfield.data.tokens import HuggingFaceChatTokenizer
from jackfield.errors import ConfigError, DataError, JackfieldError
from jackfield.queue.sample_files import holds_samples
from jackfield_datasets.files import READERS, suffix_of
from jackfield_datasets.lines import FIRST, first_records, open_lines
from jackfield_datasets.recognition import Layout, recognise

_PERIOD = 1_000_000  #: longest pattern of a mixture, in tasks


class MixedSet(TaskSet):
    """The tasks of several sets, one after the other, and which of them are kept.

    With ``weights``, sets come in that proportion; without, each task comes once in an epoch.
    """

    def __init__(
        self, parts: Sequence[TaskSet], weights: Sequence[float], notes: Sequence[str], kept: array.array[int] | None
    ) -> None:
        self.parts, self.weights, self.notes, self._kept = parts, weights, notes, kept
        self.answers, self.shuffle = parts[0].answers, True
        digests = [each.digest for each in parts]
        self.digest = digests[0] if len(parts) == 1 else xxhash.xxh3_128_hexdigest("".join(digests).encode())
        self._ends = list(itertools.accumulate(map(len, parts)))
        bounds = [end if kept is None else bisect.bisect_left(kept, end) for end in (0, *self._ends)]
        self._sizes = [end - start for start, end in itertools.pairwise(bounds)]
        if not sum(self._sizes) or (weights and 0 in self._sizes):
            found = ", ".join(map(str, self._sizes))
            what, expected = "every task of a set is left out", "tasks that are kept"
            raise DataError(what, code="data.empty", expected=expected, found=found, fix="raise data.max_prompt_tokens")
        starts = [0, *self._ends]
        checked = [range(start, start + len(each.checked)) for start, each in zip(starts, parts, strict=False)]
        numbers = list(itertools.chain(*checked))
        self.checked = numbers if kept is None else range(min(len(kept), len(numbers)))
        self._orders = dict[int, MixedOrder]()

    def __len__(self) -> int:
        return sum(self._sizes)

    def __getitem__(self, number: Any) -> Any:
        """Return a task by number, or a list of tasks by slice."""
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        index = number + len(self) if number < 0 else number
        if not 0 <= index < len(self):
            raise IndexError(f"task {number} of {len(self)}")
        index = index if self._kept is None else self._kept[index]
        part = bisect.bisect_right(self._ends, index)
        return self.parts[part][index - (self._ends[part] - len(self.parts[part]))]

    def order(self, seed: int) -> Any:
        """Return the endless order of the tasks."""
        if not self.weights:
            return super().order(seed)
        if seed not in self._orders:
            self._orders[seed] = MixedOrder(sizes=self._sizes, weights=self.weights, seed=seed)
        return self._orders[seed]

    def fitted(self, fits: Callable[[Task], bool], note: str, *, leaves_out: bool) -> MixedSet:
        """Return the set without tasks that do not fit, or the whole set, with their number in its notes."""
        kept = array.array("Q", (number for number, task in enumerate(self) if fits(task)))
        numbers = kept if self._kept is None else array.array("Q", map(self._kept.__getitem__, kept))
        notes = [*self.notes, f"{len(self) - len(kept)} of {len(self)} {note}"]
        made = MixedSet(self.parts, self.weights, notes, numbers if leaves_out else self._kept)
        made.shuffle = self.shuffle
        return made


@attrs.frozen(kw_only=True)
class MixedOrder:
    """An endless sequence of the numbers of several sets one after the other, in which sets come by their weights.

    Weights are exact: they are brought to whole numbers k with the sum p, and among the tasks from n·p to (n+1)·p - 1
    are k of each set, in a seeded order. Each set has its own :class:`SeededOrder`. The only state is the position.
    """

    sizes: Sequence[int]
    weights: Sequence[float]
    seed: int = 0
    counts: tuple[int, ...] = attrs.field(init=False)  #: of each set's tasks in a period

    @counts.default
    def _whole(self) -> tuple[int, ...]:
        exact = [Fraction(str(weight)) for weight in self.weights]
        common = math.lcm(*(each.denominator for each in exact))
        whole = [int(each * common) for each in exact]
        counts = tuple(each // math.gcd(*whole) for each in whole)
        if sum(counts) > _PERIOD:
            fix, found = "give weights with fewer digits", ", ".join(map(str, self.weights))
            raise ConfigError("the weights of a mixture have too many digits", where="data", found=found, fix=fix)
        return counts

    def index(self, position: int) -> int:
        """Return the number at a position, which counts from 0 on."""
        ends = list(itertools.accumulate(self.counts))
        place = SeededOrder(size=ends[-1], seed=self.seed).index(position)
        which = bisect.bisect_right(ends, place)
        own = position // ends[-1] * self.counts[which] + place - (ends[which] - self.counts[which])
        return sum(self.sizes[:which]) + SeededOrder(size=self.sizes[which], seed=self.seed + which + 1).index(own)


def open_tasks(
    sets: Sequence[DataSet],
    form: TaskFormat,
    *,
    limit: int | None = None,
    answers: bool = False,
    first: int | None = None,
) -> MixedSet:
    """Open sets of any format, with the first ``limit`` tasks; say in its notes what was recognised.

    With ``answers``, records without an answer to train on are refused. ``first``: only so many records are read.
    """
    names = [_stem(each.path) for each in sets]
    names = names if len({*names}) == len(names) else [each.path for each in sets]
    parts, notes, left = list[TaskSet](), list[str](), limit
    for each, name in zip(sets, names, strict=True):
        with open_lines(each, first) as opened:
            with naming(each.path):
                known = recognise(first_records(opened), each.format or form)
            if isinstance(known, Layout):
                notes.append(f"{each.path} has {known.described()}")
            parts.append(TaskSet(each.path, known, limit=left, answers=answers, opened=opened, name=name))
        left = None if left is None else left - len(parts[-1])
        if left == 0:
            break
    _check_ids(parts)
    weights = [each.weight for each in sets if each.weight is not None][: len(parts)]
    made = MixedSet(parts, weights, notes, None)
    made.order(0)  # refuses weights
    return made


def _stem(path: str) -> str:
    """Return a file's name without its endings, or the name of a set without its split."""
    name, suffix = Path(path).name, suffix_of(path)
    return (name[: -len(suffix)] if suffix in READERS else name.partition(":")[0]) or path


def _check_ids(parts: Sequence[TaskSet]) -> None:
    """Refuse an id that tasks of two sets have, among those that are checked when sets are opened."""
    seen = dict[str, str]()
    for part in parts if len(parts) > 1 else ():
        for task in map(part.__getitem__, part.checked):
            if task.id in seen:
                with naming(task.place):
                    found, fix = f"{task.id!r}, as in {seen[task.id]}", "set id_key of its format to another field"
                    raise refusal("two tasks have one id", "unique ids", found, fix)
            seen[task.id] = task.place


def fitted(
    tasks: Mapping[str, TaskSet], tokenizer: HuggingFaceChatTokenizer, limit: int, *, leaves_out: bool
) -> dict[str, TaskSet]:
    """Return sets of which each prompt was tokenised: without those above ``limit`` tokens, or with their number."""

    def fits(task: Task) -> bool:
        return len(encode_prompt(tokenizer, task, None)) <= limit

    done = "left out" if leaves_out else "cut at their beginning"
    note, found = f"prompts have more than {limit} tokens and are {done}", dict[str, TaskSet]()
    for name, each in tasks.items():
        mixed = each if isinstance(each, MixedSet) else MixedSet([each], [], each.notes, None)
        mixed.shuffle = each.shuffle
        found[name] = mixed.fitted(fits, note, leaves_out=leaves_out)
    return found


def describe(config: RunConfig) -> list[str]:
    """Return sentences about what is recognised in a run's sets; those that are not on this machine are left out."""
    data, found = config.data, list[str]()
    sets = {"train": data.train, "eval": data.eval, "expert": data.expert}
    sets |= {name: each.file for name, each in config.evaluation.sets.items()}
    for which, given in sets.items():
        own = config.evaluation.sets.get(which)
        form = None if own is None else own.format
        for each in sets_of(given, which):
            if Path(each.path).exists() and not holds_samples(Path(each.path)):
                try:
                    notes = open_tasks([each], form or data.format, first=FIRST).notes
                except JackfieldError as error:
                    notes = [str(error)]
                found += [f"{which} tasks: {note}" for note in notes]
    return found


def example(config: RunConfig) -> ScoreRequest | None:
    """Return a sample of the first task that the reward scores with its own answer; None if it is not on this machine.

    That is a training task, or without exploration a task of the evaluation.
    """
    for each in sets_of(config.data.eval if config.mode == "offline" else config.data.train)[:1]:
        with contextlib.suppress(JackfieldError):
            task: Task = open_tasks([each], config.data.format, first=FIRST)[0]
            answer = task.ground_truth if task.response is None else plain_text(task.response)
            return ScoreRequest(
                data_source=task.data_source,
                solution_str=answer,
                ground_truth=task.ground_truth,
                extra_info=task.fields,
                prompt_str=plain_text(list(task.messages)),
                deadline_seconds=config.deadlines.reward,
                group_id=task.id,
                messages=task.messages,
            )
    return None
