"""Both databases against a plain dict, over random histories."""

from __future__ import annotations

import pytest

from jackfield_queue_machine import check_queue_against_model
from jackfield_queue_model import check_against_model
from jackfield_servers import PostgresServer
from jackfield_transport_sql.backend import SQLBackend
from jackfield_transport_sql.config import Config


def test_sqlite_is_a_dict() -> None:
    check_against_model(lambda context: SQLBackend(Config(), context))


@pytest.mark.needs("postgres")
def test_postgresql_is_a_dict(postgres_server: PostgresServer) -> None:
    check_against_model(lambda context: SQLBackend(Config(url=postgres_server.url), context))


def test_a_queue_with_sqlite_does_what_its_model_does() -> None:
    check_queue_against_model(lambda context: SQLBackend(Config(), context))


@pytest.mark.needs("postgres")
def test_a_queue_with_postgresql_does_what_its_model_does(postgres_server: PostgresServer) -> None:
    check_queue_against_model(lambda context: SQLBackend(Config(url=postgres_server.url), context))
