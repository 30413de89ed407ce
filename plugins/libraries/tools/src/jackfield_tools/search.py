"""Search over a local corpus by BM25 (Robertson and Zaragoza, 2009, doi:10.1561/1500000019)."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from jackfield.abc.agent import AgentContext, AgentWorkerContext, ToolResult
from jackfield_tools.schemas import schema
from jackfield_tools.settings import SearchCorpus, Tool
from jackfield_tools.sources import Arguments, Refused, Session, Source

_WORD = re.compile(r"\w+")
_MOST = 100  #: documents that the model may ask for
_ABOUT = "Search a collection of documents. Returns those that match the query best."


class Bm25:
    """An index of texts: the weight of each word in each text is computed once."""

    def __init__(self, texts: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        counts = [Counter(_words(text)) for text in texts]
        self._size = len(counts)
        lengths = np.array([count.total() for count in counts], dtype=np.float64)
        discount = k1 * (1 - b + b * lengths / max(1e-9, lengths.mean() if self._size else 0.0))
        found: dict[str, tuple[list[int], list[int]]] = {}
        for number, count in enumerate(counts):
            for word, times in count.items():
                places, occurrences = found.setdefault(word, ([], []))
                places.append(number)
                occurrences.append(times)
        self._weights: dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
        for word, (places, occurrences) in found.items():
            idf = math.log1p((self._size - len(places) + 0.5) / (len(places) + 0.5))
            where, often = np.array(places, dtype=np.int32), np.array(occurrences, dtype=np.float64)
            weights = idf * often * (k1 + 1) / (often + discount[where])
            self._weights[word] = where, weights.astype(np.float32)

    def search(self, query: str, most: int) -> list[int]:
        """Return the numbers of the best texts that have a word of the query, the best first."""
        scores = np.zeros(self._size, dtype=np.float32)
        for word in _words(query):
            if word in self._weights:
                places, weights = self._weights[word]
                scores[places] += weights
        best = np.argsort(-scores, kind="stable")[:most]
        return [int(number) for number in best if scores[number] > 0]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


@attrs.frozen
class _Document:
    title: str
    text: str


def read_corpus(settings: SearchCorpus) -> Iterator[_Document]:
    """Read the documents of a file; ``ValueError`` names a line that is none."""
    path = Path(settings.corpus).expanduser()
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield _document(json.loads(line), settings)
                except ValueError as error:
                    raise ValueError(f"line {number} of {path}: {error}") from error


def _document(record: Any, settings: SearchCorpus) -> _Document:
    if not isinstance(record, dict):
        raise ValueError(f"it is no JSON object, but a {type(record).__name__}")
    for key in (settings.text, settings.title):
        if key is not None and key not in record:
            raise ValueError(f"it has no {key!r}; its keys are {', '.join(record) or 'none'}")
    text = record[settings.text]
    if not isinstance(text, str):
        raise ValueError(f"its {settings.text!r} is no text, but a {type(text).__name__}")
    return _Document("" if settings.title is None else str(record[settings.title]), text)


class SearchSource(Source):
    """A tool with the arguments ``query`` and ``top`` over the documents of a file."""

    def __init__(self, tool: Tool) -> None:
        super().__init__(tool)
        self.documents: list[_Document] = []
        self.index: Bm25 | None = None

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """One tool with a query."""
        about = self.tool.limits.description
        query = {"type": "string", "description": "words to look for"}
        top = {"type": "integer", "description": "how many documents", "default": self.tool.target.top}
        top |= {"minimum": 1, "maximum": _MOST}
        parameters = {"type": "object", "properties": {"query": query, "top": top}, "required": ["query"]}
        return {self.tool.name: schema(self.tool.name, _ABOUT if about is None else about, parameters)}

    async def start(self, context: AgentWorkerContext) -> None:
        """Read the file and make the index."""
        await asyncio.to_thread(self._read)

    def _read(self) -> None:
        settings: SearchCorpus = self.tool.target
        try:
            self.documents = list(read_corpus(settings))
        except (OSError, ValueError) as error:
            fix = f"each line is a JSON object with the text {settings.text!r}"
            raise self.cannot_start(error, fix) from error
        texts = [f"{each.title} {each.text}" for each in self.documents]
        self.index = Bm25(texts, settings.k1, settings.b)

    def session(self, context: AgentContext, fields: Mapping[str, Any]) -> Session:
        """Return the session of a rollout; the index has no state."""
        return _SearchSession(self)


class _SearchSession(Session):
    def __init__(self, source: SearchSource) -> None:
        self._source = source

    async def call(self, name: str, arguments: Arguments, seconds: float) -> Any:
        query, top = arguments.get("query"), arguments.get("top", self._source.tool.target.top)
        if set(arguments) - {"query", "top"} or not isinstance(query, str):
            raise Refused(f"wrong arguments for {name}: it takes the text `query`, and the number `top` if you like")
        if not isinstance(top, int) or isinstance(top, bool) or not 1 <= top <= _MOST:
            raise Refused(f"wrong arguments for {name}: `top` is a number from 1 to {_MOST}")
        assert self._source.index is not None
        found = [self._source.documents[number] for number in self._source.index.search(query, top)]
        if not found:
            return ToolResult(text="no document matches")
        return ToolResult(text="\n\n".join(_shown(number, each) for number, each in enumerate(found, 1)))


def _shown(number: int, document: _Document) -> str:
    return f"[{number}] " + "\n".join(part for part in (document.title, document.text) if part)
