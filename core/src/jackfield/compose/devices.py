"""What a run's processes need of devices, from its configuration and the settings of its plugins."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import attrs

from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.cluster.placement import PlacementRequest, check_memory, check_sizes, describe, place
from jackfield.config import RunConfig, plugin_settings
from jackfield.plugins import Registry
from jackfield.trainer.role import Role, RoleName

#: Settings that a plugin's ``Config`` has by convention; one that it lacks is 1.
_SIZES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")


def uses_gpus(config: RunConfig) -> bool:
    """Return whether engines and replicas compute on NVIDIA or AMD GPUs, which torch calls ``cuda``."""
    return config.cluster.device.partition(":")[0] == "cuda"


def placement_request(
    config: RunConfig, registry: Registry, engines: Sequence[str], *, generates: bool
) -> PlacementRequest:
    """Return what the engines of a role and its replicas need, or raise ``cluster.placement`` if sizes do not fit."""
    cluster, settings, gpus = config.cluster, plugin_settings(config, registry), uses_gpus(config)
    sizes, served = ({name: _size(settings[kind], name) for name in _SIZES} for kind in ("engine", "rollout"))
    ranks = cluster.ray.engine_ranks if cluster.name == "ray" else 1
    request = PlacementRequest(
        roles=tuple(engines),
        ranks=ranks,
        group=sizes["tensor_parallel"] if gpus else 1,
        replicas=cluster.replicas if generates else 0,
        width=served["tensor_parallel"] * served["pipeline_parallel"] if gpus else 1,
        shared=cluster.shares_devices,
        offload=cluster.offload,
        memory_fraction=config.rollout.settings.get("memory_fraction"),
        splits_memory=gpus,
        device="GPU" if gpus else "place",
        where="the cluster" if cluster.name == "ray" else "this machine",
    )
    if engines:
        check_sizes(ranks, sizes)
        check_memory(request)
    return request


def _size(settings: Any, name: str) -> int:
    return int(getattr(settings, name, None) or 1)


def check_devices(config: RunConfig, registry: Registry, role: RoleName, algorithm: ResolvedAlgorithm) -> None:
    """Refuse parallel sizes, memory fractions and devices that fit no cluster, before one is started."""
    device, name = config.cluster.device, config.cluster.name
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise config.refusal("cluster.device", "engines and servers know no such device", "cpu, cuda or cuda:NUMBER")
    if name != "ray" and config.cluster.ray.engine_ranks > 1:
        what, fix = "the engine of one process has one rank", "set cluster.name: ray, or leave it out"
        raise config.refusal("cluster.ray.engine_ranks", what, "1", fix=fix)
    if name == "ray" and device not in ("cpu", "cuda"):
        raise config.refusal(
            "cluster.device", "Ray chooses the devices of each worker", "cpu or cuda, without a number"
        )
    placement_request(config, registry, Role.engines_of(config, algorithm, role), generates=True)


def describe_devices(config: RunConfig, registry: Registry, role: RoleName, algorithm: ResolvedAlgorithm) -> list[str]:
    """Return sentences about the devices of a run in a cluster or on GPUs."""
    if not uses_gpus(config) and config.cluster.name == "inline":
        return []
    engines = Role.engines_of(config, algorithm, role)
    generates = config.mode in ("online", "explore") or config.evaluation.every > 0
    return describe(placement_request(config, registry, engines, generates=generates), config.checkpoint_engine.name)


def local_device(
    config: RunConfig, registry: Registry, request: PlacementRequest, role: str, number: int, *, apart: bool
) -> Any:
    """Return ``device``, ``memory_fraction`` and ``visible`` of an engine or a replica of this machine.

    ``apart``: replicas have processes of their own.

    ``visible`` is the ``CUDA_VISIBLE_DEVICES`` of a process of its own. The engines are in this process, so each may
    use what replicas leave; a replica in this process that reserves no memory shares it with them.
    """
    if not uses_gpus(config):
        return SimpleNamespace(device=config.cluster.device, memory_fraction=None, visible=None)
    import torch

    only, count = torch.device(config.cluster.device).index, torch.cuda.device_count()
    replicas = max(request.replicas, number + 1) if role == "rollout" else request.replicas
    placement = place(attrs.evolve(request, replicas=replicas), [count if only is None else int(only < count)])
    found, fraction = placement.of(role, number), None
    assert found is not None, "it was placed"
    if apart or hasattr(plugin_settings(config, registry)["rollout"], "memory_fraction"):
        fraction, taken = found.memory_fraction, request.replica_fraction
        fraction = fraction if role == "rollout" or taken is None else 1.0 - taken
    indexes = [(only or 0) + device for device in found.devices]
    known = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    visible = ",".join(known[index] if known else str(index) for index in indexes)
    return SimpleNamespace(device=f"cuda:{indexes[0]}", memory_fraction=fraction, visible=visible)
