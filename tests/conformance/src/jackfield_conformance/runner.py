"""One run of the checks on one installed plugin: what applies, what was found, and the certificate."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import attrs

from jackfield.errors import JackfieldError
from jackfield.plugins import Manifest, PluginRecord, Registry, discover
from jackfield.settings import structure
from jackfield_conformance.certificate import Certificate, make_certificate
from jackfield_conformance.registry import FIRST_BEHAVIOUR, PREFIXES, Check, Outcome, Tier, checks, run_check
from jackfield_conformance.subject import Subject

DEFAULT_TIERS: tuple[Tier, ...] = ("base", "capability")

#: Certificates made by :func:`certify` in this process: the pytest plugin shows them as a table.
RUNS: list[Certificate] = []


def split(plugin: str) -> tuple[str, str]:
    """``"reward:rules"`` as kind and name.

    Raises:
        ValueError: it is not of this form.
    """
    kind, colon, name = plugin.partition(":")
    if not colon or kind not in PREFIXES or not name:
        raise ValueError(f"expected KIND:NAME, KIND one of {', '.join(PREFIXES)}; found {plugin!r}")
    return kind, name


@attrs.define(kw_only=True, eq=False)
class Run:
    """The checks of one plugin, in order, and what they found so far."""

    record: PluginRecord
    registry: Registry
    folder: Path  #: each check gets one of its own below
    tiers: Collection[Tier] = DEFAULT_TIERS  #: those that run
    checks: tuple[Check, ...] = attrs.field(init=False)
    outcomes: dict[str, Outcome] = attrs.field(init=False, factory=dict)
    _subject: Subject = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.checks = checks(self.record.kind)
        self._subject = _subject(self.record, self.registry, self.folder)

    @classmethod
    def of(cls, plugin: str, folder: Path, tiers: Collection[Tier] = DEFAULT_TIERS) -> Run:
        """The run of an installed plugin, named ``KIND:NAME``.

        Raises:
            ValueError: it is not named so.
            PluginNotFound: there is none; a broken one is there, and fails its first check.
        """
        kind, name = split(plugin)
        registry = discover()
        return cls(record=registry.resolve(name, kind), registry=registry, folder=folder, tiers=tiers)

    def execute(self, check: Check) -> Outcome:
        """Run one check, unless it does not apply, and keep what it found."""
        outcome = self._without_running(check)
        if outcome is None:
            place = self.folder / check.id
            place.mkdir(parents=True, exist_ok=True)
            outcome = self._judged(check, run_check(check, self._subject.at(place)))
        self.outcomes[check.id] = outcome
        return outcome

    def certificate(self) -> Certificate:
        """Return what has been found, as a certificate; a check that was not executed has not passed."""
        found = [self.outcomes.get(check.id) or Outcome(id=check.id, status="not_run") for check in self.checks]
        return make_certificate(self.record, self.checks, found, self.tiers)

    def _without_running(self, check: Check) -> Outcome | None:
        manifest = self.record.manifest
        abi, declared = (manifest.abi, manifest.capabilities) if manifest else ("0.0", {})
        if check.number < FIRST_BEHAVIOUR:
            return None
        if self._subject.config is None:
            return Outcome(id=check.id, status="not_run", message="the plugin cannot be made: see the checks before")
        if not check.applies(abi, declared):
            newer = check.capability is None or declared.get(check.capability) in ("full", "partial")
            why = f"came with ABI {check.since}" if newer else f"the capability '{check.capability}' is not declared"
            return Outcome(id=check.id, status="not_applicable", message=why)
        if check.tier not in self.tiers:
            return Outcome(id=check.id, status="not_run", message=f"tier {check.tier} was not asked for")
        return None

    def _judged(self, check: Check, outcome: Outcome) -> Outcome:
        """An exception in the manifest is a strict expected failure."""
        manifest = self.record.manifest
        exception = manifest.conformance.exceptions.get(check.id) if manifest else None
        if exception is None or check.number < FIRST_BEHAVIOUR or outcome.status in ("skipped", "not_applicable"):
            return outcome
        if outcome.status == "passed":
            stale = "the manifest declares an exception, and the check passes: remove the exception, it is stale"
            return attrs.evolve(outcome, status="failed", message=stale)
        reason = f"exception, review {exception.review}: {exception.reason}\n{outcome.message}"
        return attrs.evolve(outcome, status="exempt", message=reason)


def certify(
    plugin: str,
    tiers: Collection[Tier] = DEFAULT_TIERS,
    folder: Path | None = None,
    progress: Callable[[Check, Outcome], None] | None = None,
) -> Certificate:
    """Run the checks on an installed plugin in this process. One call is a plugin's own conformance test::

        def test_the_plugin_keeps_its_contract() -> None:
            assert "full" == certify("reward:rules").level

    Args:
        plugin: ``KIND:NAME``.
        tiers: that run.
        folder: for the checks' files; default: a temporary one.
        progress: called after each check.

    Raises:
        AssertionError: a check failed; the message is the report.
        PluginNotFound: there is no such plugin.
    """
    with tempfile.TemporaryDirectory(prefix="jackfield-conformance-") as temporary:
        run = Run.of(plugin, folder or Path(temporary), tiers)
        for check in run.checks:
            outcome = run.execute(check)
            if progress is not None:
                progress(check, outcome)
        certificate = run.certificate()
    RUNS.append(certificate)
    assert certificate.level != "none", certificate.report()
    return certificate


def _subject(record: PluginRecord, registry: Registry, folder: Path) -> Subject:
    """As much of a subject as can be had: without class or config, only the checks of the structure run."""
    manifest = record.manifest
    bare = Subject(
        kind=record.kind,
        name=record.name,
        cls=None,
        config=None,
        config_class=None,
        capabilities=dict(manifest.capabilities) if manifest else {},
        folder=folder,
        abi=record.abi or "1.0",
        record=record,
        registry=registry,
    )
    if manifest is None or record.error is not None:
        return bare
    try:
        loaded = registry.load(record.kind, record.name)
    except JackfieldError:
        return bare
    bare = attrs.evolve(bare, cls=loaded.cls, config_class=loaded.settings_class)
    try:
        fixture = _fixture(manifest, folder / "fixture")
        settings = fixture.get("settings", {})
        config: Any = structure(loaded.settings_class, settings, "settings")
    except Exception as error:  # a fixture may raise anything
        return attrs.evolve(bare, fixture={"problem": f"{type(error).__name__}: {error}"})
    return attrs.evolve(bare, config=config, settings=settings, fixture=fixture)


def _fixture(manifest: Manifest, folder: Path) -> Mapping[str, Any]:
    """What the plugin's fixture function returns; it is called once per run."""
    if manifest.conformance.fixture is None:
        return {}
    module, _, name = manifest.conformance.fixture.partition(":")
    folder.mkdir(parents=True, exist_ok=True)
    fixture = getattr(importlib.import_module(module), name)(folder)
    if not isinstance(fixture, Mapping):
        raise TypeError(f"{manifest.conformance.fixture} returned {type(fixture).__name__}, expected a mapping")
    return fixture
