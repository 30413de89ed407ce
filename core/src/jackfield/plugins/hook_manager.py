"""Who hears the hooks of :mod:`jackfield.plugins.hooks`.

What happens when a hook raises: every other implementation of the same hook is still called; then the caller gets a
``PluginError`` with the code ``plugin.hook-failed`` that names each implementation that raised, chained to the first
error. A single ``JackfieldError`` comes as it is, for it says itself what to do. Nothing is swallowed, and no listener
goes deaf because of another. Exceptions that are not an ``Exception`` (``KeyboardInterrupt``, cancellation) pass
through at once. A hook implementation with ``wrapper=True`` is pluggy's business and may itself turn errors into
results.
"""

from __future__ import annotations

import contextvars
import difflib
import functools
from collections.abc import Callable, Generator, Iterable
from typing import Any

import pluggy

from jackfield.errors import JackfieldError, PluginError
from jackfield.plugins.hooks import HookSpecs, hookimpl
from jackfield.plugins.manifest import Manifest
from jackfield.plugins.registry import import_module

__all__ = ["HookManager", "hook_manager"]

_Failures = list[tuple[str, Exception]]
#: of the hook call that is under way; a hook that calls a hook has its own
_FAILURES: contextvars.ContextVar[_Failures] = contextvars.ContextVar("failures")


def hook_manager(hook_objects: Iterable[object] = (), manifests: Iterable[Manifest] = ()) -> HookManager:
    """The hooks of one run.

    Args:
        hook_objects: objects (or modules) with functions marked by ``hookimpl``; called in this order.
        manifests: of the selected plugins; a ``hooks`` module that several of them name is registered once.

    Raises:
        PluginError: ``plugin.hooks`` when an object implements no hook, an unknown one, or one with wrong parameters.
        PluginImportError: a hooks module raised.
    """
    manager = HookManager()
    plugins = list(hook_objects)
    seen: set[str] = set()
    for manifest in manifests:
        if manifest.hooks is not None and manifest.hooks not in seen:
            seen.add(manifest.hooks)
            plugins.append(import_module(manifest.hooks, manifest, f"hooks of the {manifest.label}"))
    # pluggy calls the latest first
    for plugin in reversed(plugins):
        manager.register(plugin)
    return manager


class HookManager(pluggy.PluginManager):
    """pluggy's manager of the project ``jackfield``, strict about what is registered and about hooks that raise.

    Call hooks as ``manager.hook.step_ended(event=...)``. It never looks for pluggy's own entry points.
    """

    def __init__(self) -> None:
        super().__init__("jackfield")
        self.add_hookspecs(HookSpecs)
        self._hook_names = sorted(name for name in vars(HookSpecs) if not name.startswith("_"))
        super().register(_Reporters(self._hook_names), "jackfield.reporters")

    def register(self, plugin: object, name: str | None = None) -> str | None:
        """Register an object whose methods, or a module whose functions, are marked by ``hookimpl``.

        Raises:
            PluginError: ``plugin.hooks``, see :func:`hook_manager`.
        """
        label = _label(plugin)
        try:
            registered = super().register(plugin, name)
        except (pluggy.PluginValidationError, ValueError) as error:
            if self.is_registered(plugin):
                self.unregister(plugin)
            raise PluginError(
                f"the hooks of {label} cannot be registered",
                code="plugin.hooks",
                where=label,
                expected="the parameters of jackfield.plugins.hooks.HookSpecs, each object once",
                found=" ".join(str(error).split()),
            ) from error
        callers = self.get_hookcallers(plugin) or []
        unknown = sorted(caller.name for caller in callers if caller.name not in self._hook_names)
        if unknown or not callers:
            self.unregister(plugin)
            raise self._not_a_hook(label, unknown)
        for caller in callers:
            for implementation in caller.get_hookimpls():
                if implementation.plugin is plugin and not (implementation.wrapper or implementation.hookwrapper):
                    guarded = _guard(implementation.function, f"{label}.{caller.name}")
                    setattr(implementation, "function", guarded)  # noqa: B010  (declared Final)
        return registered

    def _not_a_hook(self, label: str, unknown: list[str]) -> PluginError:
        if not unknown:
            message, fix = f"{label} implements no hook", "mark functions with jackfield.plugins.hooks.hookimpl"
        else:
            close = difflib.get_close_matches(unknown[0], self._hook_names, n=1)
            hint = f" (did you mean '{close[0]}'?)" if close else ""
            message, fix = f"{label} implements the unknown hook '{unknown[0]}'{hint}", "correct its name"
        return PluginError(
            message,
            code="plugin.hooks",
            where=label,
            expected="one or more of " + ", ".join(self._hook_names),
            found=", ".join(unknown) or "none",
            fix=fix,
        )


class _Reporters:
    """The outermost wrapper of each hook: it collects what implementations raise, and raises it at the end."""

    def __init__(self, names: Iterable[str]) -> None:
        for name in names:
            setattr(self, name, hookimpl(wrapper=True, tryfirst=True)(_reporter(name)))


def _reporter(hook: str) -> Callable[[], Generator[None, Any, Any]]:
    def report() -> Generator[None, Any, Any]:
        failures: _Failures = []
        token = _FAILURES.set(failures)
        try:
            result = yield
        finally:
            _FAILURES.reset(token)
        errors = [error for _, error in failures]
        if len(errors) == 1 and isinstance(errors[0], JackfieldError):
            raise errors[0]
        if errors:
            raise _failed(hook, failures) from errors[0]
        return result

    return report


def _guard(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            _FAILURES.get().append((label, error))
            return None

    return call


def _failed(hook: str, failures: _Failures) -> PluginError:
    names = ", ".join(label for label, _ in failures)
    texts = (e.message if isinstance(e, JackfieldError) else str(e) for _, e in failures)
    found = "; ".join(f"{type(e).__name__}: {text}" for (_, e), text in zip(failures, texts, strict=True))
    return PluginError(
        f"the hook {hook} failed in {names}",
        code="plugin.hook-failed",
        where=names,
        found=found,
        fix="correct or remove what implements the hook; all other implementations were called",
    )


def _label(plugin: object) -> str:
    cls = type(plugin)
    return getattr(plugin, "__name__", None) or f"{cls.__module__}.{cls.__qualname__}"
