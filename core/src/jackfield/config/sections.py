"""The sections of a run's configuration, which import neither plugins nor torch."""

from __future__ import annotations

import functools
import os
import re
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs.validators import and_, deep_mapping, ge, gt, in_, instance_of, le, optional

from jackfield.abc import SECTIONS
from jackfield.abc.engine import ModelSpec, OptimizerSpec
from jackfield.abc.rollout import SamplingParams
from jackfield.algorithms.settings import AlgorithmSettings, CriticSettings
from jackfield.config.agent_service import AgentServiceConfig
from jackfield.config.data import DataConfig
from jackfield.config.evaluation import EvaluationConfig
from jackfield.config.reward_service import RewardServiceConfig
from jackfield.config.schedule import ScheduleConfig
from jackfield.errors import ConfigError
from jackfield.observe import ObserveSettings
from jackfield.plugins.interpreters import EnvironmentSettings
from jackfield.queue.meta import Reuse, SamplerSpec
from jackfield.settings import option

#: Default bounds on the mean distance of a replica's log-probs from the engine's, in nats.
_EXACT_BOUND, _ROUNDED_BOUND, _FLOAT8_BOUND = 0.01, 0.25, 0.5
_PROFILE = re.compile(r"step:[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*")
_WORKERS = ("engine", "rollout", "agent", "reward")  #: kinds of plugins that can run in their own interpreter


@attrs.frozen(kw_only=True)
class PluginSection:
    """A plugin's name and its settings, which its schema defines."""

    name: str
    settings: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and how the same command resumes from them."""

    every: int = option(20, "checkpoint every n steps, or at the next weight sync if that is later; 0: never", ge(0))
    keep: int = option(2, "how many of the newest checkpoints to keep", gt(0))
    at_end: bool = option(True, "also write a checkpoint after the last step")
    background: int = option(
        0, "steps that go on while the files of a checkpoint are written; a resume counts on it afterwards", ge(0)
    )
    grace_seconds: float = option(25.0, "seconds from SIGTERM or SIGINT to the end; 80 % for the step", gt(0.0))
    max_recoveries: int = option(3, "resumes from the newest checkpoint after a dead worker took work with it", ge(0))
    resume: bool = option(True, "resume from the newest checkpoint; false: remove all checkpoints and begin again")


@attrs.frozen(kw_only=True)
class WeightsConfig:
    """How weights are sent to replicas."""

    kind: Literal["full", "delta"] = option("full", "full: all weights (LoRA: the adapter); delta: changed blocks")
    block_bytes: int = option(4096, "bytes per block of a delta; the engine remembers 8 bytes for each block", ge(8))
    on_missing_base: Literal["full", "stop"] = option(
        "full", "if a replica lacks the weights that a delta is based on; full: send everything; stop: end the run"
    )
    dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn"] | None = option(
        None, "dtype in replicas; float8_e4m3fn: linear layers, a scale per tensor, else bfloat16; null: model.dtype"
    )
    in_turns: bool = option(False, "update one half of the replicas after the other; new requests go to the others")


@attrs.frozen(kw_only=True)
class LogProbCheckConfig:
    """Checks that replicas and training passes compute the same log-probs.

    After each weight sync, every replica generates a few tokens, which the engine scores. The log-probs of the training
    pass are compared with those of an inference pass, and with those of the rollout if the weights are the same.
    """

    every: int = option(
        10,
        "compare the training pass every n steps, or at the next weight sync if that is later; also on the first "
        "batch, on the first batch from published weights, and after a resume. 0: never",
        ge(0),
    )
    probe_tokens: int = option(2, "tokens that each replica generates and the engine scores after a weight sync", ge(0))
    bound: float | None = option(
        None,
        "maximum mean distance of log-probs, in nats; null: 0.01 to replica and rollout, 0.25 if anything computes in "
        "less than float32, 0.5 with weights.dtype: float8_e4m3fn; to the inference pass 0.001, or 0.1 if the engine "
        "computes in less than float32. One sample may be ten times as far from the rollout",
        gt(0.0),
    )
    on_mismatch: Literal["stop", "warn", "correct"] = option(
        "stop",
        "stop: end the run (weights.log-probs, run.log-probs); warn: log a warning; correct: warn about distances to "
        "replica and rollout and correct them by importance weights (this enables algorithm.correction), but end the "
        "run for a distance to the inference pass",
    )


@attrs.frozen(kw_only=True)
class DeadlineConfig:
    """Deadlines in seconds; if one passes, the run fails and names what it waited for."""

    start: float = option(600.0, "for a worker to start, and for a cluster to have room for it", gt(0.0))
    engine: float = option(3600.0, "for one call of an engine: loading, a pass, a checkpoint", gt(0.0))
    rollout: float = option(600.0, "for one rollout", gt(0.0))
    reward: float = option(60.0, "for one try to score a sample, from when it begins", gt(0.0))
    batch: float = option(1800.0, "for the batch of the next step", gt(0.0))
    sync: float = option(600.0, "for one weight sync", gt(0.0))
    heartbeat: float = option(
        30.0,
        "a process without a heartbeat for this long is considered dead: it is named and killed, and its work is done "
        "again; a separate thread sends heartbeats, even during long work",
        gt(0.0),
    )
    drain: float = option(60.0, "for requests of a removed replica; the rest continue elsewhere", ge(0.0))


@attrs.frozen(kw_only=True)
class ReplayConfig(Reuse):
    """Replay: groups that were trained on before are added to each batch."""

    ratio: float = option(help="replayed groups per new group, as far as there are any", validator=gt(0.0))
    capacity: int | None = option(256, "used groups to keep, the sampler's first choices; null: all", optional(gt(0)))
    sampler: SamplerSpec = option(factory=partial(SamplerSpec, name="priority"), help="chooses the groups to replay")


@attrs.frozen(kw_only=True)
class MixConfig(Reuse):
    """Mixing: groups of another partition are added to each batch."""

    ratio: float = option(help="mixed-in groups per new group", validator=gt(0.0))
    samples: str = option(help="samples to begin with: a .jsonl or .parquet file, or folder of a queue, run, archive")
    sampler: SamplerSpec = option(factory=SamplerSpec, help="chooses the groups to train on")


@attrs.frozen(kw_only=True)
class MadeConfig(Reuse):
    """Mixing of what operators make in this run."""

    ratio: float = option(help="made groups per new group, as far as there are any", validator=gt(0.0))
    max_uses: int | None = option(1, "uses of a group, the first one included; null: no limit", optional(gt(0)))
    sampler: SamplerSpec = option(factory=SamplerSpec, help="chooses the groups to train on")


@attrs.frozen(kw_only=True)
class QueueConfig:
    """The queue's controller, limits and durability."""

    durable: bool = option(False, "keep a killed run's samples since its newest checkpoint (transfer_queue sql, redis)")
    address: str | None = option(
        None, "address.json of the controller; null: it runs in this process, or with --role is served for the folder"
    )
    host: str = option("127.0.0.1", "address on which `jackfield queue serve` listens; CURVE is used beyond loopback")
    port: int = option(0, "port on which it listens; 0: any free port", and_(ge(0), le(65535)))
    archive: str | None = option(None, "folder for Parquet files of all consumed samples; null: they are deleted")
    rewards: Literal["train", "distributed"] = option(
        "train", "where samples are scored; train: in the role train; distributed: in a process with --role reward"
    )
    max_samples: int | None = option(
        None,
        "samples above which explorers wait, except for those that the trainer waits for; used samples count until the "
        "checkpoint after their step; null: no limit",
        gt(0),
    )
    max_bytes: int | None = option(None, "the same limit in bytes of values; null: no limit", gt(0))


