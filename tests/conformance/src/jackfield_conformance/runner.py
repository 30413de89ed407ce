"""The checks of one installed plugin: which apply, their outcomes and the certificate."""

from __future__ import annotations

import datetime
import importlib
import platform
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import attrs

from jackfield.errors import JackfieldError
from jackfield.plugins import Manifest, PluginRecord, discover
from jackfield.settings import structure
from jackfield_conformance.certificates import FORMAT, plugin_digest
from jackfield_conformance.registry import (
    FIRST_BEHAVIOUR,
    PREFIXES,
    TIERS,
    Check,
    Outcome,
    Subject,
    Tier,
    checks,
    run_check,
)

#: See :func:`level_of`.
Level = Literal["none", "partial", "base", "full"]


@attrs.frozen(kw_only=True)
class Certificate:
    """The result of one run of the checks; :meth:`as_dict` is the JSON file."""

    record: PluginRecord
    tiers: tuple[Tier, ...]  #: that were requested
    outcomes: tuple[Outcome, ...]
    date: str = attrs.field(factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))  #: UTC

    @property
    def level(self) -> Level:
        """Return the plugin's level."""
        return level_of(self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        """Return the certificate as JSON values."""
        record = self.record
        return {
            "format": FORMAT,
            "plugin": record.name,
            **{name: getattr(record, name) for name in ("kind", "distribution", "abi")},
            "level": self.level,
            "date": self.date,
            "versions": {"plugin": record.version, "python": platform.python_version(), **_versions()},
            "platform": platform.platform(),
            "digest": None if record.manifest is None else plugin_digest(record.manifest),
            "tiers": self.tiers,
            "checks": [outcome.as_dict() for outcome in self.outcomes],
            "counts": dict(Counter(outcome.status for outcome in self.outcomes)),
            "seconds": round(sum(outcome.seconds for outcome in self.outcomes), 3),
        }

    def report(self) -> str:
        """Return the readable report: each broken invariant in a sentence, with the contract's page."""
        record, found = self.record, self.as_dict()
        lines = [f"{record.kind} '{record.name}' ({record.distribution} {record.version}), ABI {record.abi or '-'}"]
        for outcome in self.outcomes:
            warned = outcome.status == "passed" and outcome.message
            if warned or outcome.status in ("failed", "exempt", "skipped"):
                status, check = "WARNING" if warned else outcome.status.upper(), outcome.check
                lines.append(f"  {status} {check.id}: {check.invariant}.")
                lines.append(textwrap.indent(outcome.message or "no reason given", "      "))
                lines.append(f"      see {check.page}")
        counts = ", ".join(f"{number} {status.replace('_', ' ')}" for status, number in found["counts"].items())
        return "\n".join([*lines, f"level: {self.level} ({counts}; {found['seconds']:.1f} s)"])


def level_of(outcomes: Iterable[Outcome]) -> Level:
    """Return a plugin's level. Only checks that ran and passed count.

    ``none``: a check failed, or none of the base tier passed. ``partial``: nothing failed, but a check of the base tier
    is exempt or did not run. ``base``: every check of the base tier that applies passed. ``full``: those of the
    capabilities that the plugin declares passed, too, and none of any other tier that ran is exempt.
    """
    applying = [outcome for outcome in outcomes if outcome.status != "not_applicable"]
    base = [outcome.status for outcome in applying if outcome.check.tier == "base"]
    capability = [outcome.status for outcome in applying if outcome.check.tier == "capability"]
    others = [outcome.status for outcome in applying if outcome.check.tier not in ("base", "capability")]
    if "failed" in base + capability + others or "passed" not in base:
        return "none"
    if set(base) != {"passed"}:
        return "partial"
    return "full" if set(capability) <= {"passed"} and "exempt" not in others else "base"


def level_table(certificates: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table plugin × level, of results of :meth:`Certificate.as_dict`."""
    rows = [("PLUGIN", "LEVEL", "ABI", *(tier.upper() for tier in TIERS), "NOT APPLICABLE", "SECONDS")]
    for certificate in certificates:
        cells = [f"{certificate['kind']}:{certificate['plugin']}", certificate["level"], str(certificate["abi"] or "-")]
        applying = [each for each in certificate["checks"] if each["outcome"] != "not_applicable"]
        for tier in TIERS:
            outcomes = [each["outcome"] for each in applying if each["tier"] == tier]
            cells.append(f"{outcomes.count('passed')}/{len(outcomes)}" if outcomes else "-")
        cells.append(str(len(certificate["checks"]) - len(applying)))
        rows.append((*cells, f"{certificate['seconds']:.1f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in ("jackfield", "jackfield-conformance", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


DEFAULT_TIERS: tuple[Tier, ...] = ("base", "capability")

#: Certificates of :func:`certify` in this process, which the pytest plugin shows as a table.
RUNS: list[Certificate] = []


@attrs.define(kw_only=True, eq=False)
class Run:
    """The checks of one plugin, in order, and their outcomes so far."""

    record: PluginRecord
    folder: Path  #: each check gets one of its own below
    tiers: Collection[Tier] = DEFAULT_TIERS  #: those that run
    checks: tuple[Check, ...] = attrs.field(init=False)
    outcomes: dict[str, Outcome] = attrs.field(init=False, factory=dict)  #: by id
    _subject: Subject = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.checks = checks(self.record.kind)
        self._subject = _subject(self.record, self.folder)

    @classmethod
    def of(cls, plugin: str, folder: Path, tiers: Collection[Tier] = DEFAULT_TIERS) -> Run:
        """Create the run of an installed plugin, named ``KIND:NAME`` (``ValueError`` for another form).

        A broken plugin is found, and fails its first check.
        """
        kind, colon, name = plugin.partition(":")
        if not colon or kind not in PREFIXES or not name:
            raise ValueError(f"expected KIND:NAME, KIND one of {', '.join(PREFIXES)}; found {plugin!r}")
        return cls(record=discover().resolve(name, kind), folder=folder, tiers=tiers)

    def execute(self, check: Check) -> Outcome:
        """Run one check if it applies, and keep its outcome."""
        outcome = self._without_running(check)
        if outcome is None:
            place = self.folder / check.id
            place.mkdir(parents=True, exist_ok=True)
            outcome = self._judged(check, run_check(check, self._subject.at(place)))
        self.outcomes[check.id] = outcome
        return outcome

    def certificate(self) -> Certificate:
        """Return the outcomes as a certificate; a check that was not executed has not passed."""
        found = (self.outcomes.get(check.id) or Outcome(check=check, status="not_run") for check in self.checks)
        tiers = tuple(tier for tier in TIERS if tier in self.tiers)
        return Certificate(record=self.record, tiers=tiers, outcomes=tuple(found))

    def _without_running(self, check: Check) -> Outcome | None:
        manifest = self.record.manifest
        abi, declared = (manifest.abi, manifest.capabilities) if manifest else ("0.0", {})
        if check.number < FIRST_BEHAVIOUR:
            return None
        if self._subject.config is None:
            return Outcome(check=check, status="not_run", message="the plugin cannot be loaded: see the checks before")
        if not check.applies(abi, declared):
            newer = check.capability is None or declared.get(check.capability) in ("full", "partial")
            why = f"new in ABI {check.since}" if newer else f"the capability '{check.capability}' is not declared"
            return Outcome(check=check, status="not_applicable", message=why)
        if check.tier not in self.tiers:
            return Outcome(check=check, status="not_run", message=f"tier {check.tier} was not requested")
        return None

    def _judged(self, check: Check, outcome: Outcome) -> Outcome:
        """Apply an exception in the manifest as a strict expected failure."""
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
    """Run the checks on an installed plugin in this process, in a plugin's own tests::

        def test_the_plugin_keeps_its_contract() -> None:
            assert "full" == certify("reward:rules").level

    ``folder``, by default a temporary one, gets the checks' files; ``progress`` is called after each check. If a check
    failed, an ``AssertionError`` has the report.
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


def _subject(record: PluginRecord, folder: Path) -> Subject:
    """Build the subject; without class or config, only the checks of the structure run."""
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
    )
    if manifest is None or record.error is not None:
        return bare
    try:
        bare = attrs.evolve(bare, cls=record.cls, config_class=record.settings_class)
    except JackfieldError:
        return bare
    try:
        fixture = _fixture(manifest, folder / "fixture")
        settings = fixture.get("settings", {})
        config: Any = structure(bare.config_class, settings, "settings")
    except Exception as error:  # a fixture may raise anything
        return attrs.evolve(bare, fixture={"problem": f"{type(error).__name__}: {error}"})
    return attrs.evolve(bare, config=config, settings=settings, fixture=fixture)


def _fixture(manifest: Manifest, folder: Path) -> Mapping[str, Any]:
    """Call the plugin's fixture function, once per run."""
    if manifest.conformance.fixture is None:
        return {}
    module, _, name = manifest.conformance.fixture.partition(":")
    folder.mkdir(parents=True, exist_ok=True)
    fixture = getattr(importlib.import_module(module), name)(folder)
    if not isinstance(fixture, Mapping):
        raise TypeError(f"{manifest.conformance.fixture} returned {type(fixture).__name__}, expected a mapping")
    return fixture
