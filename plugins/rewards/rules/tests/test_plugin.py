"""The installed plugin is found and fits its contract."""

from __future__ import annotations

from jackfield.plugins import discover


def test_the_plugin_is_found_and_passes_its_gates() -> None:
    loaded = discover().load("reward", "rules")
    assert "jackfield_reward_rules.reward.RulesReward" == f"{loaded.cls.__module__}.{loaded.cls.__name__}"
    assert loaded.settings_class() == loaded.settings_class()
