"""Servers that die, hang, forget, evict or refuse: every wait ends, and the error says what to change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from jackfield.errors import QueueError
from jackfield_servers import PASSWORD, QUOTED_PASSWORD, RedisServer
from jackfield_stores import Opened, check_a_hanging_server_is_named, check_kill_9_of_the_server, put, values
from jackfield_testing import in_loop, refused

pytestmark = pytest.mark.needs("redis")


@pytest.fixture(scope="module")
def own_server() -> Iterator[RedisServer]:
    """A server that these tests may kill: what it confirms is on disk."""
    with contextlib.closing(RedisServer(appendfsync="always")) as server:
        server.start()
        yield server


@in_loop
async def test_what_was_put_survives_kill_9_of_the_server(own_server: RedisServer, opened: Opened) -> None:
    await check_kill_9_of_the_server(opened, own_server, rows=25, before=30, durability="always")


@in_loop
async def test_a_server_that_hangs_or_is_gone_is_named_within_the_deadline(
    own_server: RedisServer, opened: Opened
) -> None:
    await check_a_hanging_server_is_named(opened, own_server, seconds=0.4)


async def refusal(opened: Any, **settings: Any) -> str:
    """What the start says, which shows no password."""
    with pytest.raises(QueueError) as caught:
        async with opened(**settings):
            pass
    assert "queue.store" == caught.value.code
    assert not [secret for secret in ("secret-guess", PASSWORD, QUOTED_PASSWORD) if secret in str(caught.value)]
    return str(caught.value)


@in_loop
async def test_logins_that_are_refused(redis_server: RedisServer, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The password may come from the environment."""
    assert "login" in await refusal(opened, url=redis_server.url.replace(QUOTED_PASSWORD, "secret-guess"))
    bare = redis_server.url.replace(f":{QUOTED_PASSWORD}@", "")
    assert "login" in await refusal(opened, url=bare)
    monkeypatch.setenv("MY_PASSWORD", PASSWORD)
    async with opened(url=bare, password_variable="MY_PASSWORD") as backend:
        await put(backend, "a")


@in_loop
async def test_a_server_beyond_this_host_needs_a_password(opened: Any) -> None:
    assert "JACKFIELD_REDIS_PASSWORD" in await refusal(opened, url="redis://192.0.2.1:6379/0")
    assert "JACKFIELD_REDIS_PASSWORD" in await refusal(opened, url="redis://db.example:6379/0")


@in_loop
async def test_nobody_at_the_address_is_told_at_once(own_server: RedisServer, opened: Any) -> None:
    own_server.kill()
    try:
        with refused("queue.unreachable", f"127.0.0.1:{own_server.port}") as caught:
            async with opened(url=own_server.url, seconds=50.0):
                pass
        assert "queue.unreachable" == caught.value.code
    finally:
        own_server.start()


@in_loop
async def test_a_server_that_would_lose_rows_is_refused(redis_server: RedisServer, opened: Any) -> None:
    """One that keeps less of a log than was asked for, and one that evicts when memory is short."""
    url = redis_server.url
    assert "promises less than durability: always" in await refusal(opened, url=url, durability="always")
    with redis.Redis.from_url(url) as client:
        client.config_set("maxmemory", "1gb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        assert "evicts" in await refusal(opened, url=url)
        client.config_set("maxmemory-policy", "noeviction")
        async with opened(url=url):
            pass
        client.config_set("maxmemory", "0")
        client.config_set("appendonly", "no")
        try:
            assert "--appendonly yes" in await refusal(opened, url=url)
            async with opened(url=url, durability="none") as backend:
                await put(backend, "a")
        finally:
            client.config_set("appendonly", "yes")


@in_loop
async def test_a_full_server_refuses_puts_and_keeps_what_it_has(opened: Any) -> None:
    with contextlib.closing(RedisServer(maxmemory="4mb", maxmemory_policy="noeviction")) as server:
        server.start()
        async with opened(url=server.url) as backend:
            await put(backend, "a")

            async def fill() -> None:
                for number in range(9):
                    await put(backend, f"large-{number}", size=1 << 18)

            with pytest.raises(QueueError) as caught:
                await fill()
            assert "queue.full" == caught.value.code
            assert [1.0] == await values(backend, ["a"])


@in_loop
async def test_rows_of_another_format_are_refused(redis_server: RedisServer, opened: Any) -> None:
    async with opened(url=redis_server.url, queue="old"):
        pass
    with redis.Redis.from_url(redis_server.url) as client:
        client.set("jackfield:old:format", "99")
    assert "another format" in await refusal(opened, url=redis_server.url, queue="old")
