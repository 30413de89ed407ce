"""The section ``reward_service``: how a reward is called."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs.validators import ge, gt, le, optional

from jackfield.errors import ConfigError
from jackfield.settings import option


@attrs.frozen(kw_only=True)
class RewardServiceConfig:
    """Limits, retries and cache of a reward, and what happens to a sample without a score.

    Limits hold for all runs that use one `jackfield rewards serve`; in a cluster, each of `ray.reward_workers` has its
    share of them.
    """

    concurrency: int | None = option(None, "scores in progress at a time; null: as many as the reward handles", gt(0))
    requests_per_second: float | None = option(None, "requests that begin per second; null: no limit", gt(0.0))
    tokens_per_minute: float | None = option(None, "tokens that a judge reads and writes; null: no limit", gt(0.0))
    retries: int = option(1, "how often a sample is scored again before its reward fails", ge(0))
    backoff_seconds: float = option(
        0.5, "wait before the first retry, doubled for each further one, times a random factor of 0.5 to 1", ge(0.0)
    )
    longest_backoff_seconds: float = option(
        60.0, "longest wait before a retry that the reward did not ask for", ge(0.0)
    )
    hedge_seconds: float | None = option(
        None, "start a second call beside one that takes longer; the first answer counts; null: never", gt(0.0)
    )
    hedged: float = option(0.05, "most second calls per first call", [gt(0.0), le(1.0)])
    breaker_failures: int | None = option(
        16, "failures in a row after which one call tries whether the service works again; null: never", optional(gt(0))
    )
    breaker_seconds: float = option(5.0, "wait before that try, doubled for each further one up to ten times", gt(0.0))
    outage_seconds: float = option(
        600.0, "on_failure retry, and an open breaker: time without any score after which waiting samples fail", gt(0.0)
    )
    on_failure: Literal["refill", "retry", "group_mean", "drop_group", "stop"] = option(
        "refill",
        "a sample without a score; refill: it leaves its group, which is made again if too few are left for "
        "data.minimum_rows; retry: it is scored until it has one; group_mean: the mean of its group; "
        "drop_group: the batch goes on without its group; stop: the run ends",
    )
    cache: str | None = option(
        None, "folder of scores that are used again, also by other runs, for the same request, settings and version"
    )
    keep: bool | None = option(
        None,
        "keep prompts, responses, scores and explanations as Parquet in FOLDER/scores, with jackfield-archive; "
        "null: if it is installed",
    )

    def __attrs_post_init__(self) -> None:
        if self.hedge_seconds is None and self.hedged != attrs.fields(RewardServiceConfig).hedged.default:
            what, fix = "hedged has no effect without hedge_seconds", "set hedge_seconds, or remove hedged"
            raise ConfigError(what, where="reward_service.hedged", found=self.hedged, fix=fix)
