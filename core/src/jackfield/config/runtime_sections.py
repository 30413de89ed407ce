"""Where workers live: the section ``runtime`` of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs.validators import ge, gt, le, optional

from jackfield.settings import option

_WORKERS = ("engine", "rollout", "agent", "reward")  #: kinds of plugin that can have an interpreter of their own


def _are_kinds(_: Any, attribute: attrs.Attribute[Any], value: Mapping[str, str]) -> None:
    for kind in value:
        if kind not in _WORKERS:
            raise ValueError(f"{kind!r} is not one of {', '.join(_WORKERS)}")


@attrs.frozen(kw_only=True)
class RayConfig:
    """The cluster and the workers in it."""

    address: str | None = option(None, help="of a cluster to join (HOST:PORT); null: start one on this machine")
    num_cpus: int | None = option(
        None,
        help="CPUs of a cluster that is started; null: the machine's, or what the run needs",
        validator=optional(gt(0)),
    )
    object_store_bytes: int | None = option(
        None, help="shared memory of a cluster that is started; null: as Ray decides", validator=optional(gt(0))
    )
    engine_ranks: int = option(1, help="ranks of the engine", validator=gt(0))
    agent_workers: int = option(1, help="processes that run agent loops", validator=gt(0))
    reward_workers: int = option(1, help="processes that run reward agents", validator=gt(0))
    placement: Literal["colocated", "disaggregated"] = option(
        "colocated",
        help="colocated: engine and replicas take turns on the same places; disaggregated: each has its own",
    )
    cpus_per_place: float = option(1.0, help="CPUs of the place of a rank or replica", validator=ge(0.0))
    gpus_per_place: float = option(0.0, help="GPUs of the place of a rank or replica", validator=ge(0.0))


@attrs.frozen(kw_only=True)
class ClusterConfig:
    """Where workers live."""

    name: Literal["inline", "ray"] = option(
        "inline", help="inline: everything in this process; ray: each worker in a process of a Ray cluster"
    )
    device: str = option("cpu", help="torch device of engine and rollout server")
    threads: int | None = option(
        None, help="torch threads; null: as torch decides", validator=optional([gt(0), le(4096)])
    )
    replicas: int = option(1, help="rollout servers", validator=gt(0))
    replica_restarts: int = option(
        3,
        help="how often a rollout server with a process of its own is started again when it dies",
        validator=ge(0),
    )
    metrics_port: int | None = option(
        None,
        help="where the controller shows how each replica is, for Prometheus, on loopback; 0: a free port; null: "
        "nowhere",
        validator=optional([ge(0), le(65535)]),
    )
    max_model_len: int | None = option(
        None,
        help="prompt and response tokens together that a rollout server makes room for; null: the model's own limit",
        validator=optional(gt(1)),
    )
    micro_batch_tokens: int = option(16384, help="padded tokens of one training pass, at most", validator=gt(0))
    offload: bool = option(False, help="at every hand-over the idle side gives its device memory back")
    interpreters: Mapping[str, str] = option(
        factory=dict,
        help="interpreters of their own for workers by kind (rollout; with name: ray also engine, agent, reward): a "
        "name under environments, or a path; else as manifests say",
        validator=_are_kinds,
    )
    ray: RayConfig = option(factory=RayConfig, help="the cluster; read with name: ray only")