@attrs.frozen(kw_only=True)
class MixingConfig:
    """Groups that are added to each batch."""

    replay: ReplayConfig | None = option(None, "train again on earlier groups; null: never")
    expert: MixConfig | None = option(None, "samples of an expert, for a loss with one (mix, mix_chord); null: none")
    human: MixConfig | None = option(None, "samples with rewards from elsewhere, treated like the policy's; null: none")
    made: MadeConfig | None = option(
        None, "responses that operators of data.pipeline.experiences make, for a loss with an expert; null: none"
    )


@attrs.frozen(kw_only=True)
class RayConfig:
    """The Ray cluster and its workers."""

    address: str | None = option(None, "address of a cluster to join (HOST:PORT); null: start one on this machine")
    num_cpus: int | None = option(None, "CPUs of a started cluster; null: the machine's, or what the run needs", gt(0))
    num_gpus: int | None = option(None, "GPUs of a started cluster; null: the machine's", ge(0))
    object_store_bytes: int | None = option(None, "shared memory of a started cluster; null: as Ray decides", gt(0))
    engine_ranks: int = option(1, "ranks of each engine; with cluster.device: cuda each has a GPU of its own", gt(0))
    agent_workers: int = option(1, "processes that run agent loops", gt(0))
    reward_workers: int = option(1, "processes that run reward agents", gt(0))
    cpus_per_place: float = option(1.0, "CPUs per place of a rank or replica; with cuda, per GPU", ge(0.0))


