"""The HTML page of a rollout."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from jackfield_trace.texts import plain

from .conftest import ANSWER, CALL, EVIL, KEY, RunFolder, Trace, record

_VOID = {"meta", "input"}


class Page(HTMLParser):
    """The elements and texts of a page; fails if they are not nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == self._open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)


def page_of(run_folder: RunFolder, trace: Trace, key: str = KEY) -> Page:
    file = run_folder.folder / "page.html"
    assert 0 == trace(run_folder.folder, key, "--html", file).exit_code
    return Page(file.read_text(encoding="utf-8"))


def test_each_token_has_its_class_and_its_numbers(run_folder: RunFolder, trace: Trace) -> None:
    run_folder.table(1, record(KEY, ("ab", 1), ("c", 0), log_probs=(-0.01, -5.0, 0.0), token_rewards=(0.0, 0.5, 0.0)))
    spans = [given for name, given in page_of(run_folder, trace).elements if name == "span" and "title" in given]
    assert ["m p0 v0", "m p5 v1 up", "i"] == [given["class"] for given in spans]
    assert "probability 0.00674 (log -5.000), weights 5, reward 0.5" in str(spans[1]["title"])
    assert "inserted" in str(spans[2]["title"])


def test_a_page_needs_nothing_from_elsewhere(run_folder: RunFolder, trace: Trace) -> None:
    """It has no scripts, and the browser is told to load nothing."""
    run_folder.table(1, record())
    elements = page_of(run_folder, trace).elements
    assert {"default-src 'none'; style-src 'unsafe-inline'"} <= {str(given.get("content")) for _, given in elements}
    assert not {name for name, _ in elements} & {"script", "link", "img", "iframe"}
    assert all(str(given["href"]).startswith("#") for _, given in elements if "href" in given)


def test_texts_of_models_and_tools_are_text(run_folder: RunFolder, trace: Trace) -> None:
    """Whatever they say appears, and adds no element."""
    run_folder.table(1, record(tags={"task": EVIL}), record("train/0/3/0/2/0", ("fine", 1), rollout={}))
    page, other = page_of(run_folder, trace), page_of(run_folder, trace, "train/0/3/0/2/0")
    assert {name for name, _ in page.elements} - {name for name, _ in other.elements} <= {
        "table",
        "tr",
        "th",
        "td",
        "div",
    }
    assert plain(EVIL) in "".join(page.texts["span"])
    assert plain(EVIL) in "".join(page.texts["dd"])
    for text in (CALL, ANSWER):
        assert text in "".join(page.texts["span"])


def test_sequences_are_linked_with_their_parents(run_folder: RunFolder, trace: Trace) -> None:
    child = record("train/0/3/0/1/1", ("x", 1), tags={"parent": 0, "relation": "branch"})
    lost = record("train/0/3/0/1/5", ("x", 1), tags={"parent": 3, "relation": "branch"})  # the table has not all
    run_folder.table(1, record(), child, lost)
    elements = page_of(run_folder, trace).elements
    assert ["#sequence-1", "#sequence-0"] == [given["href"] for name, given in elements if name == "a"]
    assert {"sequence-0", "sequence-1", "sequence-5"} == {given["id"] for name, given in elements if name == "section"}


def test_a_page_replaces_a_file_whole(run_folder: RunFolder, trace: Trace) -> None:
    run_folder.table(1, record())
    Path(run_folder.folder / "page.html").write_text("before")
    page_of(run_folder, trace)
    assert not list(run_folder.folder.glob("page.html?*"))
