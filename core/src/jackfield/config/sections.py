"""The sections of a run's configuration. Importing this module imports no plugin and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import attrs
from attrs.validators import and_, ge, gt, le, optional

from jackfield.abc.engine import ModelSpec, OptimizerSpec
from jackfield.abc.rollout import SamplingParams
from jackfield.algorithms import Correction, Shaping
from jackfield.data.tasks import TaskFormat
from jackfield.observe import ObserveConfig
from jackfield.queue import Reuse
from jackfield.structuring import option

__all__ = [
    "AlgorithmConfig",
    "CanaryConfig",
    "CheckpointConfig",
    "ControllerConfig",
    "CriticConfig",
    "DataConfig",
    "DeadlineConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "EvaluationSampling",
    "KLConfig",
    "MixConfig",
    "PartConfig",
    "PluginSection",
    "QueueConfig",
    "RayConfig",
    "ReplayConfig",
    "RunConfig",
    "RuntimeConfig",
    "SamplerConfig",
    "ScheduleConfig",
    "WeightsConfig",
]

_WORKERS = ("engine", "rollout", "agent", "reward")  #: kinds of plugin that can have an interpreter of their own


@attrs.frozen(kw_only=True)
class PluginSection:
    """A plugin by name, with the settings that its own schema defines (beside ``name`` in the file)."""

    name: str
    settings: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class DataConfig:
    """Tasks."""

    train: str | None = option(None, help="JSONL file of training tasks")
    eval: str | None = option(None, help="JSONL file of held-out tasks")
    format: TaskFormat = option(factory=TaskFormat, help="how records become tasks; GSM8K's own format by default")
    expert: str | None = option(None, help="JSONL file of an expert's answers, in the same format (mix, mix_chord)")
    experts_per_step: int = option(0, help="answers of the expert in one training batch", validator=ge(0))
    chat_template: str | None = option(None, help="a Jinja chat template in the place of the tokenizer's own")
    prompts_per_step: int = option(32, help="tasks (groups) in one training batch", validator=gt(0))
    runs_per_prompt: int = option(8, help="agent runs per task (the group size)", validator=gt(0))
    max_prompt_tokens: int | None = option(
        None,
        help="longest prompt allowed, in tokens: a longer one ends the run; null: what leaves room for a response",
        validator=optional(gt(0)),
    )


@attrs.frozen(kw_only=True)
class PartConfig:
    """A registered part by name, with its options."""

    name: str | None = option(None, help="null: the bundle's own part")
    options: Mapping[str, Any] = option(
        factory=dict, help="the part's own settings, beside those of the bundle where it is the bundle's part"
    )


@attrs.frozen(kw_only=True)
class KLConfig:
    """A KL penalty to the reference policy, in the loss or in the reward."""

    name: str = option(
        "k3",
        help="the estimator: k1, k2, k3, abs, low_var_kl, k3_corrected, or the value of one with k2's gradient: k1+, "
        "k3+, abs+, low_var_kl+",
    )
    coefficient: float = option(0.0, help="0: off, no reference model is loaded for it", validator=ge(0.0))
    in_reward: bool = option(False, help="take the penalty off the reward of each token, not into the loss")
    target: float | None = option(
        None,
        help="KL per token that an adaptive controller steers the coefficient to; null: constant",
        validator=optional(gt(0.0)),
    )
    horizon: float = option(10000.0, help="samples over which the controller corrects", validator=gt(0.0))


@attrs.frozen(kw_only=True)
class AlgorithmConfig:
    """A named bundle of parts, any of which can be replaced."""

    name: str = option("grpo", help="the bundle; `jackfield algorithms list --kind algorithm` shows them")
    advantages: PartConfig | None = option(None, help="advantage estimator in the place of the bundle's")
    loss: PartConfig | None = option(None, help="policy loss in the place of the bundle's")
    aggregation: str | None = option(None, help="how token losses are averaged, in the place of the bundle's")
    kl: KLConfig = option(factory=KLConfig, help="KL penalty to the reference policy")
    entropy_coefficient: float = option(0.0, help="weight of the entropy bonus")
    mini_batches: int = option(1, help="optimizer steps that one batch is split into", validator=gt(0))
    epochs: int = option(1, help="passes over one batch", validator=gt(0))
    old_log_probs: Literal["auto", "rollout", "engine"] = option(
        "auto",
        help="the policy before the update, which ratios are taken to: log-probs of the rollout server (bypass), or "
        "recomputed by the engine (decoupled); auto: engine where the correction is on",
    )
    correction: Correction = option(factory=Correction, help="off-policy correction")
    shaping: Shaping = option(factory=Shaping, help="what happens to rewards before the advantages")
    dynamic_sampling: bool | None = option(
        None, help="replace groups whose rewards are all equal; null: as the bundle has it"
    )
    reward_dimensions: tuple[str, ...] = option(
        (), help="metrics of the reward that are rewards of their own (gdpo); score is the score itself"
    )


@attrs.frozen(kw_only=True)
class CriticConfig:
    """The critic of algorithms that have one (ppo): a model with a value head, trained beside the policy."""

    path: str | None = option(None, help="its Hugging Face folder; null: the policy's")
    optimizer: OptimizerSpec = option(factory=OptimizerSpec, help="AdamW and its learning-rate schedule")
    clip: float | None = option(
        0.2,
        help="how far from the values before the update a prediction may get better; null: off",
        validator=optional(gt(0.0)),
    )
    warmup_steps: int = option(0, help="first steps in which the critic is trained alone", validator=ge(0))


@attrs.frozen(kw_only=True)
class ScheduleConfig:
    """When batches are generated, trained on and published."""

    steps: int = option(100, help="training steps", validator=gt(0))
    sync_interval: int = option(1, help="k: weights are published every k steps", validator=gt(0))
    sync_offset: int = option(0, help="o: how many batches the explorer may run ahead", validator=ge(0))
    max_refills: int = option(
        8,
        help="times that one failed group of a batch is replaced; and groups in a row that may end without any score",
        validator=ge(0),
    )
    reward_attempts: int = option(
        2, help="times that a sample is scored before its reward counts as failed", validator=gt(0)
    )


@attrs.frozen(kw_only=True)
class CheckpointConfig:
    """From what the same command goes on after the run has ended, however it ended."""

    every: int = option(
        20, help="checkpoint every n steps, at the next synchronisation when that is later; 0: never", validator=ge(0)
    )
    keep: int = option(2, help="how many of the newest checkpoints stay", validator=gt(0))
    at_end: bool = option(True, help="checkpoint after the last step, too")
    resume: bool = option(
        True, help="go on from the folder's newest checkpoint; false: remove what is there and begin anew"
    )


@attrs.frozen(kw_only=True)
class WeightsConfig:
    """How replicas get the weights of each synchronisation."""

    kind: Literal["full", "delta"] = option(
        "full",
        help="full: all of them; delta: the blocks of bytes that have changed since the last synchronisation. A LoRA "
        "adapter (model.lora) is sent alone in any case",
    )
    block_bytes: int = option(
        4096, help="of a block of a delta; the engine remembers 8 bytes for each", validator=ge(8)
    )
    without_base: Literal["full", "stop"] = option(
        "full",
        help="where a replica does not hold the weights that a delta changes (it has just come, or was started "
        "again); full: everything is sent; stop: the run ends (weights.base)",
    )
    dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn"] | None = option(
        None,
        help="what a replica casts the weights to as it loads them; the engine sends its own. float8_e4m3fn: weights "
        "of linear layers, with one scale per tensor, the rest in bfloat16; null: model.dtype",
    )


@attrs.frozen(kw_only=True)
class CanaryConfig:
    """Whether replicas compute what the engine computes: each generates a few tokens after every synchronisation."""

    tokens: int = option(2, help="that each replica generates and the engine scores; 0: no canary", validator=ge(0))
    bound: float | None = option(
        None,
        help="mean distance of a replica's log-probs from the engine's, in nats; null: 0.01, 0.25 where anything "
        "computes with fewer bits than float32, 0.5 with weights.dtype: float8_e4m3fn",
        validator=optional(gt(0.0)),
    )
    beyond: Literal["stop", "correct"] = option(
        "stop",
        help="stop: the run ends (weights.canary); correct: a warning, and importance weights correct for it "
        "(algorithm.correction, which this switches on)",
    )


@attrs.frozen(kw_only=True)
class SamplerConfig:
    """Which of the groups that may be used are taken."""

    name: str = option("sequential", help="sequential, random, priority, or one that a plugin offers")
    options: Mapping[str, Any] = option(factory=dict, help="the sampler's own settings")


@attrs.frozen(kw_only=True)
class ReplayConfig(Reuse):
    """Groups that were trained on before, once more beside the new ones of each batch."""

    ratio: float = option(help="such groups for each new one, as far as there are any", validator=gt(0.0))
    capacity: int | None = option(
        256, help="used groups that are kept, the sampler's first choices; null: all", validator=optional(gt(0))
    )
    sampler: SamplerConfig = option(
        factory=partial(SamplerConfig, name="priority"), help="which of them are trained on again"
    )


@attrs.frozen(kw_only=True)
class MixConfig(Reuse):
    """Groups of another partition beside the new ones of each batch."""

    ratio: float = option(help="such groups for each new one", validator=gt(0.0))
    rows: str = option(
        help="what is put into the partition before the first step: a .jsonl or .parquet file of rows, or the folder "
        "of a queue (`jackfield queue import`) or run"
    )
    sampler: SamplerConfig = option(factory=SamplerConfig, help="which of them are trained on")


@attrs.frozen(kw_only=True)
class ControllerConfig:
    """The queue's controller as a process of its own: `jackfield queue serve`."""

    address: str | None = option(
        None,
        help="the address.json of the controller that the run connects to; null: the controller is part of the run's "
        "process, and with --role the one that is served for the same folder",
    )
    host: str = option("127.0.0.1", help="where it listens; beyond loopback with CURVE, for who has the address.json")
    port: int = option(0, help="where it listens; 0: any port that is free", validator=and_(ge(0), le(65535)))
    rewards: Literal["train", "apart"] = option(
        "train", help="who scores samples: the role train, or a process of its own, --role reward"
    )
    silence: float = option(
        30.0,
        help="seconds after which controller and run take each other for dead when nothing is heard",
        validator=gt(0.0),
    )


