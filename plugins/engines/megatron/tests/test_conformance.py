"""The plugin keeps its contract: the certificate run of ``jackfield plugins check megatron``."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: the hook of torch.distributed repeats itself for each group that was made, in what it writes of an exception
_RUN = """
import gc
import sys
import jackfield_engine_megatron.engine
from jackfield_conformance import certify
gc.freeze()  # each engine collects garbage when it is closed, of what it made
try:
    print(certify("engine:megatron").level)
except AssertionError as failed:
    sys.exit(str(failed)[-6000:])
"""


@pytest.mark.multiprocess
@pytest.mark.timeout(400)
def test_the_plugin_is_certified(redirected: dict[str, str]) -> None:
    """Every check of the base tier, and of what the manifest declares, passes on one rank and on two."""
    command = [sys.executable, "-W", "error::UserWarning", "-c", _RUN]
    done = subprocess.run(command, env=redirected, capture_output=True, text=True, timeout=380, check=False)
    assert 0 == done.returncode, (done.stdout + done.stderr)[-6000:]
    assert "full" == done.stdout.split()[-1]
