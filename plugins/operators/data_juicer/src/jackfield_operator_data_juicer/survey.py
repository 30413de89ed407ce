"""Looks at all operators of Data-Juicer: ``python -m jackfield_operator_data_juicer.survey`` prints what it finds.

Each is made with its default settings, or those of :data:`EXAMPLES`, and tried on rows of text. What is printed is the
file ``operators.json``, from which settings are read and the documentation's table is made.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from jackfield.abc.operator import Row
from jackfield.errors import ConfigError, OperatorError
from jackfield_operator_data_juicer.bridge import Bridge
from jackfield_operator_data_juicer.making import kind_of, operator_class, thresholds

#: Settings of operators that do nothing, or cannot be made, without any.
EXAMPLES: dict[str, dict[str, Any]] = {
    "range_specified_field_selector": {"field_key": "reward", "lower_percentile": 0.2, "upper_percentile": 0.8},
    "topk_specified_field_selector": {"field_key": "reward", "topk": 2},
    "frequency_specified_field_selector": {"field_key": "source", "top_ratio": 0.5},
    "random_selector": {"select_num": 2},
    "tags_specified_field_selector": {"field_key": "source", "target_tags": ["a"]},
    "specified_field_filter": {"field_key": "source", "target_value": ["a"]},
    "specified_numeric_field_filter": {"field_key": "reward", "min_value": 0.5},
    "general_field_filter": {"filter_condition": "reward > 0.5"},
    "suffix_filter": {"suffixes": ["a"]},
    "replace_content_mapper": {"pattern": "[0-9]+", "repl": "N"},
    "remove_specific_chars_mapper": {"chars_to_remove": "◆●■"},
    "text_chunk_mapper": {"max_len": 20, "split_pattern": None},
}
_TEXTS = (
    "There were 7 cards. Dan buys 1. How many cards are there now?",
    "Ida has 9 toys and loses 2.  How many toys now? See https://example.org or ida@example.org.",
    "Sam sells 2 of 8 eggs, and then 3 more.\nHow many are left?",
    "There were 7 cards. Dan buys 1. How many cards are there now?",
)


def rows() -> tuple[Row, ...]:
    """Return some rows with texts, a number and a kind."""
    return tuple(
        Row(
            key=f"row:{at}",
            values={"prompt": text, "response": f"{text} It is {at}.", "reward": at / 4, "source": "abba"[at]},
        )
        for at, text in enumerate(_TEXTS)
    )


def main() -> None:
    """Print the facts about all operators, as JSON; the operators' own output goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    found = {"data_juicer": version("py-data-juicer"), "operators": dict(_facts())}
    out.write(json.dumps(found, indent=1, sort_keys=True) + "\n")
    out.flush()
    sys.stderr.flush()
    os._exit(0)


def _facts() -> Iterator[tuple[str, dict[str, Any]]]:
    from data_juicer.ops import OPERATORS

    for name in sorted(OPERATORS.modules):
        cls = operator_class(name)
        facts: dict[str, Any] = {"type": kind_of(cls).lower(), "thresholds": sorted(thresholds(cls))}
        refused, rest = tried(name)
        yield name, {**facts, "refused": refused, **rest}


def tried(name: str) -> tuple[str | None, dict[str, Any]]:
    """Return why an operator cannot be used, or None, with its type here and whether it processes these rows.

    The tests have the conformance suite's certificate for each that does.
    """
    columns = {"text_key": "prompt", "query_key": "prompt", "prompt_key": "prompt", "response_key": "response"}
    try:
        bridge = Bridge.of(name, EXAMPLES.get(name, {}), columns, 0)
    except ConfigError as error:
        return None, {"as": None, "certified": False, "needs": str(error.found)}
    except OperatorError as error:
        return str(error.found), {}
    reads = bridge.reads
    tells = name in EXAMPLES or bool({*reads} & {"prompt", "response"})  # otherwise it may have done nothing at all
    try:
        aside = bridge.process(rows()).set_aside
    except Exception as error:  # an operator over all rows may raise anything
        aside = {"all": str(error)}
    return None, {"as": bridge.type, "certified": tells and not aside}


if __name__ == "__main__":
    main()