@attrs.frozen(kw_only=True)
class QueueConfig:
    """What a batch has beside the groups of its step, where the controller is, and what survives a crash."""

    durable: bool = option(
        False,
        help="a run that was killed keeps the rows that it had made since its newest checkpoint; needs a durable "
        "transfer_queue (sql, redis)",
    )
    controller: ControllerConfig = option(factory=ControllerConfig, help="a controller in a process of its own")
    max_rows: int | None = option(
        None,
        help="rows in the queue, above which explorers wait; those of the batch that the trainer waits for are let in, "
        "and rows count until the checkpoint after their step; null: no limit",
        validator=optional(gt(0)),
    )
    max_bytes: int | None = option(None, help="the same in bytes of values; null: no limit", validator=optional(gt(0)))
    replay: ReplayConfig | None = option(None, help="train again on groups that were trained on before; null: never")
    expert: MixConfig | None = option(
        None, help="rows that an expert wrote, for a loss with an expert (mix, mix_chord); null: none"
    )
    human: MixConfig | None = option(
        None, help="rows with rewards from elsewhere, treated like the policy's own; null: none"
    )


@attrs.frozen(kw_only=True)
class EvaluationSampling(SamplingParams):
    """How evaluation answers are drawn: greedy unless told otherwise."""

    temperature: float = option(0.0, help="0: greedy", validator=ge(0.0))


