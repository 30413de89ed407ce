"""The parts that plugins and packages of hooks register, and the user's own hooks."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jackfield.algorithms.registry import KINDS, names, part, register
from jackfield.algorithms.settings import describe
from jackfield.data.curriculum import register_curriculum
from jackfield.errors import JackfieldError, PluginError, did_you_mean
from jackfield.plugins import Registry, discover
from jackfield.plugins.hooks import HOOKS, hookimpl, package_hooks
from jackfield.queue.meta import register_sampler
from jackfield.runtime.workers import one_line

_REGISTERED: dict[str, JackfieldError | None] = {}  #: by package of hooks: its error


def register_any(kind: str, name: str, function: Any, *, origin: str = "", **fields: Any) -> None:
    """Register a sampler, a curriculum or a part of an algorithm (see :data:`~jackfield.plugins.hooks.Registrar`)."""
    if kind == "sampler":
        register_sampler(name, function)
    elif kind == "curriculum":
        register_curriculum(name, function)
    elif kind in KINDS:
        register(kind, name, **fields, origin=origin)(function)
    else:
        known = (*KINDS, "sampler", "curriculum")
        what, expected = f"there is no part of kind '{kind}'{did_you_mean(kind, known)}", "one of " + ", ".join(known)
        raise PluginError(what, code="plugin.hooks", where=f"{kind}:{name}", expected=expected, found=kind)


def register_installed(registry: Registry | None = None, *, warn: bool = True) -> dict[str, JackfieldError]:
    """Register the parts of all installed packages of hooks, once per process; return errors by package.

    A part has no effect until a configuration names it, so a broken package does not end a run: it is left out, with a
    warning.
    """
    failed = {}
    for record in (registry or discover()).records("hooks"):
        if record.label not in _REGISTERED:
            _REGISTERED[record.label] = None
            try:
                add = partial(register_any, origin=f"{record.distribution} {record.version}")
                package_hooks(record.usable()).call("register_parts", register=add)
            except JackfieldError as error:
                _REGISTERED[record.label] = error
                if warn:
                    logging.getLogger("jackfield").warning("%s is left out: %s", record.label, one_line(error))
        if (known := _REGISTERED[record.label]) is not None:
            failed[record.label] = known
    return failed


def describe_parts(kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return the parts of algorithms of these kinds, also those of installed packages, as plain values."""
    register_installed()
    return [describe(part(kind, name)) for kind in kinds for name in names(kind)]


def load_hooks(named: Sequence[str]) -> list[object]:
    """Make objects of the user's classes ``file.py:Class`` or ``package.module:Class``, or raise ``plugin.hooks``.

    Each public method is a hook, by its name. Errors in it name the class as it is written here.
    """
    return [_hooks_of(text) for text in named]


def _hooks_of(text: str) -> object:
    place, _, name = text.rpartition(":")
    form = "file.py:Class or package.module:Class"
    try:
        if not place or not name.isidentifier():
            raise _refused(text, form, text)
        made = getattr(_module(place), name)()
    except JackfieldError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may do anything
        raise _refused(text, f"{form}, made without arguments", f"{type(error).__name__}: {error}") from error
    events = [each for each in HOOKS if each != "register_parts"]  # which workers need, too
    methods = {each: one for each, one in inspect.getmembers(made, inspect.ismethod) if not each.startswith("_")}
    unknown = [f"{each}{did_you_mean(each, events)}" for each in methods if each not in events]
    if unknown or not methods:
        raise _refused(text, f"public methods among {', '.join(events)}", ", ".join(unknown) or "no method")
    return types.SimpleNamespace(__name__=text, **{each: _hook(method) for each, method in methods.items()})


def _hook(method: Callable[[Any], Any]) -> Any:
    """Return a function with the parameter of hooks, whatever the method calls it."""
    return hookimpl(lambda event: method(event))


def _module(place: str) -> types.ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None, "a path that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _refused(text: str, expected: str, found: str) -> PluginError:
    fix = "correct the class, or the entry in observe.hooks; helpers of a class begin with _"
    details = {"where": f"observe.hooks, {text}", "expected": expected, "found": found, "fix": fix}
    return PluginError(f"the hooks of {text} cannot be used", code="plugin.hooks", **details)
