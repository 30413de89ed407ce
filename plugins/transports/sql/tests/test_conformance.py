"""The plugin keeps its contract on both databases: the certificate run of ``jackfield plugins check sql``."""

from __future__ import annotations

import pytest

from jackfield_conformance import certify
from jackfield_servers import PostgresServer
from jackfield_transport_sql.config import URL_VARIABLE


@pytest.mark.timeout(180)
def test_the_plugin_is_certified_with_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check of the base tier, and of what the manifest declares, passes."""
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    assert "full" == certify("transfer_queue:sql").level


@pytest.mark.timeout(180)
@pytest.mark.needs("postgres")
def test_the_plugin_is_certified_with_postgresql(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL_VARIABLE, postgres_server.url)
    assert "full" == certify("transfer_queue:sql").level