@attrs.frozen(kw_only=True)
class EvaluationConfig:
    """Runs over the held-out tasks."""

    every: int = option(
        0,
        help="evaluate every n steps, at the next synchronisation when that is later, and at both ends; 0: never",
        validator=ge(0),
    )
    tasks: int | None = option(None, help="use the first n held-out tasks; null: all")
    sampling: EvaluationSampling = option(factory=EvaluationSampling, help="how answers are drawn")


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
    placement: Literal["shared", "separate"] = option(
        "shared", help="shared: engine and replicas take turns on the same places; separate: each has its own"
    )
    cpus_per_place: float = option(1.0, help="CPUs of the place of a rank or replica", validator=ge(0.0))
    gpus_per_place: float = option(0.0, help="GPUs of the place of a rank or replica", validator=ge(0.0))
    recoveries: int = option(
        3,
        help="times that a run goes on from its newest checkpoint after a rank, a replica or the storage worker died",
        validator=ge(0),
    )


def _are_kinds(_: Any, attribute: attrs.Attribute[Any], value: Mapping[str, str]) -> None:
    for kind in value:
        if kind not in _WORKERS:
            raise ValueError(f"{kind!r} is not one of {', '.join(_WORKERS)}")


@attrs.frozen(kw_only=True)
class EnvironmentConfig:
    """What ``jackfield env create NAME FILE`` makes; Jackfield and the plugins that run there come along."""

    folder: str | None = option(None, help="where it is; null: environments/NAME")
    python: str | None = option(None, help="the interpreter that makes it; null: the one that runs Jackfield")
    requires: tuple[str, ...] = option((), help="what pip installs there")
    constraints: str | None = option(None, help="a file of versions that pip keeps to")
    without: tuple[str, ...] = option((), help="packages that are removed afterwards, where something has brought them")


