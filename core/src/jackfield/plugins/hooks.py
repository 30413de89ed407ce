"""The lifecycle events of a run, the registration of small parts, and the manager of hooks.

Hooks are pluggy hooks of the project ``jackfield``. An implementation is a function marked with :data:`hookimpl`, in an
object that the run registers or in the ``hooks`` module that a manifest names. Each event class has a hook of its name,
whose only parameter is ``event``: the hook ``step_ended`` gets a :class:`StepEnded`. The hook ``register_parts`` gets a
:data:`Registrar` as ``register``. No hook is called per token or per sample.

If an implementation raises, the others of the same hook are still called. Then the caller gets a single
``JackfieldError`` unchanged, or else a ``PluginError`` (``plugin.hook-failed``) that names each failed implementation
and is chained to the first error. Exceptions that are not an ``Exception`` (``KeyboardInterrupt``, cancellation)
propagate at once.
"""

from __future__ import annotations

import contextvars
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs
import pluggy

from jackfield.errors import JackfieldError, PluginError, did_you_mean
from jackfield.plugins.manifest import Manifest
from jackfield.plugins.registry import import_module

if TYPE_CHECKING:
    from jackfield.abc.rollout import WeightReceipt

hookimpl = pluggy.HookimplMarker("jackfield")

#: ``register(kind, name, part)`` registers a small part: an advantage estimator, a loss, a sampler and so on.
Registrar = Callable[[str, str, Any], None]


@pluggy.HookspecMarker("jackfield")
def _takes_register(register: Registrar) -> None: ...


@pluggy.HookspecMarker("jackfield")
def _takes_event(event: Any) -> None: ...


#: The specification of each hook by its name.
HOOKS: dict[str, Callable[..., None]] = {"register_parts": _takes_register}


