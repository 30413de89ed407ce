"""What a run's first task tells about the settings of ``rules``, before anything is generated."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jackfield.abc.reward import RewardContext, ScoreRequest
from jackfield.errors import RewardError
from jackfield.sdk import structure
from jackfield_reward_rules.judge import Config
from jackfield_reward_rules.reward import RulesReward


def start(truth: str, **settings: Any) -> None:
    example = ScoreRequest(data_source="", solution_str=truth, ground_truth=truth)

    async def main() -> None:
        agent = RulesReward(structure(Config, settings), RewardContext(example=example))
        try:
            await agent.start()
        finally:
            await agent.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("truth", "settings", "found"),
    [
        ("72", {}, "'72'"),  # no final line of GSM8K
        ("(", {"method": "regex"}, "not a regular expression"),
        ("", {"ground_truth_pattern": None, "pattern": None}, "none"),  # every answer would be wrong
        (" ", {"method": "math"}, "none"),
    ],
)
def test_a_ground_truth_that_cannot_be_used_is_refused(truth: str, settings: dict[str, Any], found: str) -> None:
    start(truth, try_first=False, **settings)
    with pytest.raises(RewardError) as caught:
        start(truth, **settings)
    assert "reward.first-task" == caught.value.code
    assert found in str(caught.value.found)


@pytest.mark.parametrize(("truth", "settings"), [("so #### 72", {}), ("72", {"method": "math"})])
def test_one_that_can_be_used_is_not(truth: str, settings: dict[str, Any]) -> None:
    start(truth, **settings)