@attrs.frozen(kw_only=True)
class RuntimeConfig:
    """Where workers live."""

    name: Literal["inline", "ray"] = option(
        "inline", help="inline: everything in this process; ray: each worker in a process of a Ray cluster"
    )
    device: str = option("cpu", help="torch device of engine and rollout server")
    threads: int | None = option(None, help="torch threads; null: as torch decides")
    rollout_replicas: int = option(1, help="rollout servers", validator=gt(0))
    replica_restarts: int = option(
        3,
        help="how often a rollout server with a process of its own is started again when it dies",
        validator=ge(0),
    )
    metrics_port: int | None = option(
        None,
        help="where the controller shows how each replica is, for Prometheus, on loopback; 0: a free port; null: "
        "nowhere; needs jackfield[serve]",
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


@attrs.frozen(kw_only=True)
class DeadlineConfig:
    """The longest that a run waits, in seconds, before it fails and names who was waited for."""

    start: float = option(600.0, help="for a rollout server or a reward agent to start", validator=gt(0.0))
    engine: float = option(3600.0, help="for one call of an engine: loading, a pass, a checkpoint", validator=gt(0.0))
    generate: float = option(600.0, help="for one agent run", validator=gt(0.0))
    reward: float = option(60.0, help="for one score", validator=gt(0.0))
    batch: float = option(1800.0, help="for the batch of the next step", validator=gt(0.0))
    sync: float = option(600.0, help="for one weight synchronisation", validator=gt(0.0))
    drain: float = option(
        60.0,
        help="for the requests of a replica that is removed to end; then they are generated again on the others",
        validator=ge(0.0),
    )


@attrs.frozen(kw_only=True)
class RunConfig:
    """A whole run."""

    name: str = option("run", help="shown in progress, curves and tables")
    folder: str = option("runs/run", help="where everything that the run writes goes")
    seed: int = option(0, help="fixes a synchronous run")
    mode: Literal["both", "train"] = option("both", help="both: explore and train; train: on the data's own answers")
    model: ModelSpec = option(help="the policy")
    data: DataConfig = option(factory=DataConfig, help="tasks")
    sampling: SamplingParams = option(factory=SamplingParams, help="how training responses are drawn")
    algorithm: AlgorithmConfig = option(factory=AlgorithmConfig, help="advantages, loss, KL")
    optimizer: OptimizerSpec = option(factory=OptimizerSpec, help="AdamW and its learning-rate schedule")
    critic: CriticConfig = option(factory=CriticConfig, help="value model")
    schedule: ScheduleConfig = option(factory=ScheduleConfig, help="steps and synchronisation")
    queue: QueueConfig = option(factory=QueueConfig, help="replay, mixing, and where the controller is")
    evaluation: EvaluationConfig = option(factory=EvaluationConfig, help="held-out tasks")
    checkpoint: CheckpointConfig = option(factory=CheckpointConfig, help="resuming")
    weights: WeightsConfig = option(factory=WeightsConfig, help="how replicas get them")
    canary: CanaryConfig = option(factory=CanaryConfig, help="log-probs of replicas against the engine's")
    runtime: RuntimeConfig = option(factory=RuntimeConfig, help="where workers live")
    deadlines: DeadlineConfig = option(factory=DeadlineConfig, help="longest waits")
    environments: Mapping[str, EnvironmentConfig] = option(
        factory=dict, help="by name: what `jackfield env create NAME FILE` makes, for runtime.interpreters"
    )
    engine: PluginSection = option(
        factory=partial(PluginSection, name="fsdp"), help="the engine plugin, and its own settings"
    )
    rollout: PluginSection = option(
        factory=partial(PluginSection, name="transformers"), help="the rollout plugin, and its own settings"
    )
    agent: PluginSection = option(
        factory=partial(PluginSection, name="single_turn"), help="the agent plugin, and its own settings"
    )
    reward: PluginSection = option(
        factory=partial(PluginSection, name="rules"), help="the reward plugin, and its own settings"
    )
    transfer_queue: PluginSection = option(
        factory=partial(PluginSection, name="memory"), help="the transfer_queue plugin, and its own settings"
    )
    checkpoint_engine: PluginSection = option(
        factory=partial(PluginSection, name="auto"),
        help="the checkpoint_engine plugin, and its own settings; auto: in_process, nccl with runtime.name: ray, "
        "and shared where the rollout server has an interpreter of its own",
    )
    observe: ObserveConfig = option(factory=ObserveConfig, help="what the run writes and shows")
