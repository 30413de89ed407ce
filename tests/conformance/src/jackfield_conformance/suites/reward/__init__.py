"""Checks of reward agents.

The plugin's fixture may have, beside ``settings``, lists of mappings with fields of a ``ScoreRequest``:

* ``examples``: requests that can be scored, each perhaps with its ``score``; the default is a sum;
* ``failing``: requests without a score, such as a broken ground truth;
* ``slow``: requests that take half a minute or longer unless they are cancelled.

Checks that need ``failing`` or ``slow`` do not apply without them. ``context`` has fields of a ``RewardContext``, such
as a ``generate`` function, that the plugin needs beside an HTTP client and the installed rewards. ``comparing`` has the
settings under which the plugin compares groups, if it does so under some only.
"""

from __future__ import annotations

from jackfield.abc.reward import RewardAgent
from jackfield_conformance.registry import Capability

CAPABILITIES = {
    "post_process": Capability(
        what="adjusts the scores of whole groups",
        detect=lambda subject: subject.cls.post_process_scores is not RewardAgent.post_process_scores,
    ),
    "token_scores": Capability(what="yields a score per response token"),
    "compares": Capability(
        what="scores whole groups: comparisons, rankings, diversity",
        detect=lambda subject: subject.cls.score_group is not RewardAgent.score_group,
    ),
    "turns": Capability(
        what="takes a turn within the limits of the service for each of its requests",
        detect=lambda subject: subject.cls.takes_turns is not RewardAgent.takes_turns,
    ),
    "keeps_deadlines": Capability(
        what="ends a call at its deadline itself",
        detect=lambda subject: subject.cls.keeps_deadlines is not RewardAgent.keeps_deadlines,
    ),
}
