"""KL estimators and controllers, aggregation, and reward shaping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.abc.engine import TokenOutput
from jackfield.algorithms import LossSpec, advantages, names, resolve_loss
from jackfield.algorithms.losses import aggregate
from jackfield.algorithms.settings import KLSettings
from jackfield.algorithms.shaping import (
    clip_rewards,
    dynamic_sampling_filter,
    kl,
    kl_in_reward,
    normalize_rewards,
    overlong_penalty,
)
from jackfield.errors import ConfigError
from jackfield_testing import refused

from .cases import AGGREGATIONS, batch, counts

finite = st.floats(-5.0, -0.01)


def value_of(name: str, lp: float, ref: float, old: float) -> float:
    r = math.exp(ref - lp)
    base = {
        "k1": -math.log(r),
        "k2": math.log(r) ** 2 / 2,
        "k3": r - 1 - math.log(r),
        "abs": abs(math.log(r)),
        "low_var_kl": min(r - 1 - math.log(r), 10.0),
    }
    if name == "k3_corrected":
        return math.exp(lp - old) * base["k3"]
    return base[name.removesuffix("+")]


@pytest.mark.parametrize("name", names("kl"))
@settings(deadline=None, max_examples=25)
@given(lp=finite, ref=finite, old=finite)
def test_values_and_gradients(name: str, lp: float, ref: float, old: float) -> None:
    """The value is the definition's; the gradient its difference quotient, or k2's for straight-through forms."""
    log_probs = torch.tensor([[lp]], dtype=torch.float64, requires_grad=True)
    others = {"old_log_probs": torch.tensor([[old]], dtype=torch.float64)}
    found = kl(name, log_probs, torch.tensor([[ref]], dtype=torch.float64), **others)
    found.sum().backward()
    assert value_of(name, lp, ref, old) == pytest.approx(float(found.detach()), rel=1e-9, abs=1e-12)
    assert log_probs.grad is not None
    differentiated = "k2" if name.endswith("+") else name
    step = 1e-6
    sides = [value_of(differentiated, lp + sign * step, ref, old) for sign in (1, -1)]
    bend = min(abs(lp - ref), abs(value_of("k3", lp, ref, old) - 10.0)) < 1e-3
    assert bend or (sides[0] - sides[1]) / (2 * step) == pytest.approx(float(log_probs.grad), rel=1e-4, abs=1e-5)


def small_policies() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.tensor([0.3, -0.4, 1.1], dtype=torch.float64, requires_grad=True)
    return (
        logits,
        torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log(),
        torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64),
    )


@pytest.mark.parametrize("name", ["k1", "k3", "k1+", "k3+"])
def test_expected_values_are_the_kl(name: str) -> None:
    logits, reference, _ = small_policies()
    policy = logits.log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum().detach()
    found = (policy.exp() * kl(name, policy, reference)).sum().detach()
    assert float(exact) == pytest.approx(float(found), rel=1e-12)


@pytest.mark.parametrize("name", ["k2", "k1+", "k3+", "abs+", "k3_corrected"])
def test_expected_gradients_are_the_kls(name: str) -> None:
    """Samples of pi (k3_corrected: of pi_old), each with its probability as a constant."""
    logits, reference, old = small_policies()
    policy = logits.log_softmax(-1)
    exact = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)[0]
    sampled = old if name == "k3_corrected" else policy.exp().detach()
    loss = (sampled * kl(name, policy, reference, old_log_probs=old.log())).sum()
    torch.testing.assert_close(exact, torch.autograd.grad(loss, logits)[0])


def test_k1_in_a_loss_teaches_nothing() -> None:
    logits, reference, _ = small_policies()
    policy = logits.log_softmax(-1)
    loss = (policy.exp().detach() * kl("k1", policy, reference)).sum()
    assert 0.0 == pytest.approx(float(torch.autograd.grad(loss, logits)[0].abs().max()), abs=1e-12)


def test_the_bounds_of_low_var_kl() -> None:
    far = torch.tensor([[-500.0, 0.0]])
    assert [10.0, 10.0] == kl("low_var_kl", far, torch.tensor([[0.0, -500.0]]))[0].tolist()


def test_k3_corrected_names_what_it_needs() -> None:
    with refused("algorithm.input", "old_log_probs"):
        kl("k3_corrected", torch.zeros(1, 1), torch.zeros(1, 1))


@pytest.mark.parametrize("name", names("kl"))
def test_a_kl_in_the_loss_is_not_poisoned_by_masked_positions(name: str) -> None:
    data = batch(seed=2)
    own = {key: counts(data)[key] for key in ("global_tokens", "global_sequences")}
    spec = LossSpec(name="sft", options={"kl": name, "kl_coefficient": 0.5}, global_counts=own)
    function = resolve_loss(spec)
    results = []
    for junk in (0.0, math.nan):
        shared = {
            key: value.masked_fill(~data["response_mask"], junk)
            if value.is_floating_point() and value.dim() == 2
            else value
            for key, value in data.items()
        }
        log_probs = shared.pop("log_probs").requires_grad_()
        loss, metrics = function(TokenOutput(log_probs=log_probs), shared)
        loss.backward()
        assert log_probs.grad is not None
        results.append((float(loss.detach()), float(metrics["policy/kl"]), log_probs.grad))
    assert results[0][:2] == pytest.approx(results[1][:2])
    torch.testing.assert_close(results[0][2], results[1][2])
    divergence = kl(name, data["log_probs"], data["ref_log_probs"], old_log_probs=data["old_log_probs"])
    mask = data["response_mask"]
    assert float((-data["log_probs"] + 0.5 * divergence)[mask].mean()) == pytest.approx(results[0][0])


def test_a_coefficient_is_constant_or_steered_to_a_target() -> None:
    assert 0.3 == KLSettings().adapted(0.3, 99.0, 8)
    adaptive = KLSettings(target=2.0, horizon=100.0)
    assert 0.1 * 1.02 == pytest.approx(adaptive.adapted(0.1, 100.0, 10)), "the error is clipped to 0.2"
    assert 0.1 * 0.99 == pytest.approx(adaptive.adapted(0.1, 1.8, 10))
    assert 0.1 == pytest.approx(adaptive.adapted(0.1, 2.0, 10)), "on target it stays"
    with refused("algorithm.not-finite"):
        adaptive.adapted(0.1, math.nan, 1)
    with pytest.raises(ValueError, match="target"):
        KLSettings(target=0.0)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_batch_without_tokens_or_sequences_is_zero(mode: str) -> None:
    for shape in ((3, 2), (0, 2), (3, 0)):
        share = aggregate(torch.ones(shape), torch.zeros(shape), mode, global_tokens=0, global_sequences=0)
        assert 0.0 == float(share)


def test_the_norm_is_a_constant_of_the_run() -> None:
    values, mask = torch.tensor([[1.0, 2.0], [4.0, 9.0]]), torch.tensor([[1, 1], [1, 0]])
    own = {"global_tokens": 3, "global_sequences": 2}
    mode = "seq-mean-token-sum-norm"
    assert 7 / 2 / 10 == pytest.approx(float(aggregate(values, mask, mode, length_norm=10, **own)))
    assert 7 / 2 / 2 == pytest.approx(float(aggregate(values, mask, mode, **own))), "else the width"
    with refused("algorithm.input"):
        aggregate(values, mask, mode, length_norm=0, **own)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000), estimator=st.sampled_from(["k1", "k2", "k3", "abs", "low_var_kl"]))
def test_kl_in_reward(seed: int, estimator: str) -> None:
    data = batch(seed=seed)
    rewards = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    junk = data["ref_log_probs"].masked_fill(~data["response_mask"], math.nan)
    found, mean = kl_in_reward(
        rewards, data["log_probs"], junk, data["response_mask"], coefficient=0.2, estimator=estimator
    )
    penalties = []
    for row in range(8):
        for t in range(5):
            penalty = 0.0
            if data["response_mask"][row, t]:
                penalty = value_of(
                    estimator, float(data["log_probs"][row, t]), float(data["ref_log_probs"][row, t]), 0.0
                )
                penalties.append(penalty)
            assert float(rewards[row, t]) - 0.2 * penalty == pytest.approx(float(found[row, t]), abs=1e-12)
    assert math.fsum(penalties) / len(penalties) == pytest.approx(float(mean))


def test_kl_in_reward_names_a_bad_sample() -> None:
    data = batch()
    data["ref_log_probs"][1, 0] = math.nan
    with refused("algorithm.not-finite", "row 1, response token 0"):
        kl_in_reward(
            data["advantages"], data["log_probs"], data["ref_log_probs"], data["response_mask"], coefficient=1.0
        )


def test_the_overlong_penalty() -> None:
    """DAPO's equation 13 with 100 tokens and a buffer of 20."""
    lengths = torch.tensor([0, 80, 81, 90, 100, 101, 500])
    assert [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0] == pytest.approx(
        overlong_penalty(lengths, max_length=100, buffer=20).tolist()
    )
    assert -2.0 == float(overlong_penalty(lengths, max_length=100, buffer=20, factor=2.0)[-1])
    for wrong in ({"buffer": 0}, {"buffer": 101}):
        with refused("algorithm.input"):
            overlong_penalty(lengths, max_length=100, **wrong)


