"""What a schedule does: settings that it cannot have, and its description in sentences."""

from __future__ import annotations

import attrs

from jackfield.algorithms import part
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.config.schedule import ScheduleConfig
from jackfield.config.sections import RunConfig
from jackfield.trainer.role import RoleName, Schedule


def check_schedule(config: RunConfig, algorithm: ResolvedAlgorithm) -> None:
    """Refuse settings of the schedule that have no effect or do not work together."""
    schedule, parts, k = config.schedule, config.algorithm.mini_batches, config.schedule.sync_interval
    is_async, streams, most = schedule.mode == "async", schedule.stream_mini_batches, schedule.max_staleness
    groups, correction = config.data.groups_per_batch + algorithm.experts, algorithm.correction
    late, scope = schedule.on_stale == "train_corrected", config.algorithm.scope
    ahead = is_async or k > 1 or schedule.sync_offset  # rollouts may run while a step trains, on the same devices:
    interrupts = ahead and config.cluster.placement != "separate"
    whole = [name for name, compares in _of_whole_batch(algorithm).items() if compares]
    idle = ["mode", "stream_mini_batches", "partial_rollout", "sync_interval", "sync_offset"]
    idle += ["rollouts_in_flight"] * (config.mode != "explore")
    for name in () if config.mode == "online" else idle:
        if getattr(schedule, name) != getattr(ScheduleConfig(), name):
            raise config.refusal(f"schedule.{name}", f"in mode {config.mode} it has no effect", "mode: online")
    per_part = "algorithm.scope: mini_batch, which computes it for each mini-batch; or false"
    weighed = "wait, drop, algorithm.correction.enabled: true, decoupled_ppo, or algorithm.old_log_probs: rollout"
    no_part = f"{groups} groups are not split into {parts} mini-batches of whole groups"
    no_scope = "it is for schedule.stream_mini_batches and parts of the algorithm that compare a whole batch"
    stream, by_token = "schedule.stream_mini_batches", correction is not None and correction.by_token
    for wrong, where, what, expected in (
        (is_async and schedule.sync_offset, "schedule.sync_offset", "in mode async max_staleness paces explorers", "0"),
        (not is_async and most is not None, "schedule.max_staleness", "it belongs to mode async", "null"),
        (not is_async and schedule.on_stale != "wait", "schedule.on_stale", "it belongs to mode async", "wait"),
        (most is not None and most < k - 1, "schedule.max_staleness", "no step follows the first", f"from {k - 1}"),
        (streams and is_async, stream, "in mode async a step takes groups as they come", "false"),
        (streams and not 2 <= parts <= groups, "algorithm.mini_batches", no_part, f"2 to {groups}; or {stream}: false"),
        (streams and whole and scope == "batch", stream, f"{' and '.join(whole)} needs the whole batch", per_part),
        (late and not _corrects(algorithm), "schedule.on_stale", "nothing corrects for older weights", weighed),
        (scope == "mini_batch" and not (streams and whole), "algorithm.scope", no_scope, "batch"),
        (schedule.partial_rollout and not interrupts, "schedule.partial_rollout", "training interrupts none", "false"),
        (by_token and config.mixing.human, "mixing.human", "samples from elsewhere have no weight versions", "null"),
        (is_async and algorithm.experts, "data.expert", "steps would use up its answers first", "null; mixing.expert"),
    ):
        if wrong:
            raise config.refusal(where, what, expected)


def _of_whole_batch(algorithm: ResolvedAlgorithm) -> dict[str, bool]:
    """Return the settings of an algorithm for whose values a whole batch is compared."""
    name, normalized = algorithm.advantages, algorithm.correction is not None and algorithm.correction.batch_normalize
    estimates = name is not None and part("advantages", name).scope_with(algorithm.advantages_options) == "batch"
    return {f"the estimator {name}": estimates, "algorithm.correction.batch_normalize": normalized}


def _corrects(algorithm: ResolvedAlgorithm) -> bool:
    """Return whether the loss weights tokens by the policy that generated them."""
    by_ratio = algorithm.old_log_probs == "rollout_log_probs" and "old_log_probs" in algorithm.loss_columns
    return by_ratio or algorithm.correction is not None or "rollout_log_probs" in part("loss", algorithm.loss).inputs


def describe(config: RunConfig, algorithm: ResolvedAlgorithm, role: RoleName = "all") -> list[str]:
    """Return sentences about a schedule: how stale samples are, who waits for whom, and what overlaps."""
    settings, data = config.schedule, config.data
    schedule = Schedule(**attrs.asdict(settings, recurse=False), explores=config.mode == "online")
    if config.mode == "explore":
        return [f"{settings.steps} batches of {data.groups_per_batch} groups are generated with one model and scored."]
    if config.mode == "train":
        return ["Steps train on samples that were collected before: none is too stale."]
    if not schedule.explores:
        return [f"{settings.steps} steps train on answers from the data; nothing is generated, and nothing is stale."]
    bound, k, groups = schedule.staleness_bound, settings.sync_interval, data.groups_per_batch
    streams, waits = settings.stream_mini_batches, schedule.is_async and settings.on_stale == "wait"
    start, older = f"b - {bound}" if bound else "b", "one step" if bound == 1 else f"{bound} steps"
    late = {"train_corrected": "trained on late and corrected", "drop": "generated again"}.get(settings.on_stale)
    in_flight = settings.rollouts_in_flight or groups * data.rollouts_per_group
    room = "no rollout runs" if in_flight == 1 else f"fewer than {in_flight} rollouts run"
    shared, partial = role == "all" and config.cluster.shares_devices, settings.partial_rollout
    passes = algorithm.reference or algorithm.critic or algorithm.recompute_old_log_probs
    which = ", any that are complete, the oldest weights first" if schedule.is_async else ": step t on batch t"
    said = {
        f"A step trains on {groups} groups of {data.rollouts_per_group} rollouts{which}.": True,
        f"Replicas get new weights after every {'step' if k == 1 else f'{k} steps'}.": True,
        "Every token is of the weights that its step starts from.": not bound,
        f"A token's weights are at most {older} older than those that its step starts from.": bound,
        f"The explorer waits with batch b until replicas have the weights that step {start} starts from.": True,
        "The trainer waits for a straggler only when it would exceed that bound at the next step.": waits,
        f"The trainer waits for no straggler: a group beyond the bound is {late}, and counted.": late,
        f"A group starts while {room}, so a straggler delays only its own group.": True,
        "Engine and replicas take turns on the same devices.": shared,
        "Nothing overlaps with rollouts: replicas wait for each update, and the engine for each batch.": not bound,
        "Rollouts of the next batches overlap with the wait for rewards, not with updates.": bound and shared,
        "Rollouts of the next batches overlap with log-probs, updates and the wait for rewards.": bound and not shared,
        "An update interrupts the rollouts that run; they continue from their tokens.": partial and shared,
        "schedule.partial_rollout has no effect, because rollouts have own devices.": partial and not shared,
        f"Each of {config.algorithm.mini_batches} updates starts when the rewards of its groups are there.": streams,
        "Log-probs and values are computed once per batch, while its rewards are pending.": streams and passes,
        "Updates start when all rewards of the step are there.": not streams,
    }
    return [sentence for sentence, holds in said.items() if holds]
