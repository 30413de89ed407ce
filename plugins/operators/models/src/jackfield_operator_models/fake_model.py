"""A model of fixtures: it rates problems by their number of words, up to 10, and does not rate the unratable."""

from __future__ import annotations

import json
import re

from jackfield_model_requests.fake_model import serve

_PROBLEM = re.compile(r"<problem>\n(.*?)\n</problem>", re.DOTALL)


def _answer(text: str) -> str:
    problem = _PROBLEM.search(text)
    words = problem[1].split() if problem else []
    return "I do not know." if words == ["unratable"] else json.dumps({"difficulty": min(max(len(words), 1), 10)})


if __name__ == "__main__":
    serve(_answer)
