"""One small Ray cluster for all tests of the package."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[None]:
    """Its token and its files are in no home folder; it ends with the tests."""
    folder = tempfile.mkdtemp(prefix="jackfield")  # the path of a socket is short
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_A")]:
            patch.delenv(name)
        patch.setenv("HOME", folder)
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("OMP_NUM_THREADS", "1")
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=100 * 10**6,
            _node_ip_address="127.0.0.2",
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
