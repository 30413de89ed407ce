"""The sections of a run's configuration. Importing this module imports no plugin and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import attrs
from attrs.validators import and_, deep_mapping, ge, gt, in_, instance_of, le, optional

from jackfield.abc.engine import ModelSpec, OptimizerSpec
from jackfield.abc.rollout import SamplingParams
from jackfield.algorithms.settings import AlgorithmSettings, CriticSettings
from jackfield.data.tasks import TaskFormat
from jackfield.observe import ObserveSettings
from jackfield.plugins.environments import EnvironmentSettings
from jackfield.queue import Reuse, SamplerSpec
from jackfield.settings import option

_WORKERS = ("engine", "rollout", "agent", "reward")  #: kinds of plugin that can have an interpreter of their own


@attrs.frozen(kw_only=True)
class PluginSection:
    """A plugin by name, with the settings that its own schema defines (beside ``name`` in the file)."""

    name: str
    settings: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class DataConfig:
    """The tasks, and how they become batches."""

    train: str | None = option(None, "JSONL file of training tasks")
    eval: str | None = option(None, "JSONL file of held-out tasks")
    format: TaskFormat = option(factory=TaskFormat, help="how records become tasks; GSM8K's own format by default")
    expert: str | None = option(
        None, "JSONL file of an expert's answers as texts, in the same format; samples of token ids: mixing.expert"
    )
    expert_samples_per_batch: int = option(0, "answers of the expert in one training batch", ge(0))
    chat_template: str | None = option(None, "a Jinja chat template in the place of the tokenizer's own")
    groups_per_batch: int = option(32, "tasks (groups) in one batch", gt(0))
    rollouts_per_group: int = option(8, "rollouts of each task (the group size)", gt(0))
    max_prompt_tokens: int | None = option(
        None, "longest prompt, in tokens; a longer one ends the run; null: what leaves room for a response", gt(0)
    )


@attrs.frozen(kw_only=True)
class ScheduleConfig:
    """When batches are generated, trained on and published."""

    steps: int = option(100, "training steps", gt(0))
    sync_interval: int = option(1, "k: weights are published every k steps", gt(0))
    sync_offset: int = option(0, "o: how many batches the explorer may run ahead", ge(0))
    max_retries: int = option(
        8, "retries of one failed group of a batch; and groups in a row that may end without any score", ge(0)
    )
    reward_retries: int = option(1, "further calls for a sample without a score, before its reward fails", ge(0))


@attrs.frozen(kw_only=True)
class CheckpointConfig:
    """From what the same command goes on after the run has ended, however it ended."""

    every: int = option(20, "checkpoint every n steps, at the next synchronisation when that is later; 0: never", ge(0))
    keep: int = option(2, "how many of the newest checkpoints stay", gt(0))
    at_end: bool = option(True, "checkpoint after the last step, too")
    grace_seconds: float = option(
        25.0, "from SIGTERM or SIGINT to the end; four fifths of it for the step under way and a checkpoint", gt(0.0)
    )
    max_recoveries: int = option(
        3, "times that a run goes on from its newest checkpoint after a worker died whose work is lost", ge(0)
    )
    resume: bool = option(
        True, "go on from the folder's newest checkpoint; false: remove what is there and start from the beginning"
    )


@attrs.frozen(kw_only=True)
class WeightsConfig:
    """How replicas get the weights of each synchronisation."""

    kind: Literal["full", "delta"] = option(
        "full", "full: all of them; delta: the blocks of bytes that changed. A LoRA adapter is sent alone in any case"
    )
    block_bytes: int = option(4096, "of a block of a delta; the engine remembers 8 bytes for each", ge(8))
    on_missing_base: Literal["full", "stop"] = option(
        "full", "where a replica lacks the weights that a delta changes; full: send everything; stop: end the run"
    )
    dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn"] | None = option(
        None, "cast in replicas; float8_e4m3fn: linear layers, a scale per tensor, else bfloat16; null: model.dtype"
    )


@attrs.frozen(kw_only=True)
class LogProbCheckConfig:
    """Whether replicas and training passes compute the log-probs that the rollouts have.

    After each weight sync every replica generates a few tokens, which the engine scores. Log-probs of the training pass
    are compared with an inference pass's, and with the rollout's where the weights are the same.
    """

    every: int = option(
        10,
        "compare the training pass every n steps, at the next weight sync when that is later; and on the first "
        "batch, on the first that published weights made, and after a resume. 0: never",
        ge(0),
    )
    probe_tokens: int = option(
        2, "tokens that each replica generates, and the engine scores, after each weight sync. 0: none", ge(0)
    )
    bound: float | None = option(
        None,
        "mean distance of log-probs, in nats; null: 0.01 to replica and rollout, 0.25 where anything computes with "
        "fewer bits than float32, 0.5 with weights.dtype: float8_e4m3fn; a tenth of 0.01, or 0.1, to the inference "
        "pass. One sample may be ten times as far from the rollout",
        gt(0.0),
    )
    on_mismatch: Literal["stop", "warn", "correct"] = option(
        "stop",
        "stop: the run ends (weights.log-probs, run.log-probs); warn: a warning; correct: distances to replica and "
        "rollout are a warning, and importance weights correct for them (algorithm.correction, which this switches "
        "on), a distance to the inference pass ends the run",
    )


@attrs.frozen(kw_only=True)
class EvaluationSampling(SamplingParams):
    """How evaluation answers are drawn: greedy by default."""

    temperature: float = option(0.0, "0: greedy; else 0.01 to 100", attrs.fields(SamplingParams).temperature.validator)


@attrs.frozen(kw_only=True)
class EvaluationConfig:
    """Runs over the held-out tasks."""

    every: int = option(
        0, "evaluate every n steps, at the next synchronisation when that is later, and at both ends; 0: never", ge(0)
    )
    tasks: int | None = option(None, "use the first n held-out tasks; null: all", gt(0))
    sampling: EvaluationSampling = option(factory=EvaluationSampling, help="how answers are drawn")


@attrs.frozen(kw_only=True)
class DeadlineConfig:
    """The longest that a run waits, in seconds, before it fails and names who was waited for."""

    start: float = option(600.0, "for a worker to start, and for a cluster to have room for it", gt(0.0))
    engine: float = option(3600.0, "for one call of an engine: loading, a pass, a checkpoint", gt(0.0))
    rollout: float = option(600.0, "for one rollout", gt(0.0))
    reward: float = option(60.0, "for one score", gt(0.0))
    batch: float = option(1800.0, "for the batch of the next step", gt(0.0))
    sync: float = option(600.0, "for one weight synchronisation", gt(0.0))
    heartbeat: float = option(
        30.0,
        "without a heartbeat of a process, after which it is dead: it is named and killed, and what it did is done "
        "again; a thread of its own sends them, also during long work",
        gt(0.0),
    )
    drain: float = option(
        60.0, "for requests of a replica that is removed to end, before they are generated again elsewhere", ge(0.0)
    )


@attrs.frozen(kw_only=True)
class ReplayConfig(Reuse):
    """Groups that were trained on before, once more beside the new ones of each batch."""

    ratio: float = option(help="such groups for each new one, as far as there are any", validator=gt(0.0))
    capacity: int | None = option(256, "used groups kept, the sampler's first choices; null: all", optional(gt(0)))
    sampler: SamplerSpec = option(
        factory=partial(SamplerSpec, name="priority"), help="which of them are trained on again"
    )


@attrs.frozen(kw_only=True)
class MixConfig(Reuse):
    """Groups of another partition beside the new ones of each batch."""

    ratio: float = option(help="such groups for each new one", validator=gt(0.0))
    samples: str = option(
        help="what is put into the partition before the first step: a .jsonl or .parquet file of samples, or the "
        "folder of a queue (`jackfield queue import`) or run"
    )
    sampler: SamplerSpec = option(factory=SamplerSpec, help="which of them are trained on")


@attrs.frozen(kw_only=True)
class QueueConfig:
    """Where the queue's controller is, how much the queue holds, and what survives a crash."""

    durable: bool = option(
        False, "a killed run keeps the samples since its newest checkpoint; needs a durable transfer_queue (sql, redis)"
    )
    address: str | None = option(
        None,
        "the address.json of the controller that the run connects to; null: the controller is part of the run's "
        "process, and with --role the one that is served for the same folder",
    )
    host: str = option("127.0.0.1", "address at which `jackfield queue serve` listens; beyond loopback with CURVE")
    port: int = option(0, "port at which it listens; 0: any free port", and_(ge(0), le(65535)))
    rewards: Literal["train", "distributed"] = option(
        "train", "which process scores samples: the role train, or one of its own (--role reward)"
    )
    max_samples: int | None = option(
        None,
        "samples in the queue, above which explorers wait; those of the batch that the trainer waits for are let in, "
        "and samples count until the checkpoint after their step; null: no limit",
        gt(0),
    )
    max_bytes: int | None = option(None, "the same in bytes of values; null: no limit", gt(0))


