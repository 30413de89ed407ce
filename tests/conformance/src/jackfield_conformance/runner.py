"""A run of the checks on one installed plugin: applicable checks, outcomes and the certificate."""

from __future__ import annotations

import datetime
import importlib
import platform
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import attrs

from jackfield.errors import JackfieldError
from jackfield.plugins import Manifest, PluginRecord, Registry, discover
from jackfield.settings import structure
from jackfield_conformance.certificates import FORMAT, plugin_digest
from jackfield_conformance.registry import FIRST_BEHAVIOUR, PREFIXES, TIERS, Check, Outcome, Tier, checks, run_check
from jackfield_conformance.subject import Subject

#: See :func:`level_of`.
Level = Literal["none", "partial", "base", "full"]

_VERSIONS = ("jackfield", "jackfield-conformance", "torch")


@attrs.frozen(kw_only=True)
class CheckResult:
    """A check and its outcome, as a certificate holds them."""

    id: str
    tier: Tier
    invariant: str
    page: str
    outcome: str  #: a :data:`~jackfield_conformance.registry.Status`
    message: str
    seconds: float


@attrs.frozen(kw_only=True)
class Certificate:
    """The result of one run; :meth:`as_dict` is the JSON file."""

    plugin: str
    kind: str
    distribution: str
    abi: str | None
    level: Level
    date: str  #: ISO 8601, UTC
    versions: Mapping[str, str | None]  #: of the plugin, jackfield, jackfield-conformance, python and torch
    platform: str
    digest: str | None  #: of the files of the plugin's package
    tiers: tuple[Tier, ...]  #: that were asked for
    checks: tuple[CheckResult, ...]
    counts: Mapping[str, int] = attrs.field(init=False)  #: outcome to number of checks

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "counts", dict(Counter(result.outcome for result in self.checks)))

    @property
    def seconds(self) -> float:
        """Return the seconds of all checks together."""
        return round(sum(result.seconds for result in self.checks), 3)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {"format": FORMAT, **attrs.asdict(self), "seconds": self.seconds}

    def report(self) -> str:
        """Return the readable report: each broken invariant in a sentence, with the contract's page."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.kind} '{self.plugin}' ({self.distribution} {self.versions['plugin']}), ABI {self.abi or '-'}"
        for result in self.checks:
            warned = result.outcome == "passed" and result.message
            if warned or result.outcome in ("failed", "exempt", "skipped"):
                yield f"  {'WARNING' if warned else result.outcome.upper()} {result.id}: {result.invariant}."
                yield textwrap.indent(result.message or "no reason given", "      ")
                yield f"      see {result.page}"
        counts = ", ".join(f"{number} {outcome.replace('_', ' ')}" for outcome, number in self.counts.items())
        yield f"level: {self.level} ({counts}; {self.seconds:.1f} s)"


def make_certificate(
    record: PluginRecord, checks: Sequence[Check], outcomes: Sequence[Outcome], tiers: Collection[Tier]
) -> Certificate:
    """Make the certificate of a run of these tiers, dated now; ``outcomes`` are in the order of ``checks``."""
    results = tuple(
        CheckResult(
            id=check.id,
            tier=check.tier,
            invariant=check.invariant,
            page=check.page,
            outcome=outcome.status,
            message=outcome.message,
            seconds=outcome.seconds,
        )
        for check, outcome in zip(checks, outcomes, strict=True)
    )
    return Certificate(
        plugin=record.name,
        kind=record.kind,
        distribution=record.distribution,
        abi=record.abi,
        level=level_of(results),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={"plugin": record.version, "python": platform.python_version(), **_versions()},
        platform=platform.platform(),
        digest=None if record.manifest is None else plugin_digest(record.manifest),
        tiers=tuple(tier for tier in TIERS if tier in tiers),
        checks=results,
    )


def level_of(results: Iterable[CheckResult]) -> Level:
    """Return a plugin's level. Only checks that ran and passed count.

    ``none``: a check failed, or none of the base tier passed. ``partial``: nothing failed, but a check of the base tier
    is excepted or did not run. ``base``: every check of the base tier that applies passed. ``full``: those of the
    capabilities that the plugin declares, too, and none of any other tier that ran is excepted.
    """
    applying = [result for result in results if result.outcome != "not_applicable"]
    base = [result.outcome for result in applying if result.tier == "base"]
    capability = [result.outcome for result in applying if result.tier == "capability"]
    others = [result.outcome for result in applying if result.tier not in ("base", "capability")]
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
    for name in _VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


DEFAULT_TIERS: tuple[Tier, ...] = ("base", "capability")

#: Certificates made by :func:`certify` in this process: the pytest plugin shows them as a table.
RUNS: list[Certificate] = []


def split(plugin: str) -> tuple[str, str]:
    """Split ``"reward:rules"`` into kind and name; ``ValueError`` for another form."""
    kind, colon, name = plugin.partition(":")
    if not colon or kind not in PREFIXES or not name:
        raise ValueError(f"expected KIND:NAME, KIND one of {', '.join(PREFIXES)}; found {plugin!r}")
    return kind, name


@attrs.define(kw_only=True, eq=False)
class Run:
    """The checks of one plugin, in order, and their outcomes so far."""

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
        """Create the run of an installed plugin, named ``KIND:NAME``.

        Raises:
            ValueError: If the name has another form.
            PluginNotFound: If there is none. A broken plugin is found, and fails its first check.
        """
        kind, name = split(plugin)
        registry = discover()
        return cls(record=registry.resolve(name, kind), registry=registry, folder=folder, tiers=tiers)

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
    """Call the plugin's fixture function, once per run."""
    if manifest.conformance.fixture is None:
        return {}
    module, _, name = manifest.conformance.fixture.partition(":")
    folder.mkdir(parents=True, exist_ok=True)
    fixture = getattr(importlib.import_module(module), name)(folder)
    if not isinstance(fixture, Mapping):
        raise TypeError(f"{manifest.conformance.fixture} returned {type(fixture).__name__}, expected a mapping")
    return fixture
