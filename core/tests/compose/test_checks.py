"""Tests that a configuration is refused if its plugins do not declare the capabilities that it needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from jackfield.clock import Clock
from jackfield.compose import checks
from jackfield.compose.capabilities import check_capabilities
from jackfield.compose.libraries import hide_progress_bars
from jackfield.compose.modes import check_mode
from jackfield.compose.worker import Worker
from jackfield.compose.workers import WorkerFactory, load_plugins
from jackfield.config import make_config
from jackfield.errors import ConfigError
from jackfield.plugins import Manifest, PluginRecord, Registry
from jackfield.queue import meta
from jackfield.trainer.role import RoleName
from jackfield_testing import in_loop, refused

EVERYTHING = {"rollout": {"weights_delta": "full", "weights_float8": "partial"}, "checkpoint_engine": {"delta": "full"}}


def record(kind: str, name: str, declared: Any) -> PluginRecord:
    manifest = Manifest(name=name, kind=kind, abi="1.0", object="a:B", config="a:C", capabilities=declared)  # type: ignore[arg-type]
    return PluginRecord(name=name, kind=kind, distribution="fake", version="1", manifest=manifest)


def check(*overrides: str, **capabilities: Any) -> None:
    config = make_config({"model": {"path": "somewhere"}}, overrides)
    records = (record(kind, name, capabilities.get(kind, {})) for kind, name in config.plugins.items())
    check_capabilities(config, Registry(tuple(records)))


@pytest.mark.parametrize(
    ("override", "kind", "capability"),
    [
        ("weights.kind=delta", "rollout", "weights_delta"),
        ("weights.kind=delta", "checkpoint_engine", "delta"),
        ("weights.dtype=float8_e4m3fn", "rollout", "weights_float8"),
    ],
)
def test_weights_are_sent_to_those_who_can_load_them(override: str, kind: str, capability: str) -> None:
    """Formats that every server loads need no declaration."""
    check()
    check("weights.dtype=bfloat16")
    check(override, **EVERYTHING)
    declared = {**EVERYTHING, kind: {**EVERYTHING[kind], capability: "unsupported"}}
    with refused("plugin.capability", capability) as caught:
        check(override, **declared)
    assert "plugin.capability" == caught.value.code


def test_turns_need_replicas_with_devices_of_their_own_and_a_single_one_keeps_its_requests() -> None:
    keeps = {"rollout": {"pause": "full"}}
    check("weights.in_turns=true", "cluster.replicas=2")
    check("weights.in_turns=true", "cluster.replicas=1", **keeps)
    with refused("plugin.capability", "pause", "weights.in_turns"):
        check("weights.in_turns=true", "cluster.replicas=1", rollout={"pause": "unsupported"})
    ray = ("cluster.name=ray", "cluster.replicas=2", "weights.in_turns=true")
    check(*ray, "cluster.placement=separate", transfer_queue={"joins": "full"})
    turns = ("cluster.replicas=2", "weights.in_turns=true")
    for shared in (("cluster.offload=true", *turns), ("cluster.placement=shared", *turns), ray):
        with refused("config.invalid-value", "weights.in_turns", "fix: "):
            check(*shared, transfer_queue={"joins": "full"}, **keeps)


@pytest.mark.parametrize("kind", ["engine", "rollout"])
def test_an_agent_with_images_needs_an_engine_and_replicas_that_take_them(kind: str) -> None:
    """Without the agent's capability nothing is asked of them."""
    takes = {name: {"multi_modal": "partial"} for name in ("agent", "engine", "rollout")}
    check(**takes)
    check(**{**takes, "agent": {"multi_modal": "unsupported"}, kind: {}})
    with refused("plugin.capability", "multi_modal", f"{kind}.name"):
        check(**{**takes, kind: {"multi_modal": "unsupported"}})


def test_a_cluster_needs_a_backend_that_its_workers_can_join() -> None:
    """The error names backends that they can."""
    check("cluster.name=ray", transfer_queue={"joins": "full"})
    check()
    with refused("plugin.capability", "memory", " at transfer_queue.name", "joins", "choose zmq"):
        check("cluster.name=ray", "transfer_queue=memory")


def test_a_run_whose_roles_are_processes_is_not_for_a_cluster() -> None:
    """The address may be there because of the role; the fix names both."""
    with refused("config.invalid-value", "expected: inline", "leave out queue.address and --role"):
        check("cluster.name=ray", "queue.address=somewhere", transfer_queue={"joins": "full"})


