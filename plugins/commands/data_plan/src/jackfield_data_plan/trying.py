"""Starts the process of a dry run, waits for it, and ends it at its deadline."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from jackfield.clock import too_late
from jackfield.errors import OperatorError, rebuilt_error
from jackfield_data_plan.parts import plain
from jackfield_data_plan.sources import Source, stem_of
from jackfield_data_plan.trial import TrialRequest

#: Endings of environment variables that operators of a dry run do not get.
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIALS")


@attrs.frozen(kw_only=True)
class DryRun:
    """Dry runs on the first rows of some data."""

    source: Source
    ask: Mapping[str, Any] | None = None  #: models that operators may ask; None: none
    secrets: Collection[str] = ()  #: names of variables that are given although they look like secrets
    withheld: Collection[str] = ()  #: names of variables that are not given
    seconds: float = 120.0  #: deadline of a dry run
    trusted: bool = False  #: whether no model wrote the settings

    def __call__(self, tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Try operators whose settings are checked; return ``problems``, ``notes`` and ``stages``.

        Raise ``deadline`` if it takes too long, and ``operator.failed`` if its process dies.
        """
        with tempfile.TemporaryDirectory(prefix="jackfield-plan-") as folder:
            file = Path(folder, "rows.jsonl")
            file.write_bytes(self.source.lines)
            request = TrialRequest(
                tasks=tasks,
                file=str(file),
                folder=str(Path(folder, "stages")),
                stem=stem_of(self.source.config),
                columns=self.source.columns,
                names=self.source.names,
                trusted=self.trusted,
                seed=self.source.config.seed,
                ask=self.ask,
            )
            return self._answer(json.dumps(attrs.asdict(request)))

    def _answer(self, request: str) -> dict[str, Any]:
        command = [sys.executable, "-P", "-m", "jackfield_data_plan.trial"]  # -P: nothing is imported from this folder
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        program = subprocess.Popen(command, **pipes, text=True, env=self._environment(), start_new_session=True)
        try:
            told, errors = program.communicate(request, timeout=self.seconds)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # the operators' processes end with it
            program.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise too_late(self.seconds, "the dry run of the operators") from error
            raise
        try:
            answer: dict[str, Any] = json.loads(told)
        except ValueError as error:
            found = plain(errors[-600:], 600) or f"exit code {program.returncode}"
            raise OperatorError("the process of the dry run died", where="the dry run", found=found) from error
        if "error" in answer:
            raise rebuilt_error(answer["error"], "the dry run")
        return answer

    def _environment(self) -> dict[str, str]:
        def given(name: str) -> bool:
            looks_secret = name.upper().endswith(_SECRET) and name not in self.secrets
            return not looks_secret and name not in self.withheld

        return {name: value for name, value in os.environ.items() if given(name)}
