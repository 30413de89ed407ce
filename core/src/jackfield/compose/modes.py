"""Modes, and the runtimes and placements on which each works: ``docs/reference/modes.md`` is generated from this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs

from jackfield.config import RunConfig, as_plain
from jackfield.config.data import sets_of
from jackfield.errors import ConfigError, JackfieldError
from jackfield.files import digest_of
from jackfield.settings import flatten
from jackfield.trainer.role import RoleName

T = TypeVar("T")
MODES = ("online", "offline", "train", "explore")
RUNTIMES = ("inline", "ray", "distributed")  #: distributed: roles in processes of their own
PLACEMENTS = ("shared", "separate")
ROLES = {"online": ("train", "explore", "reward"), "train": ("train", "reward"), "explore": ("explore", "reward")}

#: What the explorers of a run have in common; their tasks, agents and other sampling parameters may differ.
_SHARED = "mode model data.groups_per_batch data.rollouts_per_group data.expert_samples_per_batch algorithm schedule"
_OWN = "model.path schedule.until schedule.rollouts_in_flight schedule.partial_rollout"
_EXACT = "sampling.temperature sampling.top_p sampling.top_k sampling.min_p"  #: unless log-probs may differ
_DESCRIPTIONS = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def why_not(mode: str, runtime: str, placement: str | None) -> tuple[str, str, str] | None:
    """Return setting, reason and what is expected instead where a combination does not work; None: it works."""
    if runtime == "distributed" and mode not in ROLES:
        return "mode", "one process trains on answers from the data: there are no roles", "online, train or explore"
    if placement == "shared" and mode == "explore":
        return "cluster.placement", "nothing is trained that could share devices with replicas", "separate"
    if placement == "shared" and (mode, runtime) == ("online", "distributed"):
        return "cluster.placement", "an explorer's process has devices of its own", "separate"
    return None


def check_mode(config: RunConfig, role: RoleName = "all") -> None:
    """Refuse a mode on a runtime or placement on which it does not work, and settings of another mode or role."""
    mode, data, placement, trains = config.mode, config.data, config.cluster.placement, config.mode == "train"
    if no := why_not(mode, config.cluster.name if role == "all" else "distributed", placement):
        raise config.refusal(*no)
    mixed = [name for name, each in attrs.asdict(config.mixing, recurse=False).items() if each is not None]
    missing = trains and data.samples is None and config.queue.address is None
    keeps, until, full = mode == "explore", config.schedule.until, config.queue.max_samples or config.queue.max_bytes
    unknown = until.score is not None and not config.evaluation.every
    lost = keeps and config.queue.address is None and not config.checkpoint.at_end
    length, buffer = config.algorithm.shaping.overlong_length, config.algorithm.shaping.overlong_buffer
    alone, apart = role == "all", config.queue.rewards == "distributed"  # scored in a process of its own
    service, few = config.reward_service.on_failure, data.minimum_rows
    drops = service == "drop_group" and (config.schedule.mode == "async" or config.schedule.stream_mini_batches)
    chooses, weighted = data.curriculum is not None, any(each.weight for each in sets_of(data.train))
    alone_mean = service == "group_mean" and data.rollouts_per_group == 1
    for wrong, where, what, expected in (
        (
            drops,
            "reward_service.on_failure",
            "steps take a fixed number of groups",
            "refill, or mode: sync without stream_mini_batches",
        ),
        (alone_mean, "reward_service.on_failure", "a group of one rollout has no mean", "another policy"),
        (
            few and few > data.rollouts_per_group,
            "data.minimum_rows",
            "a group has fewer rollouts",
            f"at most {data.rollouts_per_group}",
        ),
        (role not in ("all", *ROLES.get(mode, ())), "mode", f"mode {mode} has no role {role}", "another role or mode"),
        (alone and apart, "queue.rewards", "one process scores its samples itself", "train, or --role for each role"),
        (role == "reward" and not apart, "queue.rewards", "the role train scores unless all have it", "distributed"),
        (not alone and config.weights.kind != "full", "weights.kind", "explorers that join need whole weights", "full"),
        (data.samples and not trains, "data.samples", "samples from elsewhere are trained on alone", "mode: train"),
        (data.epochs > 1 and not trains, "data.epochs", "it counts the uses of data.samples", "1, or mode: train"),
        (
            chooses and mode != "online",
            "data.curriculum",
            "it learns from rewards of this run",
            "null, or mode: online",
        ),
        (chooses and not alone, "data.curriculum", "explorers elsewhere do not know what it chose", "null"),
        (
            chooses and config.queue.durable,
            "queue.durable",
            "data.curriculum would not hear kept rewards again",
            "false",
        ),
        (chooses and data.order is not None, "data.order", "data.curriculum chooses the tasks", "null"),
        (chooses and weighted, "data.train", "data.curriculum chooses the tasks", "sets without weights"),
        (missing, "data.samples", "there are no samples", "a file or folder, or a filled queue's queue.address"),
        (mixed and trains, f"mixing.{mixed and mixed[0]}", "all samples are in data.samples, with data.epochs", "null"),
        (mixed and keeps, f"mixing.{mixed and mixed[0]}", "nothing is trained on", "null"),
        (data.share is not None and alone, "data.share", "no explorer joins without --role explore", "null"),
        (lost, "checkpoint.at_end", "the samples would be lost with the run", "true"),
        (keeps and full, "queue.max_samples", "nothing takes samples out of the queue", "null, max_bytes, too"),
        (keeps and until.reward is not None, "schedule.until.reward", "no step has a mean reward", "score, or null"),
        (keeps and config.queue.archive, "queue.archive", "no sample is consumed; export the run's queue", "null"),
        (unknown, "evaluation.every", "schedule.until.score needs it", "above 0"),
        (length and length < buffer, "algorithm.shaping.overlong_buffer", "it begins below 0", f"at most {length}"),
        (placement == "separate" and config.cluster.offload, "cluster.offload", "no side is ever idle", "false"),
    ):
        if wrong:
            raise config.refusal(where, what, expected)


def check_stages(stages: Mapping[str, RunConfig], check: Callable[[RunConfig], T]) -> dict[str, T]:
    """Return what a check finds for each stage. An error names its stage, if there are several."""
    found, (*_, last) = dict[str, T](), stages
    for name, config in stages.items():
        try:
            if name != last and (config.mode == "explore" or config.model.lora):
                where = "mode" if config.mode == "explore" else "model.lora"
                raise config.refusal(where, "the next stage starts from a whole model", "such a stage comes last")
            found[name] = check(config)
        except JackfieldError as error:
            error.where = f"stage {name}: {error.where}" if name else error.where
            raise
    return found


def shared_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that all explorers of a run share, by path, and digests of its model's description."""
    names = f"{_SHARED} {_EXACT if config.log_prob_check.on_mismatch == 'stop' else ''}"
    found = {path: each for path, each in flatten(as_plain(config)).items() if _within(path, names)}
    files = [Path(config.model.path, name) for name in _DESCRIPTIONS]
    digests = {f"model.path, {file.name}": digest_of(file) for file in files if file.is_file()}
    return {path: each for path, each in found.items() if not _within(path, _OWN)} | digests


def _within(path: str, names: str) -> bool:
    return any(f"{path}.".startswith(f"{name}.") for name in names.split())


def check_joins(config: RunConfig, shared: Mapping[str, Any]) -> None:
    """Refuse to join a run whose shared settings this explorer does not have."""
    own = shared_settings(config)
    for path in (path for path, value in shared.items() if own.get(path) != value):
        what, fix = "this explorer does not fit the run", "give all processes of the run this setting"
        raise ConfigError(what, where=path, expected=shared[path], found=own.get(path), fix=fix)