@pytest.mark.parametrize(
    ("role", "override", "where"),
    [
        ("all", "queue.rewards=distributed", "queue.rewards"),
        ("reward", "queue.rewards=train", "queue.rewards"),
        ("explore", "weights.kind=delta", "weights.kind"),
        ("train", "weights.kind=delta", "weights.kind"),
        ("all", "data.share=0.5", "data.share"),
    ],
)
def test_settings_of_roles_that_do_not_fit_are_refused(role: RoleName, override: str, where: str) -> None:
    with refused("config.invalid-value", where, "fix: "):
        check_mode(make_config({"model": {"path": "somewhere"}}, [override]), role)


@pytest.mark.parametrize("override", ["weights.kind=delta", "weights.dtype=float8_e4m3fn"])
def test_an_adapter_is_sent_as_it_is(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(override, "model.lora={rank: 2}", **EVERYTHING)
    assert override.partition("=")[0] == caught.value.where


@pytest.mark.parametrize("role", ["all", "train"])
def test_a_profile_needs_a_package_which_the_refusal_names(monkeypatch: pytest.MonkeyPatch, role: RoleName) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    config = make_config({"model": {"path": "somewhere"}, "profile": "step:5"})
    with refused("plugin.requirement", "pyinstrument", "install jackfield[profile]"):
        checks.prepare(config, Registry(()), [], role, Clock())
    with refused("plugin.not-found"):  # no engine is installed; explorers draw no flame graph
        checks.prepare(config, Registry(()), [], "explore", Clock())


def test_a_worker_of_a_cluster_registers_a_plugins_sampler_for_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = """
        from jackfield.plugins import hookimpl
        from jackfield.queue.meta import Sequential
        @hookimpl
        def register_parts(register):
            register("sampler", "of_a_worker", Sequential)
    """
    (tmp_path / "sampler_hooks.py").write_text(dedent(hooks))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(meta, "SAMPLERS", dict(meta.SAMPLERS))
    config = make_config({"model": {"path": "somewhere"}}, ("cluster.threads=null",))
    named: Any = {"name": config.reward.name, "kind": "reward", "abi": "1.0", "object": "a:B", "config": "a:C"}
    record = SimpleNamespace(name=config.reward.name, kind="reward", manifest=Manifest(hooks="sampler_hooks", **named))
    registry: Any = SimpleNamespace(load=lambda kind, name: None, records=lambda kind=None: [record][: kind is None])
    load_plugins(Worker(kind="reward", config=config), registry)
    assert "of_a_worker" in meta.SAMPLERS


class EmptyPart:
    """Each plugin, as far as it is made; an engine that has nothing."""

    def build(self, *_: object) -> EmptyPart:
        return self

    def get_per_tensor_param(self) -> None: ...

    def get_local_param(self) -> Iterator[tuple[Any, Any]]:
        return iter(())


@pytest.mark.parametrize(("declared", "layout"), [({}, ()), ({"retains_weights": "full"}, None)])
@in_loop
async def test_weights_that_a_checkpoint_engine_keeps_are_whole(declared: Any, layout: tuple[()] | None) -> None:
    """A worker that joins later has no part of the transfer's plan."""
    config = make_config({"model": {"path": "somewhere"}}, ())
    name = config.checkpoint_engine.name
    kept = Registry((record("checkpoint_engine", name, declared),))
    registry: Any = SimpleNamespace(load=lambda kind, name: EmptyPart(), resolve=kept.resolve)
    algorithm: Any = SimpleNamespace(loss_columns={})
    worker = Worker(kind="engine", role="actor", config=config, algorithm=algorithm)
    values: Any = None
    async with AsyncExitStack() as stack:
        rank = WorkerFactory(config=config, registry=registry, clock=Clock()).engine_rank(worker, values, stack)
        assert rank.sender is not None
        assert layout == await rank.sender.layout()
        stack.pop_all()


@pytest.mark.parametrize(("given", "hidden"), [(None, 2), ("1", 2), ("0", 0)])
def test_bars_of_libraries_are_hidden_unless_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, given: str | None, hidden: int
) -> None:
    """Also those of libraries that are imported already, and so do not read the variable any more."""
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", given or "")
    if given is None:
        monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")
    called: list[str] = []
    hide = SimpleNamespace(disable_progress_bars=lambda: called.append("hub"))
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", hide)
    shown = SimpleNamespace(disable_progress_bar=lambda: called.append("transformers"))
    monkeypatch.setitem(sys.modules, "transformers.utils.logging", shown)
    hide_progress_bars()
    assert hidden == len(called)
    assert (given or "1") == os.environ["HF_HUB_DISABLE_PROGRESS_BARS"]
