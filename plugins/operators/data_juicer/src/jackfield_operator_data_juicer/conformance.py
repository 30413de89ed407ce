"""Small instances of ``data_juicer`` for the conformance suite: of one operator of Data-Juicer at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jackfield.abc.operator import Row
from jackfield_operator_data_juicer.bridge import Bridge
from jackfield_operator_data_juicer.bridges import bridge_of
from jackfield_operator_data_juicer.examples import rows
from jackfield_operator_data_juicer.reading import thresholds
from jackfield_operator_data_juicer.survey import COLUMNS, settings_of

CASE = "JACKFIELD_DATA_JUICER_CASE"  #: names the operator
_BAD = ({"nothing": "of what is needed"}, {"prompt": 3, "response": 3, "nothing": 0})


def of_case(folder: Path) -> Mapping[str, Any]:
    """Look at examples with an operator that the environment names, by default a filter."""
    name = os.environ.get(CASE, "text_length_filter")
    given, settings = rows(folder), settings_of(name, folder)
    bridge = bridge_of(name, settings, COLUMNS, 0)
    entry = {"op": name, "settings": settings, "columns": COLUMNS}
    bad = _BAD if bridge.keys else ()
    return {
        "settings": entry,
        "rows": [dict(row.values) for row in given],
        "bad": bad,
        "kept": _between(bridge, settings, given),
    }


def _between(bridge: Bridge, settings: Mapping[str, Any], given: Sequence[Row]) -> dict[str, Any]:
    """Return a lower bound between the values of a filter's only statistic, if it has one with a number."""
    lowest = [name for name in thresholds(type(bridge.op)) if name.startswith("min_") and "interval" not in name]
    if len(lowest) != 1:
        return {}
    computed = bridge.process(given).updates
    own = [value for columns in computed.values() for value in next(iter(columns.values())).values()]
    numbers = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in own]
    numbers = [value for value in numbers if isinstance(value, int | float)]
    if len(numbers) != len(computed) or len({*numbers}) < 2:
        return {}
    middle = (min(numbers) + max(numbers)) / 2
    bound = {lowest[0]: middle if isinstance(numbers[0], float) else round(middle)}
    other = bridge_of(bridge.name, {**settings, **bound}, COLUMNS, 0)
    left_out = other.decide([Row(key=key, values=values) for key, values in computed.items()])
    return {"thresholds": bound} if 0 < len(left_out) < len(computed) else {}
