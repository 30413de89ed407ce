"""The capabilities of plugins that the settings of a run need."""

from __future__ import annotations

from jackfield.abc.engine import LoraSpec
from jackfield.compose.resolve import has_images
from jackfield.config import RunConfig
from jackfield.plugins import Registry
from jackfield.trainer.role import RoleName


def check_capabilities(config: RunConfig, registry: Registry, role: RoleName = "all") -> None:
    """Raise ``plugin.capability`` if plugins do not declare the capabilities that the settings need.

    Refuse settings that do not work with an adapter, or with a cluster, whose queue's controller is in the storage.
    """
    served, lora, weights = config.queue.address is not None, config.model.lora is not None, config.weights
    clustered = "cluster.name is ray, where each worker opens the backend: choose zmq, or sql, redis, nixl or ray"
    follows = role != "all" and config.mode == "online"
    float8, delta = weights.dtype == "float8_e4m3fn", weights.kind == "delta"
    model, adapter, optimizer = config.model, config.model.lora or LoraSpec(), config.optimizer
    alone, merged = "a run that trains an adapter sends the adapter alone, as it is", adapter.publish == "merged"
    if lora and not merged and float8:
        raise config.refusal("weights.dtype", alone, "bfloat16, or model.lora.publish: merged")
    if lora and not merged and delta:
        raise config.refusal("weights.kind", alone, "full, or model.lora.publish: merged")
    images, seeing = has_images(config, registry), f"the agent '{config.agent.name}' has it, too"
    if model.router_replay and config.mode == "offline":
        raise config.refusal("model.router_replay", "no server has chosen experts for answers from data", "false")
    variants = adapter.use_dora or adapter.use_rslora
    more = optimizer.name != "adamw" or optimizer.options or optimizer.no_decay or optimizer.lr_factors
    for needed, kind, capability, because in (
        (config.queue.durable, "transfer_queue", "durable", "queue.durable is set"),
        (served, "transfer_queue", "joins", "the queue's controller is in a process of its own"),
        (config.cluster.name == "ray", "transfer_queue", "joins", clustered),
        (config.model.dropout, "engine", "dropout", "model.dropout is set"),
        (lora, "engine", "lora", "model.lora is set"),
        (lora and not merged, "rollout", "weights_adapter", "model.lora is set"),
        (variants, "engine", "lora_variants", "model.lora.use_dora or use_rslora is set"),
        (merged, "engine", "lora_merged", "model.lora.publish is merged"),
        (model.freeze, "engine", "freeze", "model.freeze is set"),
        (model.router_aux_loss, "engine", "router_aux_loss", "model.router_aux_loss is set"),
        (model.router_replay, "engine", "router_replay", "model.router_replay is set"),
        (model.router_replay, "rollout", "router_replay", "model.router_replay is set"),
        (more or optimizer.ema_decay, "engine", "optimizers", "optimizer has more than AdamW with one rate"),
        (config.checkpoint.background, "engine", "checkpoint_background", "checkpoint.background is set"),
        (float8, "rollout", "weights_float8", "weights.dtype is float8_e4m3fn"),
        (delta, "checkpoint_engine", "delta", "weights.kind is delta"),
        (delta, "rollout", "weights_delta", "weights.kind is delta"),
        (follows, "checkpoint_engine", "retains_weights", "explorers come and go (--role)"),
        (config.tools, "agent", "tools", "tools are given"),
        (images, "engine", "multi_modal", seeing),
        (images, "rollout", "multi_modal", seeing),
    ):
        if needed:
            registry.resolve(config.plugins[kind], kind).usable().require(capability, because)
    shared = config.cluster.placement == "shared" or (config.cluster.name == "ray" and config.cluster.shares_devices)
    if weights.in_turns and (config.cluster.offload or shared):
        what = "replicas do not serve while the engine has their devices, so they have no turns"
        raise config.refusal("weights.in_turns", what, "false, or cluster.placement: separate")
    if weights.in_turns and config.cluster.replicas == 1:
        registry.resolve(config.rollout.name, "rollout").usable().require("pause", "weights.in_turns is set")
    if served and config.cluster.name != "inline":
        what = "a controller in a process of its own serves runs whose workers are in their own process"
        raise config.refusal("cluster.name", what, "inline", fix="or leave out queue.address and --role")
