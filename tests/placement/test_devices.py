"""What a run's processes get of this machine's GPUs, whose number is made up, and what is refused before it starts."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from jackfield.compose.checks import check_settings
from jackfield.compose.devices import describe_devices, local_device, placement_request
from jackfield.config import RunConfig, make_config
from jackfield.errors import ConfigError, RunError
from jackfield.plugins import discover
from jackfield_testing import refused

ENGINES = ("actor", "reference")
GPU = "cluster.device=cuda"
VLLM = "rollout={name: vllm, tensor_parallel: 2}"


def config_of(*overrides: str) -> RunConfig:
    return make_config({"model": {"path": "none"}}, ["data.train=t.jsonl", "evaluation.every=0", *overrides])


def placed(monkeypatch: pytest.MonkeyPatch, gpus: int, *overrides: str, apart: bool = False) -> dict[str, Any]:
    """Device, fraction and visible GPUs of both engines and of replicas 0 and 1."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config, registry = config_of(*overrides), discover()
    request = placement_request(config, registry, ENGINES, generates=True)
    wanted = [*((role, 0) for role in ENGINES), *(("rollout", number) for number in range(config.cluster.replicas))]
    found = {f"{role} {n}": local_device(config, registry, request, role, n, apart=apart) for role, n in wanted}
    return {name: (each.device, each.memory_fraction, each.visible) for name, each in found.items()}


@pytest.fixture(autouse=True)
def no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_on_a_cpu_there_is_nothing_to_place(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ("cpu", None, None)
    assert dict.fromkeys(("actor 0", "reference 0", "rollout 0"), here) == placed(monkeypatch, 0)


def test_replicas_have_gpus_of_their_own_beginning_with_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of this process that reserves no memory shares it with the engines."""
    found = placed(monkeypatch, 2, GPU, "cluster.replicas=2")
    assert {
        "actor 0": ("cuda:0", None, "0"),
        "reference 0": ("cuda:0", None, "0"),
        "rollout 0": ("cuda:0", None, "0"),
        "rollout 1": ("cuda:1", None, "1"),
    } == found


def test_a_server_that_reserves_memory_leaves_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines are in one process, whose limit is what replicas leave; the second replica is alone."""
    found = placed(monkeypatch, 4, GPU, VLLM, "cluster.replicas=2")
    assert ("cuda:0", 0.5, "0") == found["actor 0"] == found["reference 0"]
    assert [("cuda:0", 0.5, "0,1"), ("cuda:2", None, "2,3")] == [found["rollout 0"], found["rollout 1"]]
    given = placed(monkeypatch, 2, GPU, VLLM, "rollout.memory_fraction=0.75")
    assert [0.25, 0.75] == [given["actor 0"][1], given["rollout 0"][1]]


@pytest.mark.parametrize("setting", ["cluster.offload=true", "cluster.placement=separate"])
def test_memory_is_not_split_where_one_side_has_it(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    found = placed(monkeypatch, 3, GPU, VLLM, setting)
    assert [None] * 3 == [fraction for _, fraction, _ in found.values()]
    assert ("cuda:0" if "offload" in setting else "cuda:1") == found["rollout 0"][0]


def test_a_process_of_its_own_sees_its_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are named as in this process's own mask."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-1234,7")
    found = placed(monkeypatch, 3, GPU, "rollout.name=vllm", "cluster.placement=separate", apart=True)
    assert ("cuda:1", None, "GPU-1234") == found["rollout 0"]


def test_one_gpu_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = placed(monkeypatch, 4, "cluster.device=cuda:3", apart=True)
    assert [("cuda:3", 0.5, "3")] * 2 == [found["actor 0"], found["rollout 0"]]
    for overrides in (("cluster.device=cuda:4",), ("cluster.device=cuda:3", "cluster.replicas=2"), (GPU, VLLM)):
        with refused("cluster.placement", "has no room"):
            placed(monkeypatch, 4 if overrides[0] != GPU else 1, *overrides)


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (("cluster.name=ray", "cluster.device=cuda:1"), "cluster.device"),
        (("cluster.name=ray", GPU, VLLM, "rollout.memory_fraction=1.0"), "rollout.memory_fraction"),
    ],
)
def test_devices_that_fit_no_cluster_are_refused(overrides: tuple[str, ...], where: str) -> None:
    with pytest.raises((ConfigError, RunError)) as caught:
        check_settings(config_of(*overrides), discover())
    assert where == caught.value.where


def test_parallel_sizes_are_attributes_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of an engine that is not of ours; a size that is not given, or null, is 1."""

    @attrs.frozen
    class Parallel:
        tensor_parallel: int = 2
        pipeline_parallel: int | None = None
        context_parallel: int = 2

    registry = discover()
    record = registry.resolve("fsdp", "engine")
    monkeypatch.setattr(type(record), "settings_class", property(lambda self: _settings(self, Parallel)))
    config = config_of("cluster.name=ray", GPU, "cluster.ray.engine_ranks=4")
    assert 2 == placement_request(config, registry, ENGINES, generates=True).group
    for ranks in ("cluster.ray.engine_ranks=6", "cluster.name=inline"):
        config = config_of("cluster.name=ray", GPU, ranks)
        with refused("cluster.placement", "cannot be divided into parts of 4"):
            placement_request(config, registry, ENGINES, generates=True)


def _settings(record: Any, parallel: type[Any]) -> type[Any]:
    if record.kind == "engine":
        return parallel
    return attrs.make_class("Config", {}, frozen=True)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ((), "in_process"),
        ((GPU, "cluster.replicas=2"), "in_process"),
        (("cluster.interpreters={rollout: /python}",), "shared"),
        ((GPU, "cluster.interpreters={rollout: /python}"), "shared"),
        ((GPU, "cluster.interpreters={rollout: /python}", "cluster.placement=separate"), "nccl"),
        (("cluster.name=ray",), "nccl"),
        (("cluster.name=ray", GPU), "shared"),
        (("cluster.name=ray", GPU, "cluster.placement=separate"), "nccl"),
        (("cluster.name=ray", GPU, "cluster.ray.address=head:6379"), "nccl"),
    ],
)
def test_weights_go_by_what_reaches_the_replicas(overrides: tuple[str, ...], name: str) -> None:
    assert name == config_of(*overrides).checkpoint_engine.name


def test_gpus_per_place_has_moved() -> None:
    with pytest.raises(ConfigError) as caught:
        config_of("cluster.ray.gpus_per_place=1")
    assert "config.unknown-key" == caught.value.code
    assert "cluster.device: cuda" in str(caught.value.fix)


def test_explain_names_devices_of_clusters_and_gpus() -> None:
    registry = discover()

    def said(*overrides: str) -> list[str]:
        config = config_of(*overrides)
        return describe_devices(config, registry, "all", check_settings(config, registry)[1])

    assert [] == said()
    on_cpus = said("cluster.name=ray", "cluster.placement=separate")
    assert "In all: 1 rank + 1 replica = 2 places." in on_cpus
    assert "Weights go from the engine to replicas by nccl." in on_cpus
    assert "Of each shared GPU's memory a replica has 0.5, the engines 0.5." in said("cluster.name=ray", GPU)