@attrs.frozen(kw_only=True)
class MixingConfig:
    """What a batch has beside the groups of its step."""

    replay: ReplayConfig | None = option(None, "train again on groups that were trained on before; null: never")
    expert: MixConfig | None = option(None, "samples of an expert, for a loss with one (mix, mix_chord); null: none")
    human: MixConfig | None = option(None, "samples with rewards from elsewhere, like the policy's own; null: none")


@attrs.frozen(kw_only=True)
class RayConfig:
    """The cluster and the workers in it."""

    address: str | None = option(None, "of a cluster to join (HOST:PORT); null: start one on this machine")
    num_cpus: int | None = option(None, "CPUs of a started cluster; null: the machine's, or what the run needs", gt(0))
    object_store_bytes: int | None = option(None, "shared memory of a started cluster; null: as Ray decides", gt(0))
    engine_ranks: int = option(1, "ranks of the engine", gt(0))
    agent_workers: int = option(1, "processes that run agent loops", gt(0))
    reward_workers: int = option(1, "processes that run reward agents", gt(0))
    placement: Literal["colocated", "disaggregated"] = option(
        "colocated", "colocated: engine and replicas take turns on the same places; disaggregated: each has its own"
    )
    cpus_per_place: float = option(1.0, "CPUs of the place of a rank or replica", ge(0.0))
    gpus_per_place: float = option(0.0, "GPUs of the place of a rank or replica", ge(0.0))


