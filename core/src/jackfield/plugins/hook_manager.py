"""The manager that calls the hooks of :mod:`jackfield.plugins.hooks`.

A hook that raises stops no other implementation of the same hook; then the caller gets a ``PluginError`` with the code
``plugin.hook-failed`` that names each implementation that raised, chained to the first error. A single
``JackfieldError`` is raised as it is, because it says itself what to do. Exceptions that are not an ``Exception``
(``KeyboardInterrupt``, cancellation) pass through at once, and an implementation with ``wrapper=True`` may itself turn
errors into results.
"""

from __future__ import annotations

import contextvars
import difflib
import functools
from collections.abc import Callable, Generator, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import pluggy

from jackfield.errors import JackfieldError, PluginError
from jackfield.plugins.hooks import HookSpecs, hookimpl
from jackfield.plugins.manifest import Manifest
from jackfield.plugins.registry import import_module

_HOOKS = sorted(name for name in vars(HookSpecs) if not name.startswith("_"))
#: of the hook call that is under way; a hook that calls a hook has its own
_FAILURES: contextvars.ContextVar[list[tuple[str, Exception]]] = contextvars.ContextVar("failures")


def hook_manager(hook_objects: Iterable[object] = (), manifests: Iterable[Manifest] = ()) -> HookManager:
    """Register the hooks of one run.

    Args:
        hook_objects: Objects (or modules) with functions marked by ``hookimpl``; called in this order.
        manifests: The selected plugins; a ``hooks`` module that several of them name is registered once.

    Raises:
        PluginError: ``plugin.hooks`` when an object implements no hook, an unknown one, or one with wrong parameters.
        PluginImportError: A hooks module raised.
    """
    modules: dict[str, ModuleType] = {}
    for manifest in manifests:
        if manifest.hooks is not None and manifest.hooks not in modules:
            modules[manifest.hooks] = import_module(manifest.hooks, manifest, f"hooks of the {manifest.label}")
    manager = HookManager()
    for plugin in reversed([*hook_objects, *modules.values()]):  # pluggy calls the latest first
        manager.register(plugin)
    return manager


class HookManager(pluggy.PluginManager):
    """The pluggy manager of the project ``jackfield``, strict about registration and errors.

    Call hooks as ``manager.hook.step_ended(event=...)``. It never looks for pluggy's own entry points.
    """

    def __init__(self) -> None:
        super().__init__("jackfield")
        self.add_hookspecs(HookSpecs)
        super().register(_REPORTERS, "jackfield.reporters")

    def register(self, plugin: object, name: str | None = None) -> str | None:
        """Register an object whose methods, or a module whose functions, are marked by ``hookimpl``.

        Raises:
            PluginError: ``plugin.hooks``, see :func:`hook_manager`.
        """
        label = getattr(plugin, "__name__", None) or f"{type(plugin).__module__}.{type(plugin).__qualname__}"
        refused: Exception | None = None
        try:
            registered = super().register(plugin, name)
        except (pluggy.PluginValidationError, ValueError) as error:
            refused = error
        callers = self.get_hookcallers(plugin) or []
        unknown = sorted(caller.name for caller in callers if caller.name not in _HOOKS)
        if refused or unknown or not callers:
            if self.is_registered(plugin):
                self.unregister(plugin)
            raise _not_registered(label, unknown, refused) from refused
        for caller in callers:
            for implementation in caller.get_hookimpls():
                if implementation.plugin is plugin and not (implementation.wrapper or implementation.hookwrapper):
                    guarded = _guard(implementation.function, f"{label}.{caller.name}")
                    setattr(implementation, "function", guarded)  # noqa: B010  (declared Final)
        return registered


def _not_registered(label: str, unknown: list[str], refused: Exception | None) -> PluginError:
    message, found = f"{label} implements no hook", ", ".join(unknown) or "none"
    if refused is not None:
        message, found = f"the hooks of {label} cannot be registered", " ".join(str(refused).split())
    elif unknown:
        close = difflib.get_close_matches(unknown[0], _HOOKS, n=1)
        message = f"{label} implements the unknown hook '{unknown[0]}'"
        message += f" (did you mean '{close[0]}'?)" if close else ""
    return PluginError(
        message,
        code="plugin.hooks",
        where=label,
        expected=f"each object once, with functions marked by hookimpl: one or more of {', '.join(_HOOKS)}",
        found=found,
        fix="give them the names and parameters of jackfield.plugins.hooks.HookSpecs",
    )


def _guard(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    """Have an implementation that raises noted, so that the others are called."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            _FAILURES.get().append((label, error))
            return None

    return call


def _reporter(hook: str) -> Callable[[], Generator[None, Any, Any]]:
    """The outermost wrapper of a hook: it raises what the implementations have raised."""

    def report() -> Generator[None, Any, Any]:
        failures: list[tuple[str, Exception]] = []
        token = _FAILURES.set(failures)
        try:
            result = yield
        finally:
            _FAILURES.reset(token)
        if failures:
            first = failures[0][1]
            if len(failures) == 1 and isinstance(first, JackfieldError):
                raise first
            raise _failed(hook, failures) from first
        return result

    return report


def _failed(hook: str, failures: list[tuple[str, Exception]]) -> PluginError:
    names = ", ".join(label for label, _ in failures)
    texts = (f"{type(e).__name__}: {e.message if isinstance(e, JackfieldError) else e}" for _, e in failures)
    return PluginError(
        f"the hook {hook} failed in {names}",
        code="plugin.hook-failed",
        where=names,
        found="; ".join(texts),
        fix="correct or remove what implements the hook; all other implementations were called",
    )


_REPORTERS = SimpleNamespace(**{name: hookimpl(wrapper=True, tryfirst=True)(_reporter(name)) for name in _HOOKS})
