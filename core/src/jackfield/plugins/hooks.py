"""The lifecycle events of a run, the registration of small parts, and the manager of hooks.

Hooks are pluggy hooks of the project ``jackfield``. An implementation is a function marked with :data:`hookimpl`, in an
object that the run registers or in the ``hooks`` module that a manifest names. Each event class has a hook of its name,
whose only parameter is ``event``: the hook ``step_ended`` gets a :class:`StepEnded`. The hook ``register_parts`` gets a
:data:`Registrar` as ``register``. No hook is called per token or per sample.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, ClassVar, Literal

import attrs
import pluggy

from jackfield.abc.rollout import WeightReceipt
from jackfield.errors import JackfieldError, PluginError, did_you_mean
from jackfield.plugins.manifest import Manifest
from jackfield.plugins.registry import import_module

hookimpl = pluggy.HookimplMarker("jackfield")

#: ``register(kind, name, function, **fields)`` registers a small part: an advantage estimator, a loss, a sampler and
#: so on. The fields are those of :func:`jackfield.algorithms.register`.
Registrar = Callable[..., None]


@pluggy.HookspecMarker("jackfield")
def _takes_register(register: Registrar) -> None: ...


@pluggy.HookspecMarker("jackfield")
def _takes_event(event: Any) -> None: ...


#: The specification of each hook by its name.
HOOKS: dict[str, Callable[..., None]] = {"register_parts": _takes_register}


class Event:
    """The base of events. Each event class has a hook, which is named after it."""

    __slots__ = ()
    hook: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.hook = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        HOOKS[cls.hook] = _takes_event


@attrs.frozen(kw_only=True)
class RunStarted(Event):
    """The event that a run begins."""

    name: str
    folder: str
    total_steps: int
    first_step: int  #: 0, or the step at which a resumed run continues
    config: Mapping[str, Any]  #: the whole resolved configuration, plain values
    notes: tuple[str, ...] = ()  #: sentences about the data: what was recognised, what is left out


@attrs.frozen(kw_only=True)
class RunEnded(Event):
    """The event that a run ends, with or without an error."""

    folder: str
    steps: int  #: completed steps, or what ``counted`` says
    counted: str = "steps"  #: with the role reward: scored groups
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
class RewardsPending(Event):
    """A reward worker tells of its scores from time to time, while a step waits for them; ``step`` counts from 0."""

    step: int
    scored: int  #: tries to score a sample that have ended since the worker began
    in_progress: int  #: turns that are taken
    waiting: int  #: turns that are waited for


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
    # One per response token, for ``jackfield trace``; empty if the sample has none:
    log_probs: tuple[float, ...] = ()  #: of the rollout
    weight_versions: tuple[int, ...] = ()
    token_rewards: tuple[float, ...] = ()
    rollout: Mapping[str, Any] = attrs.field(factory=dict)  #: what the agent loop said of it: turns, events and so on


@attrs.frozen(kw_only=True)
class SamplesRecorded(Event):
    """Samples of a step or of an evaluation for a sample table."""

    step: int
    partition: str
    samples: tuple[SampleRecord, ...]


@attrs.frozen(kw_only=True)
class SamplesFailed(Event):
    """The samples, and rollouts without one, that failed since the last such event, with the reason by key."""

    step: int
    reasons: Mapping[str, str]


@attrs.frozen(kw_only=True)
class WeightsSynced(Event):
    """Every replica has acknowledged a weight version."""

    version: int
    receipts: tuple[WeightReceipt, ...] = ()  #: by replica
    seconds: float = 0.0
    #: bytes of weights sent to a worker, fewer for a delta; over links, by all, once for workers with the same parts
    sent_bytes: int = 0
    #: if parts came from every rank: bytes by link, such as ``0-1`` from rank 0 to worker 1 of all replicas'
    link_bytes: Mapping[str, int] = attrs.field(factory=dict)
    kind: Literal["full", "adapter", "delta"] = "full"
    digests: Mapping[str, str] = attrs.field(factory=dict)  #: digests of all tensors by name, including unchanged ones
    peft_config: Mapping[str, Any] | None = None
    retained: Mapping[str, Any] | None = None  #: connect arguments for workers that join later; None: not possible


@attrs.frozen(kw_only=True)
class CheckpointSaved(Event):
    """A complete checkpoint is on the disk."""

    step: int  #: completed steps that it contains
    folder: str
    bytes: int


class HookManager(pluggy.PluginManager):
    """The pluggy manager of the hooks of one run, with strict registration and error handling.

    It never loads pluggy's own entry points. ``hook_objects`` (or modules) have functions marked by ``hookimpl``, which
    are called in this order. A ``hooks`` module that several manifests of selected plugins name is registered once.
    """

    def __init__(self, hook_objects: Iterable[object] = (), manifests: Iterable[Manifest] = ()) -> None:
        super().__init__("jackfield")
        self.add_hookspecs(type("Specifications", (), dict(HOOKS)))
        modules: dict[str, ModuleType] = {}
        for manifest in manifests:
            if manifest.hooks is not None and manifest.hooks not in modules:
                modules[manifest.hooks] = import_module(manifest.hooks, manifest, f"hooks of the {manifest.label}")
        for plugin in reversed([*hook_objects, *modules.values()]):  # pluggy calls the latest first
            self.register(plugin)

    def register(self, plugin: object, name: str | None = None) -> str | None:
        """Register an object or module with marked methods or functions, or raise ``plugin.hooks``."""
        found, registered = "it implements no hook", None
        try:
            registered = super().register(plugin, name)
        except (pluggy.PluginValidationError, ValueError) as error:
            found = " ".join(str(error).split())
        callers = self.get_hookcallers(plugin) or [] if registered is not None else []
        unknown = [f"'{caller.name}'{did_you_mean(caller.name, HOOKS)}" for caller in callers if not caller.has_spec()]
        if unknown:
            found = f"the unknown hook {', '.join(unknown)}"
        elif any(each.wrapper or each.hookwrapper for caller in callers for each in caller.get_hookimpls()):
            found = "a hook wrapper"
        elif callers:
            return registered
        expected = f"each object once, with functions marked by hookimpl: one or more of {', '.join(HOOKS)}"
        details = {"where": _label(plugin), "expected": expected, "found": found, "fix": "see jackfield.plugins.hooks"}
        raise PluginError(f"the hooks of {_label(plugin)} cannot be registered", code="plugin.hooks", **details)

    def emit(self, event: Event) -> None:
        """Call the hook of an event."""
        self.call(event.hook, event=event)

    def call(self, hook: str, **arguments: Any) -> None:
        """Call all implementations of a hook, also those after one that raises, and then raise what they raised.

        A single ``JackfieldError`` is raised unchanged, anything else as a ``PluginError`` (``plugin.hook-failed``)
        that names each failed implementation and is chained to the first error. What is not an ``Exception``
        (``KeyboardInterrupt``, cancellation) propagates at once.
        """
        failures: list[tuple[str, Exception]] = []
        for each in reversed(getattr(self.hook, hook).get_hookimpls()):
            try:
                each.function(*(arguments[name] for name in each.argnames))
            except Exception as error:
                failures.append((f"{_label(each.plugin)}.{hook}", error))
        if not failures:
            return
        names, first = ", ".join(label for label, _ in failures), failures[0][1]
        if len(failures) == 1 and isinstance(first, JackfieldError):
            raise first
        texts = (f"{type(e).__name__}: {e.message if isinstance(e, JackfieldError) else e}" for _, e in failures)
        fix = "correct or remove what implements the hook; all other implementations were called"
        details = {"where": names, "found": "; ".join(texts), "fix": fix}
        raise PluginError(f"the hook {hook} failed in {names}", code="plugin.hook-failed", **details) from first


def package_hooks(manifest: Manifest) -> HookManager:
    """Return the hooks of an installed package, which only registers parts, or raise ``plugin.hooks``."""
    manager = HookManager([], [manifest])
    found = [name for name in HOOKS if getattr(manager.hook, name).get_hookimpls()]
    if found != ["register_parts"]:
        fix = "offer a class for observe.hooks for what listens to a run"
        details = {"where": str(manifest.hooks), "expected": "register_parts", "found": ", ".join(found), "fix": fix}
        raise PluginError("a package of hooks listens to every run", code="plugin.hooks", **details)
    return manager


def _label(plugin: object) -> str:
    return getattr(plugin, "__name__", None) or f"{type(plugin).__module__}.{type(plugin).__qualname__}"
