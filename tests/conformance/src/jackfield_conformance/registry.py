"""The checks of all kinds, their input, and the function that runs one of them on one plugin.

A check is a function of a :class:`Subject` that raises if an invariant of the contract
is broken. ``jackfield_conformance.suites`` has one module or package of checks per kind, and ``suites.structure`` for
every kind. Ids are never reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import pkgutil
import re
import signal
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import attrs
from packaging.version import Version

from jackfield.settings import structure

if TYPE_CHECKING:
    from jackfield.plugins import Manifest, PluginRecord


#: The first part of the ids of each kind's checks.
PREFIXES: dict[str, str] = {
    "engine": "ENG",
    "rollout": "ROL",
    "agent": "AGT",
    "reward": "REW",
    "transfer_queue": "TRQ",
    "checkpoint_engine": "CKE",
    "operator": "OPR",
    "hooks": "ALG",
}

#: The first part of the ids of checks that are the same for every kind.
EVERY_KIND = "PKG"

Tier = Literal["base", "capability", "stress", "gpu"]

#: In the order in which a certificate lists them. ``base`` and ``capability`` run by default.
TIERS: tuple[Tier, ...] = ("base", "capability", "stress", "gpu")

#: Checks below this number look at the plugin from outside and hold for every kind; behaviour starts here.
FIRST_BEHAVIOUR = 10

#: ``passed`` and ``failed`` ran. ``exempt``: failed, as the manifest declares with a reason. ``not_applicable``: newer
#: than the plugin's ABI, of a capability that it does not declare, or without a subject in it. ``skipped``: could not
#: run here. ``not_run``: was not requested.
Status = Literal["passed", "failed", "exempt", "not_applicable", "skipped", "not_run"]

Function = TypeVar("Function", bound=Callable[..., Any])

_KINDS = {EVERY_KIND: "", **{prefix: kind for kind, prefix in PREFIXES.items()}}
_ID = re.compile(rf"({'|'.join(_KINDS)})-(\d{{3}})")
_CHECKS: dict[str, Check] = {}
_GRACE_SECONDS = 5.0  #: between the deadline inside a check's event loop and the alarm that breaks a blocked one
_FRAMES = 6  #: of a traceback that a message shows


@attrs.frozen(kw_only=True, eq=False)
class Subject:
    """One plugin under one check. A mutant is not installed and has no ``record``."""

    kind: str
    name: str
    cls: Any  #: the plugin's class
    config: Any  #: an instance of ``config_class``, made from ``settings``
    config_class: Any
    settings: Mapping[str, Any] = attrs.field(factory=dict)  #: of a small instance
    capabilities: Mapping[str, str] = attrs.field(factory=dict)  #: name to declared level
    fixture: Mapping[str, Any] = attrs.field(factory=dict)  #: the result of the plugin's fixture function
    folder: Path  #: fresh and empty for each check
    abi: str = "1.0"
    record: PluginRecord | None = None

    @property
    def label(self) -> str:
        """Return the name for messages."""
        return f"{self.kind}:{self.name}"

    @property
    def manifest(self) -> Manifest | None:
        """Return the plugin's manifest, if it is installed and readable."""
        return None if self.record is None else self.record.manifest

    def has(self, capability: str) -> bool:
        """Return whether the plugin declares a capability as ``full`` or ``partial``."""
        return self.capabilities.get(capability) in ("full", "partial")

    def make(self, context: Any, **settings: Any) -> Any:
        """Create an object of the plugin on this context; ``settings`` replace those of its fixture."""
        if not settings:
            return self.cls(self.config, context)
        return self.cls(structure(self.config_class, {**self.settings, **settings}), context)

    def plain(self) -> dict[str, Any]:
        """Return plain values for :meth:`of_plain` in another process; of the fixture only ``device``."""
        found = {name: getattr(self, name) for name in ("cls", "config_class")}
        classes = {name: [cls.__module__, cls.__qualname__] for name, cls in found.items()}
        fixture = {name: self.fixture[name] for name in ("device",) if name in self.fixture}
        return {**classes, "kind": self.kind, "name": self.name, "settings": dict(self.settings), "fixture": fixture}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any], folder: Path) -> Subject:
        """Create the subject that :meth:`plain` describes."""
        found: dict[str, Any] = {"folder": folder}
        for name in ("cls", "config_class"):
            module, path = plain[name]
            found[name] = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        return cls(**{**plain, **found, "config": structure(found["config_class"], plain["settings"])})

    def at(self, folder: Path) -> Subject:
        """Return the same plugin with another folder."""
        return attrs.evolve(self, folder=folder)


class NotApplicable(Exception):
    """Raised by a check whose invariant says nothing about this plugin, with the reason. Never a pass."""


class Warned(Exception):
    """Raised by a check that passes with a warning to the author, which the report shows."""


class Skipped(Exception):
    """Raised by a check that cannot run here: no such hardware, or the fixture lacks what it needs. Never a pass."""


@attrs.frozen(kw_only=True)
class Check:
    """One invariant of a contract, and the function that tests it on a plugin."""

    id: str  #: ``ENG-014``
    kind: str  #: empty: every kind
    tier: Tier
    since: str  #: a check newer than the ABI minor version that the plugin declares does not run
    capability: str | None  #: runs only on a plugin that declares it ``full`` or ``partial``
    invariant: str  #: one sentence: what must hold
    page: str  #: the part of the contract that says so
    function: Callable[[Subject], Awaitable[None] | None]
    deadline_seconds: float = 30.0  #: a check that takes longer fails

    @property
    def number(self) -> int:
        """Return the number in the id."""
        return int(self.id.partition("-")[2])

    def applies(self, abi: str, declared: Mapping[str, str]) -> bool:
        """Return whether a plugin of this ABI version with these capabilities must pass it."""
        if Version(self.since) > Version(abi):
            return False
        return self.capability is None or declared.get(self.capability) in ("full", "partial")


