"""Which check of packages of hooks kills which mutant, and Jackfield's own parts under the same checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mutants import harness
from mutants.hooks import MUTANTS, REFERENCE

from jackfield.algorithms import names, part
from jackfield_conformance.registry import run_check

(
    test_the_reference_passes,
    test_each_mutant_fails_its_checks,
    test_no_other_check_fails,
    test_every_check_is_killed_by_a_mutant,
) = harness.make_tests("hooks", REFERENCE, MUTANTS)


class Own:
    """Registers every loss and estimator of Jackfield, as a package would."""

    abi_version = "1.0"

    class hooks:
        @staticmethod
        def register_parts(register: Callable[..., Any]) -> None:
            for kind in ("loss", "preparation", "advantages"):
                for name in names(kind):
                    one = part(kind, name)
                    fields = ("scope", "listed", "whole_batch", "per_sequence", "batch_options")
                    register(kind, name, one.function, **{field: getattr(one, field) for field in fields})


@pytest.mark.parametrize("check", harness.behaviour_checks("hooks"), ids=lambda check: check.id)
def test_our_own_parts_pass(check: Any, tmp_path: Path) -> None:
    own = harness.Reference(cls=Own, config_class=REFERENCE.config_class)
    outcome = run_check(check, harness.subject_of("hooks", own, tmp_path))
    assert "passed" == outcome.status, outcome.message
