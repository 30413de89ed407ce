"""Limits of several reward workers of one run."""

from __future__ import annotations

import pytest

from jackfield.compose.rewards import share_of
from jackfield.config.reward_service import RewardServiceConfig
from jackfield.errors import ConfigError


def test_shares_of_workers_are_the_limits_of_the_run() -> None:
    whole = RewardServiceConfig(concurrency=10, requests_per_second=3.0, tokens_per_minute=900.0)
    share = share_of(whole, 3)
    assert (3, 1.0, 300.0) == (share.concurrency, share.requests_per_second, share.tokens_per_minute)
    assert whole == share_of(whole, 1)
    assert RewardServiceConfig() == share_of(RewardServiceConfig(), 4), "no limit stays none"


def test_more_workers_than_turns_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        share_of(RewardServiceConfig(concurrency=2), 3)
    assert ("config.invalid-value", "reward_service.concurrency") == (caught.value.code, caught.value.where)