@attrs.frozen(kw_only=True)
class Outcome:
    """The outcome of one check."""

    check: Check
    status: Status
    message: str = ""  #: why it failed, was exempt, skipped or does not apply; the warning of one that passed
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the check and its outcome, as a certificate has them."""
        found = {name: getattr(self.check, name) for name in ("id", "tier", "invariant", "page")}
        return {**found, "outcome": self.status, "message": self.message, "seconds": self.seconds}


@attrs.frozen(kw_only=True)
class Capability:
    """A capability that plugins of a kind may declare.

    The module of a suite has those of its kind in ``CAPABILITIES: dict[str, Capability]``.
    """

    what: str  #: one line
    #: whether the class implements it; None: only the checks of the capability can find out
    detect: Callable[[Subject], bool] | None = None


def check(
    id: str,
    *,
    tier: Tier = "base",
    since: str = "1.0",
    capability: str | None = None,
    page: str = "",
    deadline_seconds: float = 30.0,
    using: Callable[[Subject], Any] | None = None,
) -> Callable[[Function], Function]:
    """Make a function a check. The first sentence of its docstring is the invariant; the id gives the kind.

    The function takes a :class:`Subject`, and may be asynchronous. It raises an error that says what was expected and
    found if the invariant is broken, and :class:`Skipped` if it cannot run here. ``using`` is a context manager that
    yields its second argument; asynchronous if the function is. The other arguments are those of :class:`Check`; the
    default page is ``docs/plugins/<kind>.md``, and the tier is ``capability`` if a capability is given.
    """
    parts = _ID.fullmatch(id)
    assert parts, f"{id!r} is not an id like ENG-014"
    kind = _KINDS[parts[1]]

    def register(function: Function) -> Function:
        made = Check(
            id=id,
            kind=kind,
            tier="capability" if capability and tier == "base" else tier,
            since=since,
            capability=capability,
            invariant=first_sentence(function),
            page=page or f"docs/plugins/{kind}.md",
            function=function if using is None else _using(using, function),
            deadline_seconds=deadline_seconds,
        )
        known = _CHECKS.get(id)
        assert known is None or _place(known.function) == _place(function), f"two checks have the id {id}"
        _CHECKS[id] = made
        return function

    return register


def _using(open_it: Callable[[Subject], Any], function: Callable[..., Any]) -> Callable[[Subject], Any]:
    async def run_async(subject: Subject) -> None:
        async with open_it(subject) as opened:
            await function(subject, opened)

    def run(subject: Subject) -> None:
        with open_it(subject) as opened:
            function(subject, opened)

    return functools.wraps(function)(run_async if inspect.iscoroutinefunction(function) else run)


def first_sentence(function: Callable[..., Any]) -> str:
    """Return the first sentence of a docstring, on one line, without its full stop."""
    text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!])\s", text, maxsplit=1)[0].rstrip(".")
    assert sentence, f"the check {function.__qualname__} has no docstring: its first sentence is the invariant"
    return sentence


def checks(kind: str) -> tuple[Check, ...]:
    """Return all checks of a kind, and those of every kind, in the order of their ids."""
    _import("structure")
    _import(kind)
    return tuple(sorted((each for each in _CHECKS.values() if each.kind in ("", kind)), key=lambda each: each.id))


def capabilities(kind: str) -> dict[str, Capability]:
    """Return the capabilities of a kind, by name."""
    return dict(_import(kind).CAPABILITIES)


def run_check(check: Check, subject: Subject) -> Outcome:
    """Run a check to its end or to its deadline. It raises only ``KeyboardInterrupt``."""
    started = time.monotonic()
    status: Status = "passed"
    message = ""
    try:
        with _alarm(check.deadline_seconds + _GRACE_SECONDS):
            result = check.function(subject)
            if inspect.isawaitable(result):
                asyncio.run(_within(result, check.deadline_seconds))
    except Warned as warning:
        message = str(warning)
    except Skipped as reason:
        status, message = "skipped", str(reason)
    except NotApplicable as reason:
        status, message = "not_applicable", str(reason)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may raise anything, also a cancellation or an exit
        status, message = "failed", _text(error)
    return Outcome(check=check, status=status, message=message, seconds=round(time.monotonic() - started, 3))


async def _within(result: Awaitable[None], seconds: float) -> None:
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            await result
    except TimeoutError as error:
        if scope.expired():
            raise _Late(f"the check did not end within its {seconds:g} s") from error
        raise


class _Late(Exception):
    """Raised at the deadline of a check."""


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise in this thread after ``seconds``, and every five from then on, whatever it is doing.

    Restore an earlier alarm (pytest-timeout's) afterwards, with its remaining time.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(_: int, frame: FrameType | None) -> None:
        raise _Late(f"the check did not end within {seconds:g} s, and nothing else could run meanwhile")

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, _GRACE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 0.001), interval)


def _text(error: BaseException) -> str:
    """Return an assertion's message; of any other error its type and origin."""
    if isinstance(error, AssertionError | _Late) and str(error):
        return str(error).partition("\nassert ")[0]  # pytest's rewriting appends the comparison
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    where = "".join(traceback.format_list(frames)).rstrip()
    return f"{type(error).__name__}: {error}\n{where}".strip()


def _import(suite: str) -> Any:
    """Import a suite, and the modules of one that is a package."""
    found = importlib.import_module(f"jackfield_conformance.suites.{suite}")
    for module in pkgutil.iter_modules(getattr(found, "__path__", ())):
        importlib.import_module(f"{found.__name__}.{module.name}")
    return found


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__
