"""``jackfield plugins check``: run the checks where a plugin runs, and keep the certificate."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import click

from jackfield.cli.commands import deadline_option, json_option, kind_option, report, show
from jackfield.errors import JackfieldError, PluginError
from jackfield.files import replace_file
from jackfield.plugins import PluginRecord, discover
from jackfield.plugins.interpreters import resolve_interpreter, run_bounded
from jackfield_conformance.certificates import certificate_folder, read_certificate
from jackfield_conformance.registry import TIERS


@click.command()
@click.argument("name")
@kind_option
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    type=click.Choice(TIERS),
    help="Run this tier of checks, too, beside base and capability; repeatable.",
)
@click.option(
    "--certificate",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the JSON certificate here, too.",
)
@deadline_option(1800.0, "Seconds for all checks together; each has a deadline of its own.")
@json_option
@click.pass_context
def check(
    ctx: click.Context,
    name: str,
    kind: str | None,
    tiers: tuple[str, ...],
    certificate: Path | None,
    deadline: float,
    as_json: bool,
) -> None:
    """Check that the plugin NAME keeps its contract (needs jackfield-conformance).

    Exit code: 0 certified, 1 not certified, 2 could not run.
    """
    try:
        found, kept = run_checks(name, kind, tiers=tiers, deadline=deadline, quiet=as_json)
        if certificate is not None:
            certificate.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    except (JackfieldError, OSError) as error:
        report(ctx, error, exit_code=2)
    show(found if as_json else {"certificate": str(certificate or kept)})
    ctx.exit(1 if found["level"] == "none" else 0)


def run_checks(
    name: str, kind: str | None = None, *, tiers: Collection[str] = (), deadline: float = 1800.0, quiet: bool = False
) -> tuple[dict[str, Any], Path | None]:
    """Run the conformance checks on an installed plugin, and keep the certificate; ``plugin.check`` if that fails.

    They run in the plugin's own interpreter, and print to this process's stdout, or with ``quiet`` to its stderr.
    ``tiers`` run beside the default ones; ``deadline`` is in seconds, for all checks together. Return the certificate,
    also of a plugin that failed, and the file where it is kept; None if it cannot be written.
    """
    record = discover().resolve(name, kind)
    python = resolve_interpreter(record.manifest.env.python if record.manifest else None)
    with tempfile.TemporaryDirectory(prefix="jackfield-certificate-") as folder:
        file = Path(folder, "certificate.json")
        command = [python, "-P", "-m", "jackfield_conformance", "--plugin", f"{record.kind}:{record.name}"]
        command += ["--certificate", str(file), *(f"--tier={tier}" for tier in tiers)]
        code = _run(command, deadline, record, quiet)
        found = read_certificate(file)
    if found is None:
        raise PluginError(
            "the conformance checks could not be run",
            code="plugin.check",
            where=record.label,
            expected="jackfield-conformance in the interpreter of the plugin",
            found=f"exit code {code} of {python} -m jackfield_conformance, and no certificate; see its output above",
            fix=f"{python} -m pip install jackfield-conformance",
        )
    try:
        return found, keep(found)
    except OSError:
        return found, None


def keep(certificate: Mapping[str, Any]) -> Path:
    """Write a certificate where ``find_certification`` looks; replace an older one of the plugin."""
    file = certificate_folder() / f"{certificate['kind']}-{certificate['plugin']}.json"
    replace_file(file, json.dumps(certificate, indent=2) + "\n")
    return file


def _run(command: list[str], deadline: float, record: PluginRecord, quiet: bool) -> int:
    """Run a command to its end; at the deadline or an interrupt, it and its descendants are killed."""
    sys.stdout.flush()
    code = run_bounded(command, deadline, stdout=2 if quiet else None)
    if code is not None:
        return code
    raise PluginError(
        "the conformance checks did not end in time",
        code="plugin.check",
        where=record.label,
        expected=f"an end within {deadline:g} s",
        fix="look at the last check that is named above, or raise --deadline",
    )
