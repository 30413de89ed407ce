"""Data-Juicer's operators keep the contract: the certificate run of ``jackfield plugins check``, in its interpreter."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.resources import files

import pytest

import jackfield_operator_data_juicer

SCRIPT = """
import os, sys
from jackfield_conformance import certify
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # some operators print
for name in sys.argv[1:]:
    os.environ["JACKFIELD_DATA_JUICER_CASE"] = name
    print(name, certify("operator:data_juicer").level, file=out, flush=True)
os._exit(0)
"""
#: One for each way in which Data-Juicer's types become ours, and for each kind of file.
EACH = (
    "text_length_filter",
    "whitespace_normalization_mapper",
    "text_chunk_mapper",
    "document_deduplicator",
    "document_line_deduplicator",
    "topk_specified_field_selector",
    "image_blur_mapper",
    "audio_duration_filter",
    "video_split_by_duration_mapper",
    "agent_dialog_normalize_mapper",
)
PARTS = 4
TABLE = files(jackfield_operator_data_juicer) / "operators.json"
pytestmark = [pytest.mark.needs("data_juicer"), pytest.mark.timeout(600)]  # first imports compile thousands of files


def table() -> dict[str, dict[str, object]]:
    operators: dict[str, dict[str, object]] = json.loads(TABLE.read_text(encoding="utf-8"))["operators"]
    return operators


@pytest.mark.parametrize("name", EACH)
def test_an_operator_of_each_kind_is_certified(there: Callable[..., str], name: str) -> None:
    """Every check of the base tier, and of what the manifest declares, passes."""
    assert f"{name} full" == there("-c", SCRIPT, name).splitlines()[-1]


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_all_operators_that_the_table_has_as_certified_are(there: Callable[..., str], part: int) -> None:
    names = [name for name, facts in table().items() if facts.get("certified")]
    assert 80 < len(names)
    names = names[part::PARTS]
    assert [f"{name} full" for name in names] == there("-c", SCRIPT, *names, seconds=590.0).splitlines()


def test_each_operator_is_certified_or_refused() -> None:
    """None is left of which nothing is known but that it starts."""
    assert [] == [name for name, facts in table().items() if not (facts["refused"] or facts.get("certified"))]


def test_all_operators_are_as_in_the_table(there: Callable[..., str]) -> None:
    """All are made and tried on the examples: what can be used, as what, by which thresholds, and what is refused."""
    found = there("-m", "jackfield_operator_data_juicer.survey", seconds=590.0)
    if os.environ.get("JACKFIELD_WRITE_SURVEY"):
        with open(str(TABLE), "w", encoding="utf-8") as file:
            file.write(found)
    operators = json.loads(found)["operators"]
    assert 228 == len(operators)
    facts = ("type", "as", "certified", "thresholds")
    for name, known in table().items():
        told = {fact: operators[name].get(fact) for fact in facts} | {"refused": bool(operators[name]["refused"])}
        assert told == {fact: known.get(fact) for fact in facts} | {"refused": bool(known["refused"])}, name
