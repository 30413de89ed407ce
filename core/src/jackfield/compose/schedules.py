"""What a schedule does: settings that it cannot have, and its description in sentences."""

from __future__ import annotations

import attrs

from jackfield.algorithms import part
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.config.schedule import ScheduleConfig
from jackfield.config.sections import RunConfig
from jackfield.trainer.role import Schedule


def check_schedule(config: RunConfig, algorithm: ResolvedAlgorithm) -> None:
    """Refuse settings of the schedule that have no effect or do not work together."""
    schedule, mini_batches = config.schedule, config.algorithm.mini_batches
    is_async, streams, online = schedule.mode == "async", schedule.stream_mini_batches, config.mode == "online"
    groups = config.data.groups_per_batch + algorithm.experts
    whole = [name for name, kind in _of_whole_batch(algorithm).items() if kind]
    idle = ["mode", "stream_mini_batches", "partial_rollout"] + ["rollouts_in_flight"] * (config.mode != "explore")
    for where in () if online else idle:
        if getattr(schedule, where) != getattr(ScheduleConfig(), where):
            raise config.refusal(f"schedule.{where}", f"in mode {config.mode} it has no effect", "mode: online")
    for wrong, where, what, expected in (
        (is_async and schedule.sync_offset, "sync_offset", "in mode async max_staleness paces the explorers", "0"),
        (not is_async and schedule.max_staleness is not None, "max_staleness", "it belongs to mode async", "null"),
        (not is_async and schedule.on_stale != "wait", "on_stale", "it belongs to mode async", "wait"),
        (
            is_async and schedule.max_staleness is not None and schedule.max_staleness < schedule.sync_interval - 1,
            "max_staleness",
            "no step could follow the first one: its groups would be older than that",
            f"at least sync_interval - 1, {schedule.sync_interval - 1}",
        ),
        (streams and is_async, "stream_mini_batches", "in mode async a step takes groups as they come", "false"),
        (
            streams and not 2 <= mini_batches <= groups,
            "stream_mini_batches",
            f"a batch of {groups} groups is not split into {mini_batches} mini-batches of whole groups",
            f"algorithm.mini_batches from 2 to {groups}",
        ),
        (
            streams and whole and config.algorithm.scope == "batch",
            "stream_mini_batches",
            f"{' and '.join(whole)} needs the whole batch",
            "algorithm.scope: mini_batch, which computes it for each mini-batch; or false",
        ),
        (
            is_async and schedule.on_stale == "train_corrected" and not _corrects(algorithm),
            "on_stale",
            "nothing corrects for weights that are older than the bound",
            "wait or drop; or algorithm.correction.enabled: true, decoupled_ppo, or algorithm.old_log_probs: rollout",
        ),
    ):
        if wrong:
            raise config.refusal(f"schedule.{where}", what, expected)
    if config.algorithm.scope == "mini_batch" and not (streams and whole):
        what = "every part of the algorithm is computed for the mini-batch or the group already"
        what = what if streams else "without schedule.stream_mini_batches there are whole batches"
        raise config.refusal("algorithm.scope", what, "batch")
    if algorithm.correction is not None and algorithm.correction.by_token and config.mixing.human:
        what = "samples from elsewhere have no weight versions by token"
        raise config.refusal(
            "mixing.human", what, "null, or no algorithm.correction.stale_only and max_token_staleness"
        )
    if is_async and algorithm.experts:
        what = "in mode async the steps would use up the expert's answers first"
        raise config.refusal("data.expert_samples_per_batch", what, "0; mixing.expert adds samples to every step")


def _of_whole_batch(algorithm: ResolvedAlgorithm) -> dict[str, bool]:
    """Return the settings of an algorithm for whose values a whole batch is compared."""
    name, normalized = algorithm.advantages, algorithm.correction is not None and algorithm.correction.batch_normalize
    estimates = name is not None and part("advantages", name).scope_with(algorithm.advantages_options) == "batch"
    return {f"the estimator {name}": estimates, "algorithm.correction.batch_normalize": normalized}


def _corrects(algorithm: ResolvedAlgorithm) -> bool:
    """Return whether the loss weights tokens by the policy that generated them."""
    by_ratio = algorithm.old_log_probs == "rollout_log_probs" and "old_log_probs" in algorithm.loss_columns
    return by_ratio or algorithm.correction is not None or "rollout_log_probs" in part("loss", algorithm.loss).inputs


def describe(config: RunConfig, algorithm: ResolvedAlgorithm) -> list[str]:
    """Return sentences about a schedule: how stale samples are, who waits for whom, and what overlaps."""
    settings, data = config.schedule, config.data
    schedule = Schedule(**attrs.asdict(settings, recurse=False), explores=config.mode == "online")
    if config.mode == "explore":
        return [f"{settings.steps} batches of {data.groups_per_batch} groups are generated with one model and scored."]
    if config.mode == "train":
        return ["Steps train on samples that were collected before: none is too stale, and staleness is counted."]
    if not schedule.explores:
        return [f"{settings.steps} steps train on answers from the data; nothing is generated, and nothing is stale."]
    bound, k, groups = schedule.staleness_bound, settings.sync_interval, data.groups_per_batch
    every = "every step" if k == 1 else f"every {k} steps"
    said = [
        f"A step trains on {groups} groups of {data.rollouts_per_group} rollouts"
        + (", any that are complete, the oldest weights first." if schedule.is_async else ": step t on batch t."),
        f"Replicas get new weights after {every}."
        + (" Every token is of the weights that its step starts from." if not bound else ""),
    ]
    if bound:
        older = "one step" if bound == 1 else f"{bound} steps"
        said.append(f"A token's weights are at most {older} older than those that its step starts from.")
    start = f"b - {bound}" if bound else "b"
    said.append(
        f"The explorer starts batch b when replicas have the weights that step {start} starts from, and waits else."
    )
    if schedule.is_async and settings.on_stale == "wait":
        said.append("The trainer waits for a straggler only when it would exceed that bound at the next step.")
    elif schedule.is_async:
        late = "trained on late and corrected" if settings.on_stale == "train_corrected" else "generated again"
        said.append(f"The trainer waits for no straggler: a group beyond the bound is {late}, and counted.")
    in_flight = settings.rollouts_in_flight or groups * data.rollouts_per_group
    said.append(f"A group starts while fewer than {in_flight} rollouts run, so a straggler delays only its own group.")
    if config.cluster.shares_devices:
        said.append("Engine and replicas take turns on the same devices.")
    if not bound:
        said.append("Nothing overlaps with rollouts: replicas wait for each update, and the engine for each batch.")
    elif config.cluster.shares_devices:
        said.append("Rollouts of the next batches overlap with the wait for rewards, not with updates.")
    else:
        said.append("Rollouts of the next batches overlap with log-probs, updates and the wait for rewards.")
    passes = algorithm.reference or algorithm.recompute_old_log_probs or algorithm.critic
    if settings.stream_mini_batches:
        said.append(
            f"Each of {config.algorithm.mini_batches} updates starts when the rewards of its groups are there, "
            f"while the other groups of the batch wait for theirs."
        )
        if passes:
            said.append("Log-probs and values are computed once per batch, while its rewards are pending.")
    else:
        said.append("Updates start when all rewards of the step are there.")
    return said
