"""The built-in algorithm parts against slow fp64 references written from the papers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.abc.engine import TokenOutput
from jackfield.algorithms import LossSpec, advantages, part, policy_loss, register, resolve_loss
from jackfield.algorithms.losses import aggregate
from jackfield.algorithms.shaping import kl
from jackfield.errors import ConfigError
from jackfield_testing import refused

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")


def grpo_reference(rewards: list[float], groups: list[int], normalize_by_std: bool = True) -> list[float]:
    """A_i = (R_i - mean) / (std + 1e-6), row by row; 0 for a group of one."""
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        own = [other for other, number in zip(rewards, groups, strict=True) if number == group]
        mean = math.fsum(own) / len(own)
        if len(own) == 1:
            result.append(0.0)
            continue
        std = math.sqrt(math.fsum((other - mean) ** 2 for other in own) / (len(own) - 1))
        result.append((reward - mean) / (std + 1e-6) if normalize_by_std else reward - mean)
    return result


def batch(rows: int = 6, length: int = 5, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(rows, length, generator=generator, dtype=torch.float64)

    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[:, 0] = True
    old = -normal().abs()
    return {
        "log_probs": old + 0.4 * normal(),
        "old_log_probs": old,
        "ref_log_probs": old + 0.1 * normal(),
        "advantages": normal(),
        "response_mask": mask,
    }


@settings(deadline=None)
@given(
    rewards=st.lists(st.sampled_from([0.0, 0.1, 1.0, -2.5]), min_size=1, max_size=12),
    groups=st.integers(1, 4),
    normalize_by_std=st.booleans(),
)
def test_grpo_equals_the_reference(rewards: list[float], groups: int, normalize_by_std: bool) -> None:
    ids = [index % groups for index in range(len(rewards))]
    token_rewards = torch.zeros(len(rewards), 3, dtype=torch.float64)
    token_rewards[:, 1] = torch.tensor(rewards, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0]] * len(rewards), dtype=torch.bool)
    found, returns = advantages(
        "grpo",
        token_rewards=token_rewards,
        response_mask=mask,
        group_ids=torch.tensor(ids),
        normalize_by_std=normalize_by_std,
    )
    expected = torch.tensor(grpo_reference(rewards, ids, normalize_by_std), dtype=torch.float64)
    torch.testing.assert_close(found, expected[:, None] * mask, rtol=1e-9, atol=1e-9)
    assert torch.equal(found, returns)


def test_grpo_gives_equal_rewards_no_advantage_in_float32() -> None:
    """The rounding of the mean must not be blown up by a standard deviation of 0."""
    token_rewards = torch.full((7, 1), 0.1)
    found, _ = advantages(
        "grpo", token_rewards=token_rewards, response_mask=torch.ones(7, 1), group_ids=torch.zeros(7, dtype=torch.int64)
    )
    assert float(found.abs().max()) < 1e-6


def test_advantages_name_the_row_of_a_nan() -> None:
    rewards = torch.tensor([[0.0], [math.nan]])
    with pytest.raises(ConfigError) as caught:
        advantages("grpo", token_rewards=rewards, response_mask=torch.ones(2, 1), group_ids=torch.tensor([0, 0]))
    assert ("algorithm.not-finite", "row 1") == (caught.value.code, caught.value.where)


def ppo_reference(data: dict[str, torch.Tensor], low: float, high: float, dual: float | None) -> float:
    """Token mean of PPO's clipped objective, token by token."""
    total, count = 0.0, 0
    for row in range(len(data["log_probs"])):
        for token in range(data["log_probs"].shape[1]):
            if not data["response_mask"][row, token]:
                continue
            ratio = math.exp(float(data["log_probs"][row, token] - data["old_log_probs"][row, token]))
            advantage = float(data["advantages"][row, token])
            objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
            if dual is not None and advantage < 0:
                objective = max(objective, dual * advantage)
            total -= objective
            count += 1
    return total / count


@pytest.mark.parametrize("dual", [None, 1.2, 3.0])
@pytest.mark.parametrize("seed", range(4))
def test_ppo_equals_the_reference(seed: int, dual: float | None) -> None:
    data = batch(rows=8, seed=seed)
    data["log_probs"] = data["log_probs"] * 2
    counts = {"global_tokens": int(data["response_mask"].sum()), "global_sequences": 8}
    loss, _ = policy_loss(
        "ppo",
        log_probs=data["log_probs"],
        old_log_probs=data["old_log_probs"],
        advantages=data["advantages"],
        response_mask=data["response_mask"],
        clip_low=0.1,
        clip_high=0.3,
        clip_dual=dual,
        **counts,
    )
    assert ppo_reference(data, 0.1, 0.3, dual) == pytest.approx(float(loss), rel=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_masked_positions_change_nothing(mode: str) -> None:
    mask = torch.tensor([[1, 0], [1, 1]], dtype=torch.bool)
    values = torch.tensor([[1.0, math.nan], [2.0, 3.0]])
    zeroed = torch.tensor([[1.0, 0.0], [2.0, 3.0]])
    found = aggregate(values, mask, mode, global_tokens=3, global_sequences=2)
    assert float(aggregate(zeroed, mask, mode, global_tokens=3, global_sequences=2)) == float(found)


def test_aggregation_modes_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0], [4.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    found = [float(aggregate(values, mask, mode, global_tokens=3, global_sequences=2)) for mode in AGGREGATIONS]
    assert [7 / 3, 7.0, 3.5, 2.75] == pytest.approx(found)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_kl_estimators_are_unbiased(name: str) -> None:
    """The expectation over the policy, summed exactly over a small vocabulary."""
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    exact = float((policy.exp() * (policy - reference)).sum())
    assert exact == pytest.approx(float((policy.exp() * kl(name, policy, reference)).sum()), rel=1e-12)


def test_k2_and_abs_by_hand() -> None:
    policy, reference = torch.tensor([-1.0]), torch.tensor([-3.0])
    assert [2.0, 2.0] == [float(kl(name, policy, reference)) for name in ("k2", "abs")]


def test_a_nan_log_prob_is_named_unless_it_is_masked() -> None:
    arguments = {"response_mask": torch.tensor([[1, 0]]), "global_tokens": 1, "global_sequences": 1}
    policy_loss("sft", log_probs=torch.tensor([[-1.0, math.nan]]), **arguments)
    with pytest.raises(ConfigError) as caught:
        policy_loss("sft", log_probs=torch.tensor([[math.nan, 0.0]]), **arguments)
    assert "row 0, response token 0" == caught.value.where


def test_an_entropy_bonus_lowers_the_loss() -> None:
    counts = {"global_tokens": 2, "global_sequences": 1}
    spec = LossSpec(name="sft", options={"entropy_coefficient": 0.5}, global_counts=counts)
    loss_function = resolve_loss(spec)
    output = TokenOutput(log_probs=torch.tensor([[-1.0, -2.0]]), entropy=torch.tensor([[0.4, 0.8]]))
    loss, metrics = loss_function(output, {"response_mask": torch.ones(1, 2)})
    assert 1.5 - 0.5 * 0.6 == pytest.approx(float(loss))
    assert 0.6 == pytest.approx(float(metrics["policy/entropy"]))


def test_an_unknown_part_lists_what_there_is() -> None:
    with pytest.raises(ConfigError) as caught:
        part("loss", "pppo")
    assert "algorithm.unknown" == caught.value.code
    assert "did you mean 'ppo'?" in str(caught.value)


def test_two_parts_of_one_name_are_refused() -> None:
    with refused("config.invalid-value"):
        register("kl", "k1", "token")(lambda *_: None)
