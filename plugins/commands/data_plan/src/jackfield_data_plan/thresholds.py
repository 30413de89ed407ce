"""Other thresholds of a filter, from the statistics that its stage has left: nothing is computed again."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.operator import Operator, OperatorContext
from jackfield.compose.libraries import readers
from jackfield.config import RunConfig
from jackfield.errors import ConfigError, DataError, JackfieldError, did_you_mean
from jackfield.plugins.registry import Registry
from jackfield.settings import structure
from jackfield_data_plan.distributions import ROW_KEY
from jackfield_data_plan.parts import TASKS, pipeline_part, plain, shortened
from jackfield_data_plan.sources import form_of, names_of, only_set

_EXAMPLES = 5


@attrs.frozen(kw_only=True)
class Tightened:
    """What other thresholds of a filter keep."""

    operator: str
    number: int  #: of the operator in ``data.pipeline.tasks``, from 0
    rows: int  #: that came to the filter
    before: Mapping[str, Any]  #: thresholds of the file
    after: Mapping[str, Any]
    kept_before: int
    kept_after: int
    removed: Sequence[Mapping[str, Any]]  #: some rows that only the new thresholds remove
    restored: Sequence[Mapping[str, Any]]  #: some rows that only the old ones remove


@attrs.define(kw_only=True)
class FilterStage:
    """A filter of a pipeline whose statistics are there."""

    config: RunConfig
    number: int  #: of its entry in ``data.pipeline.tasks``, from 0
    several: bool  #: the entry stands for several operators
    step: Any  #: the operator's record and settings
    ends: Sequence[Any]  #: records whose processes end with it
    operator: Operator
    made: Any  #: the rows with statistics
    names: Mapping[str, str]
    _records: dict[str, dict[str, Any]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Read the statistics of all rows, which stay in memory."""
        writes = {*self.operator.writes}
        self._records = {
            record[ROW_KEY]: {name: value for name, value in record.items() if name in writes or "*" in writes}
            for record in self.made.records()
        }

    @property
    def name(self) -> str:
        """The operator's name."""
        return str(self.step.name)

    @property
    def thresholds(self) -> tuple[str, ...]:
        """Names of the settings that only the decision reads."""
        return tuple(self.operator.decides_by)

    def numbers(self) -> dict[str, Any]:
        """Return the thresholds that are numbers, or may be, with their values."""
        settings: Any = structure(self.step.record.settings_class, self.step.settings, self.step.name)
        found = {name: getattr(settings, name) for name in self.thresholds}
        return {name: value for name, value in found.items() if self._takes_numbers(name, value)}

    def _takes_numbers(self, name: str, value: Any) -> bool:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return True
        return any(self._settings({name: number}) is not None for number in (0, 1, 0.5, 1_000_000))

    def _settings(self, changed: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return settings with other thresholds; None: the operator does not take them."""
        settings = {**self.step.settings, **changed}
        try:
            structure(self.step.record.settings_class, settings, self.name)
            self._operator(changed)
        except JackfieldError:
            return None
        return settings

    def _operator(self, changed: Mapping[str, Any]) -> Operator:
        context = OperatorContext(columns=self.names, seed=self.config.seed)
        built: Operator = self.step.record.build({**self.step.settings, **changed}, context, f"{TASKS}[{self.number}]")
        return built

    def close(self) -> None:
        """End the processes of operators that have another interpreter."""
        pipeline_part("process_operators").end_processes(self.ends)

    def removed(self, changed: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the rows that other thresholds remove, with the reasons."""
        stage = pipeline_part("stages").OperatorStage(name=self.name, operator=self._operator(changed))
        found: Mapping[str, str] = stage.decided(self._records)
        return found

    def __len__(self) -> int:
        return len(self._records)

    def check(self, changed: Mapping[str, Any]) -> None:
        """Refuse settings that need another computation, and values that the operator does not take."""
        for name in changed:
            if name not in self.thresholds:
                expected = ", ".join(self.thresholds)
                fix = "change it in the file, and run `jackfield data run`, which computes the statistics again"
                details: Any = {"where": f"{self.name}.{name}", "expected": f"one of {expected}", "found": name}
                what = f"{name} is no threshold{did_you_mean(name, self.thresholds)}"
                raise ConfigError(what, fix=fix, **details)
        structure(self.step.record.settings_class, {**self.step.settings, **changed}, f"{TASKS}[{self.number}]")
        self._operator(changed)

    def found(self, names: Sequence[str], keep: float) -> dict[str, Any]:
        """Return thresholds with which the share ``keep`` of the rows stays, or the least share above it.

        Each of the settings ``names`` gives up the same share; none: the only one that is a number. Raise
        ``data.threshold`` if that is not possible.
        """
        names = names or self._only()
        found = dict[str, Any]()
        for name in names:
            self.check({name: self.numbers().get(name)})
            found[name] = self._one(name, 1 - (1 - keep) / len(names))
        return found

    def _only(self) -> list[str]:
        numbers = self.numbers()
        if len(numbers) == 1:
            return [*numbers]
        expected = ", ".join(numbers) or "a filter with a threshold that is a number"
        details: Any = {"where": self.name, "expected": expected, "found": f"{len(numbers)} thresholds"}
        fix = "name one or more after the operator, such as `length maximum --keep 0.9`" if numbers else None
        raise DataError("which threshold is to keep the rows is not clear", code="data.threshold", fix=fix, **details)

    def _one(self, name: str, keep: float) -> Any:
        """Return the strictest value of one threshold with which at least a share of the rows stays."""
        values = self._loosest_first(name)
        if not values:
            raise self._none(name, keep, "no number of the statistics is one of its values")
        place = bisect.bisect_right(values, -keep, key=lambda value: -self._kept({name: value}))
        if not place:
            raise self._none(name, keep, f"{self._kept({name: values[0]}):.1%} with {name}={values[0]}")
        return values[place - 1]

    def stricter(self, name: str) -> Any:
        """Return the loosest value of a threshold that removes more rows than its value now; None: all of them."""
        values, now = self._loosest_first(name), self._kept({})
        place = bisect.bisect_right(values, -now, key=lambda value: -self._kept({name: value}))
        return values[place] if place < len(values) and self._kept({name: values[place]}) > 0 else None

    def _kept(self, changed: Mapping[str, Any]) -> float:
        return 1 - len(self.removed(changed)) / len(self)

    def _loosest_first(self, name: str) -> list[Any]:
        values = [value for value in self._candidates() if self._settings({name: value}) is not None]
        rising = bool(values) and self._kept({name: values[0]}) < self._kept({name: values[-1]})
        return values[::-1] if rising else values

    def _none(self, name: str, keep: float, found: str) -> DataError:
        what, expected = "no value of a threshold keeps so many rows", f"{keep:.1%} of {len(self)} rows"
        fix = "loosen the other thresholds first, or keep fewer rows"
        details: Any = {"where": f"{self.name}.{name}", "expected": expected, "found": found, "fix": fix}
        return DataError(what, code="data.threshold", **details)

    def _candidates(self) -> list[Any]:
        found = set[float]()
        for record in self._records.values():
            for value in record.values():
                numbers = value.values() if isinstance(value, Mapping) else [value]
                for each in numbers:
                    number = len(each) if isinstance(each, list) else each
                    if isinstance(number, int | float) and math.isfinite(number):
                        found.add(number)
        return sorted(int(each) if each == int(each) else each for each in {*found, *_around(found)})

    def tightened(self, changed: Mapping[str, Any]) -> Tightened:
        """Return what other thresholds keep, with rows that come and go."""
        self.check(changed)
        settings: Any = structure(self.step.record.settings_class, self.step.settings, self.name)
        old, new = self.removed({}), self.removed(changed)
        newly, again = [key for key in new if key not in old], [key for key in old if key not in new]
        shown = {*newly[:_EXAMPLES], *again[:_EXAMPLES]}
        rows = {record[ROW_KEY]: record for record in self.made.records() if record[ROW_KEY] in shown}

        def examples(keys: Sequence[str], why: Mapping[str, str]) -> list[dict[str, Any]]:
            return [
                {"row": key, "why": plain(why[key]), "values": shortened({**rows[key], ROW_KEY: key}, 120)}
                for key in keys[:_EXAMPLES]
            ]

        return Tightened(
            operator=self.name,
            number=self.number,
            rows=len(self),
            before={name: getattr(settings, name) for name in changed},
            after=dict(changed),
            kept_before=len(self) - len(old),
            kept_after=len(self) - len(new),
            removed=examples(newly, new),
            restored=examples(again, old),
        )


def _around(numbers: set[float]) -> set[float]:
    """Return whole numbers on both sides of whole numbers, with which all or no rows are kept."""
    whole = [each for each in numbers if each == int(each)]
    return {min(whole) - 1, max(whole) + 1} if whole else set()


def filter_stage(config: RunConfig, operator: str, registry: Registry) -> FilterStage:
    """Find the statistics of a filter, which ``operator`` names by its name or its number from 1.

    Raise ``config.invalid-value`` for another operator, and ``data.missing`` if the statistics are not there.
    """
    steps = pipeline_part("tasks").steps_of(config.data.pipeline.tasks, registry, TASKS, config)
    number = _number(operator, [step.name for step in steps])
    given = only_set(config)
    with readers().open_lines(given, 8) as opened:
        names = names_of(form_of(opened, given, config))
    context = OperatorContext(columns=names, seed=config.seed)
    records = [step.record for step in steps]
    try:
        built = [(step, step.build(context)) for step in steps[: number + 1]]
        step, own = built[-1]
        if own.type != "filter" or not own.decides_by:
            found = f"{step.name}, a {own.type}"
            details: Any = {"where": f"{TASKS}[{step.entry}]", "expected": "a filter with thresholds", "found": found}
            raise ConfigError("the operator has no thresholds", **details)
        made = _statistics(config, built)
        several = [each.entry for each in steps].count(step.entry) > 1
        shared: Any = {"number": step.entry, "several": several, "operator": own, "made": made, "names": names}
        return FilterStage(config=config, step=step, ends=records, **shared)
    except BaseException:
        pipeline_part("process_operators").end_processes(records)
        raise


def _number(operator: str, names: Sequence[str]) -> int:
    if operator.isdecimal() and 1 <= int(operator) <= len(names):
        return int(operator) - 1
    if names.count(operator) == 1:
        return names.index(operator)
    what = f"the pipeline has no operator {operator!r}{did_you_mean(operator, names)}"
    if operator in names:
        what = f"the pipeline has the operator {operator!r} {names.count(operator)} times"
    expected = ", ".join(f"{number} ({name})" for number, name in enumerate(names, 1)) or "operators in the file"
    raise ConfigError(what, where=TASKS, expected=expected, found=operator, fix="give its number or its name")


def _statistics(config: RunConfig, steps: Sequence[tuple[Any, Operator]]) -> Any:
    """Return the newest rows with the statistics of the last step, with the steps before as they are in the file."""
    folder = Path(config.data.pipeline.folder or Path(config.folder, "data"))
    found = list[Any]()
    if folder.is_dir() and any(folder.iterdir()):
        chains = pipeline_part("lineage").chains(folder)
        found = [made for chain in chains if (made := _matching(config, chain, steps)) is not None]
    if not found:
        fix = "run `jackfield data run` with this file first"
        details: Any = {"where": str(folder), "expected": f"the stage {len(steps)}-{steps[-1][0].name}", "fix": fix}
        raise DataError("the statistics of the stage are not there", code="data.missing", **details)
    return max(found, key=lambda made: (made.folder / "manifest.json").stat().st_mtime_ns)


def _matching(config: RunConfig, chain: Sequence[Any], steps: Sequence[tuple[Any, Operator]]) -> Any:
    manifests = [made.manifest for made in chain]
    if only_set(config).path not in manifests[0].get("files", {}).values():
        return None
    place = 1
    for number, (step, operator) in enumerate(steps, 1):
        settings: Any = structure(step.record.settings_class, step.settings, step.name)
        plain_settings = attrs.asdict(settings)
        later = {name: plain_settings.pop(name) for name in operator.decides_by}
        expected = {"operator": step.name, "settings": plain_settings, "seed": config.seed}
        if place >= len(chain) or not _same(manifests[place], expected):
            return None
        if number == len(steps):
            return chain[place]
        place += 1
        if operator.type == "filter":
            if place >= len(chain) or not _same(manifests[place], {"settings": later, "decides": True}):
                return None
            place += 1
        if place < len(chain) and manifests[place].get("orders"):
            place += 1
    return None


def _same(manifest: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return all(_json(manifest.get(name)) == _json(value) for name, value in expected.items())


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
