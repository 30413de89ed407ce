"""Checks of agents, which run them with a scripted model and the suite's own tokenizer.

The fixture may have, beside ``settings``:

* ``tasks``: a list of at least two mappings with ``fields`` (of the task, including ``messages``) and ``answers`` (of
  the model, call by call; the last is repeated). Prompts must differ, and the tasks together must show every capability
  that the plugin declares: one takes several turns, one calls a tool, one has an image. The default is two sums;
* ``tools``: a list of mappings with ``name``, and perhaps ``description``, ``parameters`` (a JSON schema) and
  ``results`` (texts, call by call; the last is repeated). The default result is a text of its own for each call;
* ``chat``: what other models say, a list of texts, call by call.
"""

from __future__ import annotations

from packaging.version import Version

from jackfield.abc.agent import AgentLoopBase
from jackfield_conformance.registry import Capability, Subject


def _starts(subject: Subject) -> bool:
    """Return whether the class has a life in the worker; before ABI 1.1 a method of this name meant nothing."""
    own, default = (getattr(cls.start, "__func__", None) for cls in (subject.cls, AgentLoopBase))
    return Version(subject.abi) >= Version("1.1") and own is not default


CAPABILITIES = {
    "multi_turn": Capability(what="the model answers several times in one sequence"),
    "environment_reward": Capability(what="sequences carry the reward that the environment gave"),
    "worker_life": Capability(what="rollouts of a worker share what start has opened", detect=_starts),
    "tools": Capability(what="the model calls the run's tools"),
    "models": Capability(what="other models are asked for text"),
    "several_sequences": Capability(what="a rollout yields several sequences"),
    "turn_rewards": Capability(what="sequences carry rewards of turns or of tokens"),
    "multi_modal": Capability(what="images of the task reach the model and the sequences"),
}
