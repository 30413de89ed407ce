"""The file of ``jackfield rewards serve``, and the section ``reward`` of other files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import yaml
from attrs.validators import ge, gt, le

from jackfield.config.reward_service import RewardServiceConfig
from jackfield.config.sections import PluginSection
from jackfield.errors import ConfigError
from jackfield.settings import option, structure


@attrs.frozen(kw_only=True)
class ServedReward:
    """One reward with the limits that hold for all runs together."""

    reward: PluginSection = option(help="name of the reward plugin, and its settings")
    reward_service: RewardServiceConfig = option(factory=RewardServiceConfig, help="limits, retries and cache")


@attrs.frozen(kw_only=True)
class ServeConfig:
    """Settings of the service."""

    rewards: Mapping[str, ServedReward] = option(help="the rewards by name")
    folder: str = option("rewards", "folder for the address, the token, logs and scores that runs may ask for again")
    host: str = option("127.0.0.1", "address to listen on; beyond this machine, connections are encrypted")
    port: int = option(0, "port; 0: a free one, or on this machine a socket without a port", [ge(0), le(65535)])
    token_env: str | None = option(None, "environment variable with the token; null: FOLDER/token, made at first")
    remember_seconds: float = option(3600.0, "how long a score can be asked for again after a lost connection", gt(0.0))
    orphan_seconds: float = option(60.0, "how long a score goes on after the connection that asked for it", ge(0.0))
    in_flight: int = option(
        1024, "scores of a reward without limits of concurrency that are begun at a time; others wait in turns", gt(0)
    )
    start_seconds: float = option(600.0, "longest time for a reward to start", gt(0.0))
    heartbeat_seconds: float = option(30.0, "silence after which a client takes the service for dead", gt(0.0))
    seed: int = 0


def load(file: Path) -> ServeConfig:
    """Read the file of a service; raise a ``ConfigError``, which names the setting."""
    config = structure(ServeConfig, _sections(read_yaml(file)))
    if not config.rewards:
        raise ConfigError("there is nothing to serve", where="rewards", expected="a reward by its name", found="none")
    if config.host in ("0.0.0.0", "::"):
        fix = "give the address by which the runs reach this machine"
        details: Any = {"where": "host", "expected": "an address of this machine", "found": config.host, "fix": fix}
        raise ConfigError("clients cannot connect to every address", **details)
    for name, each in config.rewards.items():
        if not name or "." in name or name != name.strip():
            details = {"where": "rewards", "expected": "a name without dots", "found": repr(name)}
            raise ConfigError("a reward has a name that cannot be used", **details)
        service, place = each.reward_service, f"rewards.{name}.reward_service"
        wrong = {"keep": service.keep is False, "on_failure": service.on_failure not in ("refill", "retry")}
        for setting in (setting for setting, is_wrong in wrong.items() if is_wrong):
            found, fix = getattr(service, setting), "set it in the configuration of the runs"
            details = {"where": f"{place}.{setting}", "expected": "the default", "found": found, "fix": fix}
            raise ConfigError(f"{setting} has no effect in a service", **details)
    return config


def load_reward(file: Path) -> ServedReward:
    """Return the reward of a run's configuration, or of any file with the section ``reward``."""
    values = read_yaml(file)
    if not isinstance(values, Mapping) or "reward" not in values:
        details: Any = {"where": str(file), "expected": "a section reward", "code": "config.missing-key"}
        raise ConfigError("the file names no reward", **details)
    made = {name: values[name] for name in ("reward", "reward_service") if values.get(name) is not None}
    return structure(ServedReward, {**made, "reward": section(values["reward"])})


def section(values: Any) -> Any:
    """Return a plugin's section, ``{name: rules, method: exact}`` or only a name, with its settings apart."""
    if isinstance(values, str):
        return {"name": values, "settings": {}}
    if not isinstance(values, Mapping) or "name" not in values:
        return values
    settings = dict(values)
    return {"name": settings.pop("name"), "settings": settings}


def read_yaml(file: Path) -> Any:
    """Return the values of a file; ``config.unreadable`` if it cannot be read as YAML."""
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        what, fix = "the configuration file cannot be read as YAML", "check the path and the file"
        raise ConfigError(what, code="config.unreadable", where=str(file), found=error, fix=fix) from error


def _sections(values: Any) -> Any:
    rewards = values.get("rewards") if isinstance(values, Mapping) else None
    if not isinstance(rewards, Mapping):
        return {} if values is None else values
    made = {
        name: {**each, "reward": section(each["reward"])} if isinstance(each, Mapping) and "reward" in each else each
        for name, each in rewards.items()
    }
    return {**values, "rewards": made}