@settings(deadline=None, max_examples=30)
@given(rows=st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3)), max_size=12))
def test_the_dynamic_sampling_filter_keeps_groups_of_mixed_scores(rows: list[tuple[float, int]]) -> None:
    scores = torch.tensor([score for score, _ in rows])
    groups = torch.tensor([group for _, group in rows], dtype=torch.long)
    expected = [len({score for score, other in rows if other == group}) > 1 for _, group in rows]
    assert expected == dynamic_sampling_filter(scores, groups).tolist()
    wide = [max(s for s, o in rows if o == g) - min(s for s, o in rows if o == g) > 0.5 for _, g in rows]
    assert wide == dynamic_sampling_filter(scores, groups, min_spread=0.5).tolist()


def test_what_the_filter_drops_has_no_advantage() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 2, (40,), generator=generator).float()
    groups = torch.randint(0, 15, (40,), generator=generator)
    found, _ = advantages("grpo", token_rewards=scores[:, None], response_mask=torch.ones(40, 1), group_ids=groups)
    assert (found[:, 0].abs() > 1e-3).tolist() == dynamic_sampling_filter(scores, groups).tolist()


def test_normalisation_and_clipping() -> None:
    scores = torch.tensor([1.0, 2.0, 6.0])
    deviation = math.sqrt(7.0)
    assert [-2 / deviation, -1 / deviation, 3 / deviation] == pytest.approx(normalize_rewards(scores).tolist())
    assert [1 / deviation, 2 / deviation, 6 / deviation] == pytest.approx(
        normalize_rewards(scores, center=False).tolist()
    )
    assert [0.0, 0.0] == normalize_rewards(torch.tensor([0.1, 0.1])).tolist()
    assert [3.0] == normalize_rewards(torch.tensor([3.0]), center=False).tolist()
    assert [1.0, 2.0, 3.0] == clip_rewards(scores, low=0.0, high=3.0).tolist()
    with refused("algorithm.input"):
        clip_rewards(scores, low=1.0, high=1.0)


@pytest.mark.parametrize("options", [{"kl": "k9"}, {"aggregation": "mean"}])
def test_unknown_parts_of_a_loss_are_listed(options: dict[str, Any]) -> None:
    own = {"global_tokens": 1, "global_sequences": 1}
    spec = LossSpec(name="sft", options={**options, "kl_coefficient": 1.0}, global_counts=own)
    with pytest.raises(ConfigError) as caught:
        resolve_loss(spec)
    assert "algorithm.unknown" == caught.value.code
