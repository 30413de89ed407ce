"""Print the tokens of each rollout that the model itself found least probable."""

from __future__ import annotations

import sys
from pathlib import Path

from jackfield_trace.rollouts import Token
from jackfield_trace.sources import Source


def surprising(run: Path, most: int = 3) -> dict[str, list[Token]]:
    """Return the least probable tokens of each rollout of the last step, by the rollout's key."""
    source = Source(run)
    listed = source.listed()
    last = max(each.step for each in listed if each.step is not None)
    found = {}
    for each in source.listed(last):
        rollout = source.read(each)
        tokens = [token for one in rollout.sequences for token in one.tokens if token.log_prob is not None]
        own = [token for token in tokens if token.is_model]
        found[rollout.key] = sorted(own, key=lambda token: token.log_prob or 0.0)[:most]
    return found


if __name__ == "__main__":
    for key, tokens in surprising(Path(sys.argv[1])).items():
        print(key, ", ".join(f"{token.text!r} ({token.probability:.1%})" for token in tokens))
