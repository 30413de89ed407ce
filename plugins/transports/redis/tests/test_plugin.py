"""The installed plugin is found and fits its contract."""

from __future__ import annotations

from jackfield.plugins import discover


def test_the_plugin_is_found_and_passes_its_gates() -> None:
    loaded = discover().load("transfer_queue", "redis")
    assert "jackfield_transport_redis.backend.RedisBackend" == f"{loaded.cls.__module__}.{loaded.cls.__name__}"
    assert loaded.config_class() == loaded.config_class()
