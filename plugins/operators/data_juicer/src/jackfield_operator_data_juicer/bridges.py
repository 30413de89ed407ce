"""Makes the bridge of an operator. Only the interpreter that has Data-Juicer imports this."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from loguru import logger

from jackfield_operator_data_juicer.bridge import Bridge
from jackfield_operator_data_juicer.comparing import Deduplicating, Rewriting, Selecting
from jackfield_operator_data_juicer.making import kind_of, make
from jackfield_operator_data_juicer.rowwise import Changing, Filtering

#: Deduplicators that change the text of rows, and leave none out.
REWRITING = frozenset({"document_line_deduplicator"})
_BRIDGES: dict[str, type[Bridge]] = {
    "Filter": Filtering,
    "Mapper": Changing,
    "Deduplicator": Deduplicating,
    "Selector": Selecting,
}


def bridge_of(name: str, settings: Mapping[str, Any], columns: Mapping[str, str], seed: int) -> Bridge:
    """Make an operator, and try it on a row of its own, which it may be unable to process."""
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    op = make(name, {**{key: value for key, value in columns.items() if key not in settings}, **settings})
    bridge = Rewriting if name in REWRITING else _BRIDGES[kind_of(type(op))]
    made = bridge(name, op, seed)
    made.probe()
    return made