@attrs.frozen(kw_only=True)
class ClusterConfig:
    """Where workers run, and their resources."""

    name: Literal["inline", "ray"] = option("inline", "inline: all in this process; ray: each worker in a Ray actor")
    device: str = option(
        "cpu", "torch device of engine and rollout server: cpu, or cuda; inline also one GPU, as cuda:1"
    )
    placement: Literal["shared", "separate"] | None = option(
        None,
        "shared: engines and replicas take turns; separate: own devices; null: shared unless a CPU has cores for all",
    )
    threads: int | None = option(None, "torch threads; null: torch's default", [gt(0), le(4096)])
    replicas: int = option(1, "rollout servers", gt(0))
    replica_restarts: int = option(3, "restarts of a rollout server whose own process dies", ge(0))
    metrics_port: int | None = option(None, "loopback port of Prometheus; 0: free; null: none", [ge(0), le(65535)])
    max_model_len: int | None = option(None, "maximum of prompt and response tokens; null: the model's limit", gt(1))
    micro_batch_tokens: int = option(
        16384, "maximum tokens of one training pass; padding counts, if there is any", gt(0)
    )
    offload: bool = option(False, "the idle side releases its device memory at every hand-over")
    interpreters: Mapping[str, str] = option(
        factory=dict,
        help="interpreters for workers by kind (rollout; with name: ray also engine, agent, reward): a name under "
        "environments, or a path; by default those of the plugins' manifests",
        validator=deep_mapping(in_(_WORKERS), instance_of(str)),
    )
    ray: RayConfig = option(factory=RayConfig, help="the Ray cluster; used with name: ray only")

    @property
    def shares_devices(self) -> bool:
        """Return whether engines and replicas take turns on the same devices."""
        cores = (1 + self.replicas) * (self.threads or 1 << 16)
        own = self.name == "inline" and self.device == "cpu" and cores <= (os.cpu_count() or 1)
        return not own if self.placement is None else self.placement == "shared"


