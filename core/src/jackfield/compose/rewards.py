"""Makes rewards with the service around them, for runs and for `jackfield rewards`."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import xxhash

from jackfield.abc.operator import Score
from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest
from jackfield.config import RunConfig
from jackfield.config.reward_service import RewardServiceConfig
from jackfield.errors import ConfigError, RewardError
from jackfield.plugins import Registry
from jackfield.runtime.reward_limits import Limits, RewardCache
from jackfield.runtime.reward_service import RewardService
from jackfield.settings import structure

_PARTS = "reward_service"  #: settings of a reward that another one makes, for a service of its own


def make_reward(
    registry: Registry, name: str, settings: Mapping[str, Any], service: RewardServiceConfig, context: RewardContext
) -> RewardService:
    """Make a reward and its service, which are not started.

    The context gets turns, counters and the cache's folder of the service, an HTTP client, and the rewards of this
    process, which a reward makes with their settings and, under ``reward_service``, limits of their own.
    """
    limits, http = Limits(service, context.clock), http_client()

    def agent(name: str, settings: Mapping[str, Any]) -> RewardAgent:
        if (own := settings.get(_PARTS)) is None:
            return load(name, settings)
        rest = {key: value for key, value in settings.items() if key != _PARTS}
        return make_reward(registry, name, rest, structure(RewardServiceConfig, own, f"{name}.{_PARTS}"), context)

    def load(name: str, settings: Mapping[str, Any]) -> RewardAgent:
        made: RewardAgent = registry.load("reward", name).build(settings, inner, "reward")
        return made

    folder = None if service.cache is None else Path(service.cache)
    shared: Any = {"turn": limits.turn, "count": limits.count, "cache": folder, "agent": agent}
    inner = attrs.evolve(context, **shared, **({"http": http} if http is not None else {}))
    made, cache = load(name, settings), None if folder is None else RewardCache(folder)
    options: Any = {"limits": limits, "cache": cache, "seed": context.seed, "http": http}
    return RewardService(made, service, context.clock, identity=[name, dict(settings)], **options)


def scorer(reward: RewardService, seconds: float) -> Score:
    """Return what scores responses for operators, by a run's reward; ``seconds`` is the deadline of a score.

    A response without a score raises ``reward.failed``.
    """

    async def score(values: Mapping[str, Any], response: str) -> float:
        messages = tuple(values.get("messages") or ())
        shared: Any = {"prompt_str": str(values.get("prompt", "")), "messages": messages, "deadline_seconds": seconds}
        told: Any = {name: str(values.get(name, "")) for name in ("data_source", "ground_truth")}
        asked = ScoreRequest(solution_str=response, extra_info=dict(values), **told, **shared)
        scored = (await reward.score_group([asked]))[0]
        if scored.status != "ok":
            raise RewardError(f"a response has no score: {scored.error}", where="operator", found=scored.status)
        return sum(scored.token_scores) if scored.token_scores else float(scored.score or 0.0)

    return score


def check_parts(settings: Any, registry: Registry, where: str = "reward.parts") -> None:
    """Check the names and settings of the rewards that a reward makes: those under its setting ``parts``."""
    parts = getattr(settings, "parts", None)
    for name, part in parts.items() if isinstance(parts, Mapping) else ():
        place, record = f"{where}.{name}", registry.resolve(part["name"], "reward")
        own = {key: value for key, value in part.items() if key not in ("name", _PARTS)}
        check_parts(structure(record.settings_class, own, place), registry, f"{place}.parts")
        structure(RewardServiceConfig, part.get(_PARTS, {}), f"{place}.{_PARTS}")


def http_client() -> Any:
    """Return an HTTP client of the library that rewards with requests depend on; None where it is not installed."""
    installed = find_spec("jackfield_reward_requests") is not None
    return import_module("jackfield_reward_requests").AiohttpClient() if installed else None


def share_of(service: RewardServiceConfig, workers: int) -> RewardServiceConfig:
    """Return the settings of one of a run's reward workers, whose limits together are those of the run."""
    if workers == 1:
        return service
    numbers = {name: getattr(service, name) for name in ("requests_per_second", "tokens_per_minute")}
    shares: Any = {name: None if number is None else number / workers for name, number in numbers.items()}
    if (most := service.concurrency) is not None:
        if most < workers:
            what, fix = "each reward worker needs a turn", "lower cluster.ray.reward_workers"
            details: Any = {"where": "reward_service.concurrency", "expected": f"{workers} or more", "found": most}
            raise ConfigError(what, fix=fix, **details)
        shares["concurrency"] = most // workers
    return attrs.evolve(service, **shares)


def run_id(config: RunConfig) -> str:
    """Return the name of a run that no other run has."""
    place = f"{socket.gethostname()}:{Path(config.folder).absolute()}"
    return f"{config.name}-{xxhash.xxh3_64_hexdigest(place.encode())}"
