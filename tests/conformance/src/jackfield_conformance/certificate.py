"""What a run of the checks says about a plugin, for programs (JSON) and for people."""

from __future__ import annotations

import datetime
import platform
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import attrs

from jackfield.plugins import PluginRecord
from jackfield.plugins.certificates import FORMAT, plugin_digest
from jackfield_conformance.registry import TIERS, Check, Outcome, Tier

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
        return {"format": FORMAT, **attrs.asdict(self, value_serializer=_plain), "seconds": self.seconds}

    def report(self) -> str:
        """The report for people: each broken invariant in a sentence, with the page of the contract."""
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
    """The certificate of a run, dated now.

    Args:
        record: of the plugin.
        checks: all of its kind.
        outcomes: one per check, in the same order.
        tiers: that were asked for.
    """
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
    """Return what a plugin may call itself. Only a check that ran and passed counts.

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
    """The lines of a table plugin × level. Takes what :meth:`Certificate.as_dict` gives."""
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


def _plain(_: object, __: object, value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
