"""Checks of operators: declarations, rows, results, states and life."""

from __future__ import annotations

import asyncio
import copy
import json
import typing

import attrs

from jackfield.abc.operator import Operator, OperatorRequest, OperatorType, Row
from jackfield_conformance.registry import NotApplicable, Subject, check
from jackfield_conformance.support.expecting import assert_no_tasks, cancelled, finite
from jackfield_conformance.support.operator import (
    ALL,
    PAGE,
    Recorded,
    assert_equal,
    context_of,
    in_cuts,
    opened,
    plain,
    processed,
    request_of,
    rows_of,
)


@check("OPR-010", page=PAGE + "declarations", using=opened)
async def it_says_what_it_is(subject: Subject, operator: Operator) -> None:
    """It has one of the six types, declares its columns as texts, and has its state and version at any time."""
    assert operator.type in typing.get_args(OperatorType), f"type is {operator.type!r}"
    for name in ("reads", "writes"):
        columns = getattr(operator, name)
        fits = isinstance(columns, tuple) and all(isinstance(column, str) and column for column in columns)
        assert fits, f"{name} is {columns!r}, not a tuple of names"
    assert isinstance(operator.version, str), f"version is {operator.version!r}, not a text"
    settings = {field.name for field in attrs.fields(subject.config_class)}
    unknown = sorted({*operator.decides_by} - settings)
    assert not unknown, f"decides_by names {unknown}, which are no settings"


@check("OPR-011", page=PAGE + "declarations", using=opened)
async def only_declared_columns_are_read(subject: Subject, operator: Operator) -> None:
    """It reads no column that it does not declare."""
    rows = [Recorded({**row, "of_somebody_else": 1}) for row in rows_of(subject)]
    await processed(operator, request_of(rows))
    if ALL in operator.reads:
        return
    found = sorted(set[str]().union(*(row.read for row in rows)) - {*operator.reads})
    assert not found, f"it read {found}, and declares {list(operator.reads)}"


@check("OPR-012", page=PAGE + "results", using=opened)
async def results_fit_their_request(subject: Subject, operator: Operator) -> None:
    """A result names rows of its request only, and has values in declared columns only; new rows have parents."""
    request = request_of(rows_of(subject))
    result, keys = await processed(operator, request), {row.key for row in request.rows}
    named = [*result.updates, *result.removed, *result.set_aside, *(key for row in result.made for key in row.parents)]
    other = sorted({*named} - keys)
    assert not other, f"it names rows that are not in the request: {other[:4]}"
    assert all(row.parents for row in result.made), "a new row has no parents"
    both = sorted(result.removed.keys() & result.set_aside.keys())
    assert not both, f"rows are both removed and set aside: {both[:4]}"
    silent = [key for key, why in (*result.removed.items(), *result.set_aside.items()) if not why]
    assert not silent, f"rows are gone without a reason: {silent[:4]}"
    if ALL not in operator.writes:
        columns = set[str]().union(*result.updates.values(), *(row.values for row in result.made))
        extra = sorted(columns - {*operator.writes})
        assert not extra, f"it wrote {extra}, and declares {list(operator.writes)}"


@check("OPR-013", page=PAGE + "results", using=opened)
async def results_are_plain_values(subject: Subject, operator: Operator) -> None:
    """Results consist of JSON values with finite numbers."""
    plain(await processed(operator, request_of(rows_of(subject))))


@check("OPR-014", page=PAGE + "results", using=opened)
async def rows_stay_as_they_are(subject: Subject, operator: Operator) -> None:
    """The rows of a request are not changed in place."""
    rows = rows_of(subject)
    before = copy.deepcopy(rows)
    await processed(operator, request_of(rows))
    changed = [number for number, (one, other) in enumerate(zip(before, rows, strict=True)) if one != other]
    assert not changed, f"rows {changed} were changed in place: return updates instead"


@check("OPR-015", page=PAGE + "determinism")
async def the_same_rows_give_the_same_result(subject: Subject) -> None:
    """Two operators with the same settings and seed give the same results for the same rows."""
    rows = rows_of(subject)
    one = await in_cuts(subject, rows, len(rows), subject.folder / "one")
    other = await in_cuts(subject, rows, len(rows), subject.folder / "other")
    assert_equal(one, other, "first", "then")