class Event:
    """The base of events. Each event class has a hook, which is named after it."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        HOOKS[re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()] = _takes_event


@attrs.frozen(kw_only=True)
class RunStarted(Event):
    """The event that a run begins."""

    name: str
    folder: str
    total_steps: int
    first_step: int  #: 0, or the step at which a resumed run continues
    config: Mapping[str, Any]  #: the whole resolved configuration, plain values


@attrs.frozen(kw_only=True)
class RunEnded(Event):
    """The event that a run ends, with or without an error."""

    folder: str
    steps: int  #: completed steps
    error: BaseException | None = None
    stopped: bool = False  #: whether a signal or the caller ended it early


@attrs.frozen(kw_only=True)
class StageEnded(Event):
    """A stage of the run (generate, reward, advantages, update, sync, evaluate, …) has ended.

    Times are in seconds on the run's clock. ``step`` counts from 0: the batch, or the step that the trainer is at.
    """

    name: str
    lane: str  #: component: ``explorer``, ``reward``, ``trainer``, ``weights``
    start: float
    end: float
    step: int


@attrs.frozen(kw_only=True)
class StepEnded(Event):
    """The trainer has finished a step; ``step`` counts completed steps, from 1."""

    step: int
    metrics: Mapping[str, float]


@attrs.frozen(kw_only=True)
class EvaluationEnded(Event):
    """An evaluation has ended; ``step`` is the weight version that was evaluated."""

    step: int
    metrics: Mapping[str, float]


@attrs.frozen(kw_only=True)
class SampleRecord:
    """One row of a sample table."""

    key: str
    prompt: str
    response: str
    reward: float | None
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    tags: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class SamplesRecorded(Event):
    """Samples of a step or of an evaluation for a sample table."""

    step: int
    partition: str
    samples: tuple[SampleRecord, ...]


@attrs.frozen(kw_only=True)
class SamplesFailed(Event):
    """The samples that failed since the last such event, with the reason by key."""

    step: int
    reasons: Mapping[str, str]


@attrs.frozen(kw_only=True)
class WeightsSynced(Event):
    """Every replica has acknowledged a weight version."""

    version: int
    receipts: tuple[WeightReceipt, ...]
    seconds: float
    sent_bytes: int = 0  #: bytes of weights sent to a worker; fewer for a delta


@attrs.frozen(kw_only=True)
class CheckpointSaved(Event):
    """A complete checkpoint is on the disk."""

    step: int  #: completed steps that it contains
    folder: str
    bytes: int


HookSpecs = type("HookSpecs", (), dict(HOOKS))
#: exceptions of the current hook call, and before them those of the calls around it
_FAILURES: contextvars.ContextVar[tuple[list[tuple[str, Exception]], ...]] = contextvars.ContextVar("failures")


class HookManager(pluggy.PluginManager):
    """The pluggy manager of the hooks of one run, with strict registration and error handling.

    Call hooks as ``manager.hook.step_ended(event=...)``. It never loads pluggy's own entry points.

    Args:
        hook_objects: Objects (or modules) with functions marked by ``hookimpl``; called in this order.
        manifests: The selected plugins; a ``hooks`` module that several of them name is registered once.
    """

    def __init__(self, hook_objects: Iterable[object] = (), manifests: Iterable[Manifest] = ()) -> None:
        super().__init__("jackfield")
        self.add_hookspecs(HookSpecs)
        self.add_hookcall_monitoring(_begin, _end)
        modules: dict[str, ModuleType] = {}
        for manifest in manifests:
            if manifest.hooks is not None and manifest.hooks not in modules:
                modules[manifest.hooks] = import_module(manifest.hooks, manifest, f"hooks of the {manifest.label}")
        for plugin in reversed([*hook_objects, *modules.values()]):  # pluggy calls the latest first
            self.register(plugin)

    def register(self, plugin: object, name: str | None = None) -> str | None:
        """Register an object or module with marked methods or functions, or raise ``plugin.hooks``."""
        label = getattr(plugin, "__name__", None) or f"{type(plugin).__module__}.{type(plugin).__qualname__}"
        problem, registered = "it implements no hook", None
        try:
            registered = super().register(plugin, name)
        except (pluggy.PluginValidationError, ValueError) as error:
            problem = " ".join(str(error).split())
        callers = self.get_hookcallers(plugin) or [] if registered is not None else []
        unknown = [f"'{caller.name}'{did_you_mean(caller.name, HOOKS)}" for caller in callers if not caller.has_spec()]
        if unknown or not callers:
            expected = f"each object once, with functions marked by hookimpl: one or more of {', '.join(HOOKS)}"
            found = f"the unknown hook {', '.join(unknown)}" if unknown else problem
            details = {"where": label, "expected": expected, "found": found, "fix": "see jackfield.plugins.hooks"}
            raise PluginError(f"the hooks of {label} cannot be registered", code="plugin.hooks", **details)
        for caller in callers:
            for implementation in caller.get_hookimpls():
                if implementation.plugin is plugin and not (implementation.wrapper or implementation.hookwrapper):
                    guarded = _guard(implementation.function, f"{label}.{caller.name}")
                    setattr(implementation, "function", guarded)  # noqa: B010  (declared Final)
        return registered


def _guard(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    """Wrap an implementation to record its exception, so that the others are called."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            _FAILURES.get()[-1].append((label, error))
            return None

    return call


def _begin(*_: Any) -> None:
    _FAILURES.set((*_FAILURES.get(()), []))


def _end(outcome: pluggy.Result[Any], hook: str, *_: Any) -> None:
    """Make a hook call raise the exceptions that its implementations raised."""
    *outer, failures = _FAILURES.get()
    _FAILURES.set(tuple(outer))
    if not failures or outcome.exception is not None:
        return
    raised = failures[0][1]
    if len(failures) > 1 or not isinstance(raised, JackfieldError):
        names = ", ".join(label for label, _ in failures)
        texts = (f"{type(e).__name__}: {e.message if isinstance(e, JackfieldError) else e}" for _, e in failures)
        fix = "correct or remove what implements the hook; all other implementations were called"
        details = {"where": names, "found": "; ".join(texts), "fix": fix}
        error = PluginError(f"the hook {hook} failed in {names}", code="plugin.hook-failed", **details)
        error.__cause__, raised = raised, error
    outcome.force_exception(raised)
