"""Small instances of ``data_juicer`` for the conformance suite: of one operator of Data-Juicer at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jackfield.abc.operator import Row
from jackfield_operator_data_juicer.bridges import bridge_of
from jackfield_operator_data_juicer.making import thresholds
from jackfield_operator_data_juicer.survey import EXAMPLES, rows

CASE = "JACKFIELD_DATA_JUICER_CASE"  #: names the operator
_BAD = ({"nothing": "of what is needed"}, {"prompt": 3, "response": 3, "nothing": 0})


def of_case(folder: Path) -> Mapping[str, Any]:
    """Look at problems with an operator that the environment names, by default a filter."""
    name = os.environ.get(CASE, "text_length_filter")
    settings = EXAMPLES.get(name, {})
    columns = {"text_key": "prompt", "query_key": "prompt", "prompt_key": "prompt", "response_key": "response"}
    bridge = bridge_of(name, settings, columns, 0)
    bad = () if "*" in bridge.reads or not bridge.keys else _BAD
    given = {"settings": {"op": name, "settings": settings}, "rows": [dict(row.values) for row in rows()]}
    return {**given, "bad": bad, "kept": _between(bridge)}


def _between(bridge: Bridge) -> dict[str, Any]:
    """Return a lower bound between the values of a filter's only statistic, if it has one with a number."""
    lowest = [name for name in thresholds(type(bridge.op)) if name.startswith("min_") and "interval" not in name]
    if len(lowest) != 1:
        return {}
    updates = [next(iter(columns.values())) for columns in bridge.process(rows()).updates.values()]
    numbers = [value for own in updates for value in own.values() if isinstance(value, int | float)]
    if len(numbers) != len(updates) or len({*numbers}) < 2:
        return {}
    middle = (min(numbers) + max(numbers)) / 2
    bound = {lowest[0]: middle if isinstance(numbers[0], float) else round(middle)}
    columns = {"text_key": "prompt"}
    other = bridge_of(bridge.name, {**EXAMPLES.get(bridge.name, {}), **bound}, columns, 0)
    computed = bridge.process(rows()).updates
    left_out = other.decide([Row(key=key, values=values) for key, values in computed.items()])
    return {"thresholds": bound} if 0 < len(left_out) < len(computed) else {}
