"""Push rewards into the folder of a ``lagged`` reward, or over HTTP to a run that has it."""

from __future__ import annotations

import ipaddress
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from jackfield.errors import RewardError
from jackfield_reward_service.store import Pending, Pushed, Reward, Store

__all__ = ["Pending", "Pushed", "Reward", "pending", "push", "push_all"]

_SECONDS = 60.0  #: for an answer


def push(
    where: str | Path,
    key: str,
    score: float,
    *,
    explanation: str | None = None,
    dimensions: Mapping[str, float] | None = None,
    token: str | None = None,
) -> Pushed:
    """Give a sample its reward; see :func:`push_all`."""
    values = {"key": key, "score": score, "explanation": explanation, "dimensions": dimensions}
    return push_all(where, [Reward.of(values, "the reward")], token=token)


def push_all(where: str | Path, rewards: Sequence[Reward], *, token: str | None = None) -> Pushed:
    """Give samples their rewards, all of them or, if one is refused, none. The same reward may come again.

    ``where`` is the folder of the rewards, whether a run is at work or not, or the URL of a run, with its token. A key
    that no sample waits for is ``reward.unknown-sample``; another reward than the first is ``reward.conflict``.
    """
    if _is_url(where):
        return Pushed(**_requested(f"{where}/rewards", token, [attrs.asdict(reward) for reward in rewards]))
    with _store(where) as store:
        return store.add(rewards)


def pending(where: str | Path, *, limit: int = 1000, token: str | None = None) -> list[Pending]:
    """Return samples that wait for their rewards, the oldest first."""
    if _is_url(where):
        found = _requested(f"{where}/pending?limit={limit}", token)
        return [Pending(**values) for values in found["pending"]]
    with _store(where) as store:
        return store.pending(limit)


def _is_url(where: str | Path) -> bool:
    return str(where).startswith(("http://", "https://"))


@contextmanager
def _store(folder: str | Path) -> Iterator[Store]:
    store = Store(Path(folder).expanduser())
    try:
        store.open(create=False)
        yield store
    finally:
        store.close()


def _requested(url: str, token: str | None, body: Any = None) -> dict[str, Any]:
    """Send a request and return the answer; raise the error that the server returned, or ``reward.http``."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    data = None if body is None else json.dumps(body).encode()
    host = urllib.parse.urlsplit(url).hostname or ""
    proxies = [urllib.request.ProxyHandler({})] if _is_loopback(host) else []
    request = urllib.request.Request(url, data, {**headers, "Content-Type": "application/json"})
    failed: Any = {"where": url.partition("?")[0], "expected": "the URL of a run with the reward lagged and its port"}
    try:
        try:
            with urllib.request.build_opener(*proxies).open(request, timeout=_SECONDS) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            with error:
                fields = json.load(error)["error"]
            details = {name: fields.get(name) for name in ("code", "where", "expected", "found", "fix")}
            raise RewardError(fields["message"], **details) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RewardError("the rewards did not arrive", code="reward.http", found=error, **failed) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
