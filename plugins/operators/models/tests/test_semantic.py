"""Semantic duplicates, against a comparison of each row with each other in plain Python."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, Row
from jackfield.errors import OperatorError
from jackfield.plugins.registry import installed
from jackfield_chat_model import save_chat_model
from jackfield_operator_models import semantic

WORDS = st.lists(st.sampled_from(["add", "12", "and", "30", "cards", "Dan", "buys"]), max_size=6).map(" ".join)
EMBEDDER = {"name": "hashed", "dimensions": 65536}  #: so many places that no two sequences of these words share one


def cosine(one: str, other: str) -> float:
    """The cosine similarity of the counts of three characters, without hashing."""
    first, second = (Counter(f"  {text}  "[at : at + 3] for at in range(len(text) + 2)) for text in (one, other))
    product = sum(first[part] * second[part] for part in first)
    return product / math.sqrt(sum(n * n for n in first.values()) * sum(n * n for n in second.values()))


def expected(texts: list[str], similarity: float) -> dict[str, str]:
    """The rows that are duplicates, each with the first kept row that it is like."""
    kept, removed = list[int](), dict[str, str]()
    for at, text in enumerate(texts):
        first = next((other for other in kept if cosine(texts[other], text) >= similarity - 1e-9), None)
        if first is None:
            kept.append(at)
        else:
            removed[f"row:{at}"] = f"row:{first}"
    return removed


@given(st.lists(WORDS, max_size=12), st.sampled_from([1, 3, 100]), st.sampled_from([0.6, 0.8, 0.97]))
def test_duplicates_are_those_of_all_pairs(applied: Any, texts: list[str], size: int, similarity: float) -> None:
    rows = [{"prompt": text} for text in texts]
    got = asyncio.run(applied("semantic_duplicates", rows, size, similarity=similarity, embedder=EMBEDDER))
    assert expected(texts, similarity) == {key: why.rpartition(" ")[2] for key, why in got.removed.items()}


def test_blocks_and_parts_do_not_matter(applied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"Dan buys {at % 40} cards and adds {at % 7}" for at in range(120)]
    rows = [{"prompt": text} for text in texts]
    settings = {"similarity": 0.9, "embedder": EMBEDDER}
    whole = asyncio.run(applied("semantic_duplicates", rows, **settings))
    monkeypatch.setattr(semantic, "_BLOCK", 7)
    monkeypatch.setattr(semantic, "_PART", 5)
    assert whole == asyncio.run(applied("semantic_duplicates", rows, 33, **settings))
    assert 20 < len(whole.removed) < 120


def test_equal_texts_reach_a_similarity_of_1(applied: Any) -> None:
    rows = [{"prompt": text} for text in ("Dan buys 7 cards", "Dan buys 8 cards", "Dan buys 7 cards", "")]
    got = asyncio.run(applied("semantic_duplicates", rows, similarity=1.0))
    assert {"row:2": "similarity 1.000 to row:0"} == got.removed


def test_a_model_in_a_folder_finds_duplicates(applied: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_chat_model(str(folder))
    rows = [{"prompt": text} for text in ("Dan buys 7 cards", "日本", "Dan buys 7 cards")]
    embedder = {"name": "transformers", "path": str(folder)}
    got = asyncio.run(applied("semantic_duplicates", rows, similarity=0.9999, embedder=embedder))
    assert {"row:2"} == got.removed.keys()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


def _operator(folder: Path, state: Any = None) -> Operator:
    record = installed().load("operator", "semantic_duplicates")
    operator: Operator = record.build({"similarity": 0.99}, OperatorContext(folder=folder), "semantic_duplicates")
    if state is not None:
        operator.restore(state)
    return operator


async def _removed(operator: Operator, *texts: str, first: int = 0) -> dict[str, str]:
    rows = tuple(Row(key=f"row:{at}", values={"prompt": text}) for at, text in enumerate(texts, first))
    return dict((await operator.process(OperatorRequest(rows=rows))).removed)


@in_loop
async def test_what_came_after_a_state_is_forgotten(tmp_path: Path) -> None:
    """Also in a new process, and a row does not become the duplicate of itself."""
    operator = _operator(tmp_path)
    await operator.start()
    await _removed(operator, "one text", "another matter")
    state = json.loads(json.dumps(operator.state()))
    assert {} == await _removed(operator, "a third thing", first=2)
    await operator.close()
    again = _operator(tmp_path, state)
    await again.start()
    assert {} == await _removed(again, "a third thing", first=2)
    assert {"row:3": "similarity 1.000 to row:1"} == await _removed(again, "another matter", first=3)
    await again.close()


@in_loop
async def test_lost_files_are_noticed(tmp_path: Path) -> None:
    operator = _operator(tmp_path)
    await operator.start()
    await _removed(operator, "one text", "another matter")
    state = operator.state()
    await operator.close()
    (tmp_path / "vectors.f32").write_bytes(b"")
    with pytest.raises(OperatorError) as caught:
        await _operator(tmp_path, state).start()
    assert "operator.state" == caught.value.code


@in_loop
async def test_a_failure_while_rows_are_kept_keeps_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = _operator(tmp_path)
    await operator.start()
    await _removed(operator, "one text")
    before = operator.state()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(semantic._Kept, "add", full)
        with pytest.raises(OSError, match="No space"):
            await _removed(operator, "another matter", first=1)
    assert before == operator.state()
    assert {} == await _removed(operator, "another matter", first=1)
    await operator.close()


def test_without_a_folder_nothing_is_left(applied: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    got = asyncio.run(applied("semantic_duplicates", [{"prompt": "a"}, {"prompt": "a"}, {"prompt": 3}], 1))
    assert ({"row:1"}, {"row:2"}) == (got.removed.keys(), got.set_aside.keys())
    assert [] == [*tmp_path.iterdir()]
