"""A model of fixtures: it rates a response by its number of words, up to 10, and does not rate the unratable."""

from __future__ import annotations

import json
import re

from jackfield_model_requests.fake_model import serve

_RESPONSE = re.compile(r"<response (\w+)>\n(.*?)\n</response \1>", re.DOTALL)


def _answer(text: str) -> str:
    found = _RESPONSE.search(text)
    words = found[2].split() if found else []
    return "I do not know." if words == ["unratable"] else json.dumps({"quality": min(max(len(words), 1), 10)})


if __name__ == "__main__":
    serve(_answer)