@attrs.frozen(kw_only=True)
class ClusterConfig:
    """Where workers live."""

    name: Literal["inline", "ray"] = option(
        "inline", "inline: everything in this process; ray: each worker in a process of a Ray cluster"
    )
    device: str = option("cpu", "torch device of engine and rollout server")
    threads: int | None = option(None, "torch threads; null: as torch decides", [gt(0), le(4096)])
    replicas: int = option(1, "rollout servers", gt(0))
    replica_restarts: int = option(3, "restarts of a rollout server with a process of its own that dies", ge(0))
    metrics_port: int | None = option(
        None, "port of Prometheus metrics of replicas, on loopback; 0: a free port; null: none", [ge(0), le(65535)]
    )
    max_model_len: int | None = option(
        None, "prompt and response tokens that a rollout server has room for; null: the model's own limit", gt(1)
    )
    micro_batch_tokens: int = option(16384, "padded tokens of one training pass, at most", gt(0))
    offload: bool = option(False, "at every hand-over the idle side gives its device memory back")
    interpreters: Mapping[str, str] = option(
        factory=dict,
        help="interpreters of their own for workers by kind (rollout; with name: ray also engine, agent, reward): a "
        "name under environments, or a path; else as manifests say",
        validator=deep_mapping(in_(_WORKERS), instance_of(str)),
    )
    ray: RayConfig = option(factory=RayConfig, help="the cluster; read with name: ray only")


@attrs.frozen(kw_only=True)
class RunConfig:
    """A whole run."""

    name: str = option("run", "shown in progress, curves and tables")
    folder: str = option("runs/run", "where everything that the run writes goes")
    seed: int = option(0, "fixes a synchronous run")
    mode: Literal["online", "offline"] = option(
        "online", "online: explore and train; offline: train on the data's own answers"
    )
    model: ModelSpec = option(help="the policy")
    data: DataConfig = option(factory=DataConfig, help="tasks")
    sampling: SamplingParams = option(factory=SamplingParams, help="how training responses are drawn")
    algorithm: AlgorithmSettings = option(factory=AlgorithmSettings, help="advantages, loss, KL")
    optimizer: OptimizerSpec = option(factory=OptimizerSpec, help="AdamW and its learning-rate schedule")
    critic: CriticSettings = option(factory=CriticSettings, help="value model")
    schedule: ScheduleConfig = option(factory=ScheduleConfig, help="steps and synchronisation")
    queue: QueueConfig = option(factory=QueueConfig, help="where the controller is, limits, durability")
    mixing: MixingConfig = option(factory=MixingConfig, help="replay, and samples of experts and people")
    evaluation: EvaluationConfig = option(factory=EvaluationConfig, help="held-out tasks")
    checkpoint: CheckpointConfig = option(factory=CheckpointConfig, help="resuming")
    weights: WeightsConfig = option(factory=WeightsConfig, help="how replicas get them")
    log_prob_check: LogProbCheckConfig = option(
        factory=LogProbCheckConfig, help="log-probs of replicas and training passes against each other"
    )
    cluster: ClusterConfig = option(factory=ClusterConfig, help="where workers live")
    deadlines: DeadlineConfig = option(factory=DeadlineConfig, help="longest waits")
    environments: Mapping[str, EnvironmentSettings] = option(
        factory=dict, help="by name: what `jackfield env create NAME FILE` makes, for cluster.interpreters"
    )
    engine: PluginSection = option(PluginSection(name="fsdp"), "the engine plugin, and its own settings")
    rollout: PluginSection = option(PluginSection(name="transformers"), "the rollout plugin, and its own settings")
    agent: PluginSection = option(PluginSection(name="single_turn"), "the agent plugin, and its own settings")
    reward: PluginSection = option(PluginSection(name="rules"), "the reward plugin, and its own settings")
    transfer_queue: PluginSection = option(
        PluginSection(name="memory"), "the transfer_queue plugin, and its own settings"
    )
    checkpoint_engine: PluginSection = option(
        PluginSection(name="auto"),
        "the checkpoint_engine plugin, and its own settings; auto: in_process, nccl with cluster.name: ray, and "
        "shared where the rollout server has an interpreter of its own",
    )
    observe: ObserveSettings = option(factory=ObserveSettings, help="what the run writes and shows")

    def seed_of(self, sampling: SamplingParams) -> int:
        """Return the seed of responses that are drawn so: their own, or else the run's."""
        return self.seed if sampling.seed is None else sampling.seed
