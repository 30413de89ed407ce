"""The plugin keeps its contract: the certificate run of ``jackfield plugins check veomni``, in its interpreter."""

from __future__ import annotations

import subprocess

import pytest

from jackfield_testing import veomni_python

SCRIPT = "from jackfield_conformance import certify; print('level', certify('engine:veomni').level)"


@pytest.mark.needs("veomni")
@pytest.mark.multiprocess
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_plugin_is_certified(variables: dict[str, str]) -> None:
    """Every check of the base tier, and of what the manifest declares, passes: one rank and two."""
    command = [str(veomni_python()), "-c", SCRIPT]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=580, check=False)
    assert 0 == done.returncode, (done.stdout + done.stderr)[-4000:]
    assert "level full" == done.stdout.splitlines()[-1]