@check("OPR-016", page=PAGE + "determinism")
async def cuts_do_not_matter(subject: Subject) -> None:
    """Results do not depend on how rows are cut into requests, unless the operator compares the rows of a request."""
    rows = rows_of(subject)
    if subject.make(context_of(subject)).compares:
        raise NotApplicable("it compares the rows of a request")
    whole = await in_cuts(subject, rows, len(rows), subject.folder / "whole")
    single = await in_cuts(subject, rows, 1, subject.folder / "single")
    assert_equal(whole, single, "together", "one by one")


@check("OPR-017", page=PAGE + "bad-rows", using=opened)
async def a_bad_row_does_not_cost_its_neighbours(subject: Subject, operator: Operator) -> None:
    """A row that cannot be processed is set aside with a reason, or raises; alone its neighbours are processed."""
    bad = rows_of(subject, "bad", needed=True)
    for row in bad:
        try:
            result = await processed(operator, request_of([row], prefix="bad"))
        except AssertionError:
            raise
        except Exception:
            continue  # the pipeline sets it aside
        assert {"bad:0"} == {*result.set_aside}, f"a row that cannot be processed is not set aside: {str(row)[:200]}"
    good = await processed(operator, request_of(rows_of(subject)))
    assert not good.set_aside, f"after a bad row, good ones are set aside: {dict(good.set_aside)}"


