"""Search over a file of documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield_testing import refused
from jackfield_tools.search import Bm25

from .conftest import Worker, call, with_tools

DOCUMENTS = [
    {"title": "Mole", "text": "A mole digs tunnels under the garden."},
    {"title": "Owl", "text": "An owl hunts at night, and sees a mole from afar."},
    {"title": "Garden", "text": "Roses grow in the garden, in the garden of roses."},
]


def test_the_best_documents_come_first(tmp_path: Path) -> None:
    corpus = tmp_path / "documents.jsonl"
    corpus.write_text("\n".join(map(json.dumps, DOCUMENTS)) + "\n\n")
    entry = {"search": {"corpus": str(corpus), "title": "title", "top": 2}}

    async def work(worker: Worker) -> Any:
        tools = worker.rollout()
        calls: list[dict[str, Any]] = [
            {"query": "the mole's tunnels"}, {"query": "GARDEN roses", "top": 1}, {"query": "submarine"},
            {"query": 3}, {"query": "x", "top": 0}, {"question": "x"},
        ]  # fmt: skip
        return [await call(tools, "search", **arguments) for arguments in calls]

    found = with_tools(tmp_path, {"search": entry}, work)
    assert found[0].text.startswith("[1] Mole\nA mole digs tunnels under the garden.\n\n[2] ")
    assert "[1] Garden\nRoses grow in the garden, in the garden of roses." == found[1].text
    assert (False, "no document matches") == (found[2].is_error, found[2].text)
    assert [True, True, True] == [each.is_error for each in found[3:]]


def test_a_broken_corpus_is_refused_with_its_line(tmp_path: Path) -> None:
    corpus = tmp_path / "documents.jsonl"
    corpus.write_text('{"text": "fine"}\n{"txt": "x"}\n')

    async def work(worker: Worker) -> None:
        raise AssertionError

    with refused("tools.start", "line 2", "tools.search"):
        with_tools(tmp_path, {"search": {"search": {"corpus": str(corpus)}}}, work)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("abc ", max_size=12), max_size=12), st.text("abc ", max_size=6), st.integers(1, 5))
def test_every_found_text_has_a_word_of_the_query(texts: list[str], query: str, most: int) -> None:
    found = Bm25(texts).search(query, most)
    matching = {number for number, text in enumerate(texts) if set(text.split()) & set(query.split())}
    assert len(found) == min(most, len(matching)) == len(set(found))
    assert set(found) <= matching