@attrs.frozen(kw_only=True)
class RunConfig:
    """The configuration of a run."""

    name: str = option("run", "name shown in progress, curves and tables")
    folder: str = option("runs/run", "folder for all files of the run")
    seed: int = option(0, "seed; it makes a synchronous run reproducible")
    mode: Literal["online", "offline", "train", "explore"] = option(
        "online",
        "online: explore and train; offline: train on given answers; train: on samples with rewards "
        "(data.samples, or what is in the queue of queue.address); explore: fill the queue, and train nothing",
    )
    model: ModelSpec = option(help="the policy")
    data: DataConfig = option(factory=DataConfig, help="tasks")
    sampling: SamplingParams = option(factory=SamplingParams, help="sampling parameters of training responses")
    algorithm: AlgorithmSettings = option(factory=AlgorithmSettings, help="advantages, loss, KL")
    optimizer: OptimizerSpec = option(factory=OptimizerSpec, help="AdamW and its learning-rate schedule")
    critic: CriticSettings = option(factory=CriticSettings, help="value model")
    schedule: ScheduleConfig = option(factory=ScheduleConfig, help="steps and weight syncs")
    queue: QueueConfig = option(factory=QueueConfig, help="controller, limits and durability")
    mixing: MixingConfig = option(factory=MixingConfig, help="replay, and samples from experts and people")
    evaluation: EvaluationConfig = option(factory=EvaluationConfig, help="held-out tasks")
    checkpoint: CheckpointConfig = option(factory=CheckpointConfig, help="checkpoints and resuming")
    weights: WeightsConfig = option(factory=WeightsConfig, help="how they are sent to replicas")
    log_prob_check: LogProbCheckConfig = option(factory=LogProbCheckConfig, help="log-probs of replicas and training")
    cluster: ClusterConfig = option(factory=ClusterConfig, help="where workers run")
    deadlines: DeadlineConfig = option(factory=DeadlineConfig, help="maximum waiting times")
    environments: Mapping[str, EnvironmentSettings] = option(
        factory=dict, help="environments by name; `jackfield env create NAME FILE` makes one for cluster.interpreters"
    )
    engine: PluginSection = option(PluginSection(name="fsdp"), "the engine plugin and its settings")
    rollout: PluginSection = option(PluginSection(name="transformers"), "the rollout plugin and its settings")
    agent: PluginSection = option(PluginSection(name="single_turn"), "the agent plugin and its settings")
    reward: PluginSection = option(PluginSection(name="rules"), "the reward plugin and its settings")
    reward_service: RewardServiceConfig = option(factory=RewardServiceConfig, help="how the reward is called")
    agent_service: AgentServiceConfig = option(factory=AgentServiceConfig, help="how agents are run")
    models: Mapping[str, Any] = option(
        factory=dict,
        help="models that agents and rewards ask by name, with the settings of jackfield-models",
    )
    tools: Mapping[str, Any] = option(
        factory=dict, help="tools that agents get, by name, with the settings of jackfield-tools"
    )
    transfer_queue: PluginSection = option(PluginSection(name="auto"), "queue backend; auto: memory, zmq where joined")
    checkpoint_engine: PluginSection = option(
        PluginSection(name="auto"),
        "the checkpoint_engine plugin and its settings; auto: in_process; nccl with cluster.name: ray; shared if "
        "rollout servers are processes of this machine that use the engine's GPUs, or its CPU from their interpreter",
    )
    observe: ObserveSettings = option(factory=ObserveSettings, help="what the run writes and shows")
    profile: str | None = option(None, "steps to profile, counted from 1: step:5 or step:5,8-9; null: none")

    def __attrs_post_init__(self) -> None:
        """Refuse steps to profile that the run does not have."""
        if self.profile is not None and not _PROFILE.fullmatch(self.profile):
            raise self.refusal("profile", "this names no steps", "step:5, or step:5,8-9")
        if not all(steps and 1 <= steps[0] <= steps[-1] <= self.schedule.steps for steps in self.profiled_steps):
            expected = f"steps from 1 to {self.schedule.steps} (schedule.steps), ranges upwards"
            raise self.refusal("profile", "the run does not have these steps", expected)

    @property
    def profiled_steps(self) -> list[range]:
        """The steps to profile, counted from 1."""
        listed = [] if self.profile is None else self.profile.removeprefix("step:").split(",")
        ends = (each.partition("-") for each in listed)
        return [range(int(first), int(last or first) + 1) for first, _, last in ends]

    def seed_of(self, sampling: SamplingParams) -> int:
        """Return the seed for these sampling parameters, which is the run's unless they have one."""
        return self.seed if sampling.seed is None else sampling.seed

    @property
    def keeps_token_versions(self) -> bool:
        """Return whether samples have the column ``weight_versions``."""
        return self.algorithm.correction.by_token or self.schedule.mode == "async" or self.schedule.partial_rollout

    @property
    def engine_temperature(self) -> float:
        """The temperature of the engine's log-probs."""
        return self.sampling.temperature if self.mode != "offline" else 1.0

    @property
    def engine_rounds(self) -> bool:
        """Return whether the engine computes in less than float32."""
        return (self.engine.settings.get("mixed_precision") or "none") != "none" or self.model.dtype != "float32"

    @property
    def rounds(self) -> bool:
        """Return whether the engine or a replica computes in less than float32."""
        return self.engine_rounds or self.weights.dtype not in (None, "float32")

    @property
    def rollout_bound(self) -> float:
        """The bound on the mean distance of replicas' log-probs from the engine's, in nats."""
        bound = _ROUNDED_BOUND if self.rounds else _EXACT_BOUND
        return self.log_prob_check.bound or (_FLOAT8_BOUND if self.weights.dtype == "float8_e4m3fn" else bound)

    @property
    def trains_with_dropout(self) -> bool:
        """Return whether training and inference passes differ by dropout."""
        return self.model.dropout > 0 or (self.model.lora is not None and self.model.lora.dropout > 0)

    @property
    def sampling_filters(self) -> dict[str, float]:
        """The sampling filters that exclude tokens from training responses, by name."""
        sampling = self.sampling
        active = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
        return {name: getattr(sampling, name) for name, found in active.items() if found and self.mode != "offline"}

    @property
    def plugins(self) -> dict[str, str]:
        """The name of the run's plugin of each kind."""
        return {kind: getattr(self, kind).name for kind in SECTIONS}

    @property
    def address_file(self) -> Path:
        """The file in which a served controller publishes its address."""
        return Path(self.queue.address or Path(self.folder) / "queue" / "address.json")

    def with_address(self) -> RunConfig:
        """Return the configuration of a process whose queue controller runs elsewhere."""
        return attrs.evolve(self, queue=attrs.evolve(self.queue, address=str(self.address_file.absolute())))

    def of_role(self, role: str) -> RunConfig:
        """Return the configuration of a role, with the controller's address and its own folder."""
        if role in ("all", "train"):
            return self if role == "all" else self.with_address()
        name = f"explorer-{socket.gethostname()}-{os.getpid()}" if role == "explore" else "rewards"
        folder = Path(self.folder, "explorers" if role == "explore" else "", name)
        return attrs.evolve(self.with_address(), name=name, folder=str(folder))

    def refusal(self, where: str, message: str, expected: str, **details: str) -> ConfigError:
        """Return the error for the setting at the path ``where``, with code and fix. It shows the setting's value."""
        found = functools.reduce(getattr, where.split("."), self)
        details = {"fix": f"give {where} a value that is expected, or change what it does not fit", **details}
        shown = None if attrs.has(type(found)) else found
        return ConfigError(message, where=where, expected=expected, found=shown, **details)
