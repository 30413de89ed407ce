"""From Python objects to the section ``reward`` of a configuration."""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from jackfield.errors import ConfigError
from jackfield_reward_rules.callables import registered

__all__ = ["importable", "registered", "section"]

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def section(reward: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the section ``reward`` for what a user gives as a reward, and the objects that only this process has.

    A mapping is the section itself. A text is the name of a plugin, or ``FILE.py:FUNCTION``. A function or class that a
    worker process can import becomes ``function``, any other object ``callable``. A list has several of these, each
    alone or as (reward, weight), and becomes a ``mix``; the weight is 1 by default, as in TRL.
    """
    objects: dict[str, Any] = {}
    if not isinstance(reward, Sequence) or isinstance(reward, str):
        return _one(reward, objects), objects
    pairs = [each if isinstance(each, tuple) and len(each) == 2 else (each, 1.0) for each in reward]
    for _, weight in pairs:
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise _refused("a reward's weight is not a number", weight)
    if not pairs:
        raise _refused("there is no reward in the list", reward)
    if len(pairs) == 1 and pairs[0][1] == 1.0:
        return _one(pairs[0][0], objects), objects
    parts: dict[str, Any] = {}
    weights: dict[str, float] = {}
    for each, weight in pairs:
        made = _one(each, objects)
        name = _free(re.sub(r"\W+", "_", made["path"].rpartition(":")[2] if "path" in made else made["name"]), parts)
        parts[name], weights[name] = made, float(weight)
    return {"name": "mix", "parts": parts, "weights": weights}, objects


def _one(reward: Any, objects: dict[str, Any]) -> dict[str, Any]:
    if isinstance(reward, Mapping) and "name" in reward:
        return dict(reward)
    if isinstance(reward, str):
        return {"name": "function", "path": reward} if ":" in reward else {"name": reward}
    scores = ("compute_score", "score_group", "score_rollout")
    if not callable(reward) and not any(hasattr(reward, name) for name in scores):
        raise _refused("this is no reward", reward)
    if (path := importable(reward)) is not None:
        return {"name": "function", "path": path}
    own = getattr(reward, "__name__", None) or getattr(getattr(reward, "func", None), "__name__", None)
    name = _free(re.sub(r"\W+", "_", own or type(reward).__name__).strip("_"), objects)
    objects[name] = reward
    return {"name": "callable", "path": name}


def _free(name: str, taken: Mapping[str, Any]) -> str:
    names = (name if number == 1 else f"{name}_{number}" for number in range(1, len(taken) + 2))
    return next(each for each in names if each not in taken)


def importable(target: Callable[..., Any] | Any) -> str | None:
    """Return the path under which a worker process imports a function or class; None if it cannot.

    Functions of the program itself cannot be imported: that would run the program again.
    """
    name, module = getattr(target, "__qualname__", "<"), sys.modules.get(getattr(target, "__module__", None) or "")
    if "<" in name or module is None or module.__name__ == "__main__":
        return None
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    file = getattr(module, "__file__", None)
    if found is not target or file is None or not (inspect.isroutine(target) or inspect.isclass(target)):
        return None
    top = module.__name__.partition(".")[0]
    if top == module.__name__ and file.endswith(".py") and not file.startswith(_INSTALLED):
        return f"{Path(file).absolute()}:{name}" if Path(file).stem == top else None
    return f"{module.__name__}:{name}" if PathFinder.find_spec(top) is not None else None


def _refused(what: str, found: Any) -> ConfigError:
    expected = "a function, an object with compute_score, a plugin's name, FILE.py:FUNCTION, a section with a name, "
    expected += "or a list of them, each alone or as (reward, weight)"
    return ConfigError(what, code="config.wrong-type", where="reward", expected=expected, found=repr(found)[:200])