@check("OPR-018", page=PAGE + "state")
async def a_state_goes_on(subject: Subject) -> None:
    """What gets a state, in the same folder, gives the results that would have come without the interruption."""
    rows, half = rows_of(subject), max(len(rows_of(subject)) // 2, 1)
    folders = {name: subject.folder / name for name in ("whole", "cut")}
    for folder in folders.values():
        folder.mkdir()
    async with opened(subject, folder=folders["whole"]) as operator:
        await processed(operator, request_of(rows[:half]))
        operator.state()
        expected = await processed(operator, request_of(rows[half:], half, 1))
    async with opened(subject, folder=folders["cut"]) as operator:
        await processed(operator, request_of(rows[:half]))
        state = operator.state()
        await processed(operator, request_of(rows[half:], half, 1))  # its process ends before it is saved
    text = json.dumps(state, allow_nan=False)
    async with opened(subject, folder=folders["cut"], state=json.loads(text)) as operator:
        found = await processed(operator, request_of(rows[half:], half, 1))
    assert_equal(expected, found, "without", "after an interruption")


@check("OPR-019", page=PAGE + "filters", using=opened)
async def a_filter_decides_by_its_statistics(subject: Subject, operator: Operator) -> None:
    """A filter removes nothing while it computes statistics, and decides by these alone; others decide nothing."""
    request = request_of(rows_of(subject))
    result = await processed(operator, request)
    columns = {row.key: {**result.updates.get(row.key, {})} for row in request.rows if row.key not in result.set_aside}
    recorded = {key: Recorded({**values, "of_somebody_else": 1}) for key, values in columns.items()}
    decided = operator.decide([Row(key=key, values=values) for key, values in recorded.items()])
    if operator.type != "filter":
        assert not decided, f"a {operator.type} decides about rows: {dict(decided)}"
        raise NotApplicable(f"it is a {operator.type}")
    assert not result.removed, "it removes rows in process: compute statistics there, and decide in decide"
    foreign = sorted(set[str]().union(*(row.read for row in recorded.values())) - {*operator.writes, ALL})
    assert not foreign, f"decide read {foreign}, which are not among its statistics {list(operator.writes)}"
    other = sorted(decided.keys() - columns.keys())
    assert not other, f"decide names rows that it did not get: {other}"
    assert all(decided.values()), "a row is not kept, and no reason is given"
    again = operator.decide([Row(key=key, values=values) for key, values in reversed(columns.items())])
    assert dict(decided) == dict(again), "the decision about a row depends on the order of the rows"


@check("OPR-020", page=PAGE + "filters")
async def statistics_do_not_depend_on_thresholds(subject: Subject) -> None:
    """Settings in ``decides_by`` change what is kept, and not the statistics."""
    kept = subject.fixture.get("kept")
    if not subject.cls.decides_by or not kept:
        raise NotApplicable("it has no settings for the decision alone, or its fixture has no 'kept'")
    unknown = sorted({*kept} - {*subject.cls.decides_by})
    assert not unknown, f"'kept' of the fixture changes {unknown}, which are not in decides_by"
    found = []
    for number, settings in enumerate(({}, kept)):
        folder = subject.folder / str(number)
        folder.mkdir()
        async with opened(subject, settings, folder=folder) as operator:
            found.append(await processed(operator, request_of(rows_of(subject))))
            rows = [Row(key=key, values=values) for key, values in found[-1].updates.items()]
            decided = operator.decide(rows)
    assert_equal(found[0], found[1], "with the settings of the fixture", f"with {kept}")
    assert 0 < len(decided) < len(rows), f"with {kept}, {len(decided)} of {len(rows)} rows are left out, not some"


@check("OPR-021", page=PAGE + "types", using=opened)
async def each_type_does_what_it_says(subject: Subject, operator: Operator) -> None:
    """Filters, mappers and scorers keep all rows; only synthesizers make new ones; a selector says the order."""
    result = await processed(operator, request_of(rows_of(subject)))
    kind = operator.type
    if kind in ("filter", "mapper", "scorer", "synthesizer", "selector"):
        assert not result.removed, f"a {kind} removes rows: {dict(result.removed)}"
    if kind != "synthesizer":
        assert not result.made, f"a {kind} makes new rows"
    if kind in ("deduplicator",):
        assert not result.updates, "a deduplicator changes rows"
    if kind == "scorer":
        for key, values in result.updates.items():
            for name, value in values.items():
                assert value is None or isinstance(value, int | float), f"{name} of {key} is {value!r}, no number"
    selection = operator.selection
    assert (selection is not None) == (kind == "selector"), f"a {kind}: selection is {selection!r}"
    if selection is not None:
        known = {*operator.writes, *operator.reads}
        assert selection.by in known, f"selection.by is {selection.by!r}, which it neither reads nor writes"
        for key, values in result.updates.items():
            if selection.by in values:
                assert finite(values[selection.by]), f"{selection.by} of {key} is {values[selection.by]!r}"


@check("OPR-022", page=PAGE + "types")
async def duplicates_are_those_that_come_later(subject: Subject) -> None:
    """A deduplicator removes the later of two equal rows, also of another request, and never the first."""
    row = rows_of(subject)[0]
    async with opened(subject) as operator:
        if operator.type != "deduplicator":
            raise NotApplicable(f"it is a {operator.type}")
        first = await processed(operator, request_of([row, row]))
        second = await processed(operator, request_of([row], 2, 1))
    assert {"row:1"} == {*first.removed}, f"of two equal rows, it removed {sorted(first.removed)}"
    assert {"row:2"} == {*second.removed}, "an equal row of a later request was not removed"


@check("OPR-023", page=PAGE + "life", using=opened)
async def no_rows_are_no_problem(subject: Subject, operator: Operator) -> None:
    """A request without rows has an empty result."""
    found = plain(await processed(operator, OperatorRequest(rows=())))
    assert not any(found.values()), f"the result of no rows is {found}"


@check("OPR-024", page=PAGE + "life", using=opened)
async def a_cancelled_request_leaves_nothing(subject: Subject, operator: Operator) -> None:
    """A cancelled request ends at once, leaves no task, and the next one is processed."""
    before = asyncio.all_tasks()
    task = asyncio.ensure_future(operator.process(request_of(rows_of(subject), prefix="cancelled")))
    await asyncio.sleep(0)
    await cancelled(task, 10.0, "a request")
    assert_no_tasks([*before, task], "after a cancelled request")
    result = await processed(operator, request_of(rows_of(subject), len(rows_of(subject)), 1))
    assert not result.set_aside, f"after a cancelled request, rows are set aside: {dict(result.set_aside)}"


@check("OPR-025", page=PAGE + "life")
async def closing_is_idempotent(subject: Subject) -> None:
    """An operator can be closed twice, or without having been started, and leaves no task."""
    before = asyncio.all_tasks()
    for starts in (False, True):
        operator: Operator = subject.make(context_of(subject))
        if starts:
            await operator.start()
        await operator.close()
        await operator.close()
        assert_no_tasks(before, "after close")
