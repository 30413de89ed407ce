"""The registry finds, imports and builds plugins and reports errors."""

from __future__ import annotations

import sys

import pytest

from jackfield.abc.reward import RewardContext
from jackfield.errors import (
    ConfigError,
    JackfieldError,
    PluginError,
    PluginNotFound,
)
from jackfield.plugins import discover, installed, load_plugin
from jackfield.plugins.registry import GROUPS


def test_a_plugin_is_built_from_plain_settings(site):
    site.install("good")
    context = RewardContext()
    agent = discover().load("reward", "good").build({"scale": 2}, context, where="reward.config")
    assert (2.0, context) == (agent.config.scale, agent.context)


def test_wrong_settings_are_refused_with_their_path(site):
    site.install("good")
    with pytest.raises(ConfigError) as caught:
        discover().load("reward", "good").build({"scael": 2}, RewardContext(), where="reward.config")
    assert ("config.unknown-key", "reward.config.scael") == (caught.value.code, caught.value.where)


def test_the_config_class_is_had_without_importing_the_object(site):
    package = site.install("good", modules={"plugin.py": "raise RuntimeError('imported')"})
    assert "Config" == discover().resolve("good").settings_class.__name__
    assert f"{package}.plugin" not in sys.modules


def test_a_name_that_is_not_installed_lists_what_is_and_suggests(site):
    site.install("good")
    site.install("rotten", abi="9.0")
    with pytest.raises(PluginNotFound) as caught:
        discover([str(site.folder)]).resolve("godd", "reward").usable()
    text = str(caught.value)
    assert "did you mean 'good'?" in text
    assert "installed: good; broken: rotten ([plugin.abi] the plugin was built for another version" in text
    assert "jackfield-reward-godd" in text


def test_a_name_of_another_kind_is_pointed_out(site):
    site.install("good")
    with pytest.raises(PluginNotFound) as caught:
        discover().resolve("good", "agent").usable()
    assert "there is a reward of this name" in caught.value.message


def test_an_unknown_kind_is_refused_with_all():
    with pytest.raises(PluginNotFound) as caught:
        discover([]).resolve("fsdp", "engin").usable()
    assert "one of " + ", ".join(GROUPS) == caught.value.expected


def test_a_broken_plugin_raises_its_own_error_when_it_is_asked_for(site):
    site.install("rotten", abi="9.0")
    registry = discover()
    for _ in range(2):
        with pytest.raises(PluginError) as caught:
            registry.resolve("rotten", "reward").usable()
        assert "plugin.abi" == caught.value.code


def test_a_duplicate_cannot_be_loaded(site):
    site.install("twin", package="fake_one")
    site.install("twin", package="fake_two")
    with pytest.raises(PluginError) as caught:
        discover().load("reward", "twin")
    assert ("plugin.duplicate", "dist-fake-one 0.1.0, dist-fake-two 0.1.0") == (caught.value.code, caught.value.found)


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("x = (", "SyntaxError"),
    ],
)
def test_an_import_that_fails_is_wrapped_and_chained(site, statement: str, found: str):
    site.install("bad", modules={"plugin.py": statement})
    with pytest.raises(PluginError) as caught:
        discover().load("reward", "bad")
    assert "plugin.import" == caught.value.code
    assert found in str(caught.value.found)
    assert found.partition(":")[0] == type(caught.value.__cause__).__name__
    assert "dist-fake-bad 0.1.0" in str(caught.value)


def test_a_missing_requirement_is_named_with_what_to_install(site):
    site.install(
        "bad",
        modules={"plugin.py": "import quite_absent.inner"},
        extra='[env]\nrequires = ["other", "quite-absent>=2"]',
    )
    with pytest.raises(PluginError) as caught:
        discover().load("reward", "bad")
    assert "plugin.import" == caught.value.code
    assert "pip install 'quite-absent>=2'" in caught.value.fix


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("plugin:Agent", "plugn:Agent", "module fake_bad.plugn"),
        ("plugin:Agent", "plugin:Agnet", "object fake_bad.plugin:Agnet"),
        ("config:Config", "config:Settings", "object fake_bad.config:Settings"),
    ],
)
def test_an_object_that_does_not_exist_is_told_from_a_failed_import(site, old: str, new: str, missing: str):
    package = site.install("bad")
    manifest = site.folder / package / "plugin.toml"
    manifest.write_text(manifest.read_text().replace(old, new))
    with pytest.raises(PluginError) as caught:
        discover().load("reward", "bad")
    assert "plugin.object-missing" == caught.value.code
    assert missing == caught.value.expected


@pytest.mark.parametrize(
    "config",
    [
        "class Config: pass",
        "import attrs\n@attrs.define\nclass Config:\n    x: int = 0",
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Config:\n    x: int = 0",
        "Config = dict",
        "Config = {}",
    ],
)
def test_a_config_that_is_not_a_frozen_attrs_class_is_refused(site, config: str):
    site.install("bad", modules={"config.py": config})
    with pytest.raises(PluginError) as caught:
        assert discover().resolve("bad").settings_class
    assert "plugin.config-class" == caught.value.code


def test_a_frozen_config_without_fields_is_fine(site):
    site.install("good", modules={"config.py": "import attrs\n@attrs.frozen\nclass Config:\n    pass"})
    assert "Config" == discover().resolve("good").settings_class.__name__


def test_a_class_that_does_not_fit_is_not_loaded(site):
    site.install("bad", modules={"plugin.py": "class Agent: pass"})
    with pytest.raises(PluginError) as caught:
        discover().load("reward", "bad")
    assert "plugin.not-a-subclass" == caught.value.code


def test_resolve_asks_for_the_kind_only_when_it_matters(site):
    site.install("same", kind="reward", package="fake_reward")
    site.install("same", kind="agent", package="fake_agent")
    site.install("good")
    registry = discover([str(site.folder)])
    assert "reward" == registry.resolve("good").kind
    assert "agent" == registry.resolve("same", "agent").kind
    with pytest.raises(JackfieldError) as caught:
        registry.resolve("same")
    assert ("plugin.ambiguous", "agent, reward") == (caught.value.code, caught.value.found)


def test_the_process_wide_registry_is_discovered_once(site):
    site.install("good")
    installed.cache_clear()
    try:
        loaded = load_plugin("reward", "good")
        site.install("later")
        assert loaded is load_plugin("reward", "good")
        with pytest.raises(PluginNotFound):
            load_plugin("reward", "later")
    finally:
        installed.cache_clear()
