"""The plugin keeps its contract on a real server: the certificate run of ``jackfield plugins check redis``."""

from __future__ import annotations

import pytest

from jackfield_conformance import certify
from jackfield_queue_machine import check_queue_against_model
from jackfield_queue_model import check_against_model
from jackfield_servers import RedisServer
from jackfield_testing import refused
from jackfield_transport_redis.backend import RedisBackend
from jackfield_transport_redis.config import URL_VARIABLE, Config, server


@pytest.mark.timeout(180)
@pytest.mark.needs("redis")
def test_the_plugin_is_certified(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check of the base tier, and of what the manifest declares, passes."""
    monkeypatch.setenv(URL_VARIABLE, redis_server.url)
    assert "full" == certify("transfer_queue:redis").level


@pytest.mark.needs("redis")
def test_redis_is_a_dict(redis_server: RedisServer) -> None:
    check_against_model(lambda context: RedisBackend(Config(url=redis_server.url), context))


@pytest.mark.needs("redis")
def test_a_queue_with_redis_does_what_its_model_does(redis_server: RedisServer) -> None:
    check_queue_against_model(lambda context: RedisBackend(Config(url=redis_server.url), context))


def test_without_a_server_the_checks_say_how_to_get_one(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    with refused("plugin.check", URL_VARIABLE):
        server(tmp_path)
