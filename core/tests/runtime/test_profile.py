"""Tests of the torch trace of a process and of the flame graph of a thread."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from jackfield.runtime.profile import begin_trace, end_trace, flame_graph, labelled


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """No test leaves a trace that is being recorded."""
    yield
    end_trace()


def names(file: Path) -> set[str]:
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return {event["name"] for event in events if event["ph"] == "X"}


def in_thread(call: object, *arguments: object) -> None:
    thread = threading.Thread(target=call, args=arguments)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def test_a_trace_has_what_every_thread_does_between_its_ends(tmp_path: Path) -> None:
    """Each call is made in a thread of its own, as those of a rank may be."""
    square = torch.ones(2, 2)
    labelled("before", torch.mm, square, square)
    in_thread(begin_trace)
    in_thread(labelled, "actor 0: train", torch.mm, square, square)
    in_thread(torch.add, square, square)  # a replica's
    in_thread(end_trace, str(tmp_path / "actor-0.json.gz"))
    labelled("after", torch.mm, square, square)
    found = names(tmp_path / "actor-0.json.gz")
    assert {"actor 0: train", "aten::mm", "aten::add"} <= found
    assert not {"before", "after"} & found


def test_engines_of_one_process_share_a_trace_which_the_first_writes(tmp_path: Path) -> None:
    for _ in ("actor", "critic"):
        begin_trace()
    for engine in ("actor", "critic"):
        end_trace(str(tmp_path / f"{engine}-0.json.gz"))
    assert ["actor-0.json.gz"] == [file.name for file in tmp_path.iterdir()]


def test_a_trace_that_ended_without_a_file_is_forgotten(tmp_path: Path) -> None:
    square = torch.ones(2, 2)
    begin_trace()
    labelled("lost", torch.mm, square, square)
    end_trace()
    begin_trace()
    labelled("kept", torch.add, square, square)
    end_trace(str(tmp_path / "actor-0.json.gz"))
    found = names(tmp_path / "actor-0.json.gz")
    assert ("kept" in found, "lost" in found) == (True, False)


def test_a_label_changes_neither_result_nor_error() -> None:
    begin_trace()
    assert 7 == labelled("sum", sum, (3, 4))
    with pytest.raises(KeyError):
        labelled("error", {}.__getitem__, "a")


SVG = "http://www.w3.org/2000/svg"  #: a name, which browsers do not load


@pytest.mark.needs("module:pyinstrument")
def test_a_flame_graph_is_a_page_that_names_the_functions_of_this_thread(tmp_path: Path) -> None:
    def busy_function() -> None:
        for _ in range(200_000):
            str(object())

    def busy_elsewhere() -> None:
        for _ in range(200_000):
            str(object())

    file = tmp_path / "profile" / "step-5" / "controller.html"
    with flame_graph(file, "step 5"):
        busy_function()
        in_thread(busy_elsewhere)
    page = file.read_text(encoding="utf-8")
    assert "step 5" in page
    assert ("busy_function" in page, "busy_elsewhere" in page) == (True, False)
    assert set() == set(re.findall(r"""https?://[^"'`\s]*|[=(:\s]["'`]//\w+\.\w[^"'`]*""", page)) - {SVG}


@pytest.mark.needs("module:pyinstrument")
def test_a_step_that_fails_leaves_no_flame_graph_and_the_next_can_begin(tmp_path: Path) -> None:
    with pytest.raises(KeyError), flame_graph(tmp_path / "one.html", "step 5"):
        raise KeyError("lost")
    with flame_graph(tmp_path / "two.html", "step 5"):
        pass
    assert ["two.html"] == [file.name for file in tmp_path.iterdir()]
