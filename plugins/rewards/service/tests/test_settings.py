"""Settings that make no sense together are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.errors import ConfigError
from jackfield.plugins import discover, load_plugin
from jackfield.settings import structure


@pytest.mark.parametrize(
    ("name", "settings", "where"),
    [
        ("service", {"address": "folder/address.json", "token_env": "TOKEN"}, "reward.token_env"),
        ("service", {"address": "127.0.0.1:4711"}, "reward.token_env"),
        ("service", {"address": "192.0.2.1:4711", "token_env": "TOKEN"}, "reward.address"),
        ("service", {"address": "example.org:4711", "token_env": "TOKEN"}, "reward.address"),
        ("lagged", {"token_env": "TOKEN"}, "reward.token_env"),
        ("lagged", {"host": "0.0.0.0"}, "reward.host"),
    ],
)
def test_a_setting_without_effect_is_refused(name: str, settings: dict[str, Any], where: str) -> None:
    options = {"served": "rules", **settings} if name == "service" else settings
    with pytest.raises(ConfigError) as refused:
        structure(load_plugin("reward", name).settings_class, options, "reward")
    assert (refused.value.code, refused.value.where) == ("config.invalid-value", where)


def test_the_plugins_are_found() -> None:
    for name, cls in (("lagged", "LaggedReward"), ("service", "ServiceReward")):
        assert discover().load("reward", name).cls.__name__ == cls
