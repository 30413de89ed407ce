"""Every loss against a slow reference in plain Python, written from its paper, under every aggregation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.algorithms import advantages, policy_loss, prepare
from jackfield.algorithms.weighted import chord_mu
from jackfield.errors import ConfigError
from jackfield_testing import refused

from .cases import AGGREGATIONS, LOSSES, batch, counts, loss_of

Data = dict[str, torch.Tensor]
#: A token's loss by log pi, log pi_old, A.
TokenLoss = Callable[[float, float, float], float]


def tokens(data: Data, row: int) -> list[int]:
    return [t for t in range(data["response_mask"].shape[1]) if data["response_mask"][row, t]]


def at(data: Data, key: str, row: int, t: int) -> float:
    return float(data[key][row, t])


def sum_of(data: Data, key: str, row: int) -> float:
    return math.fsum(at(data, key, row, t) for t in tokens(data, row))


def log_ratio(data: Data, row: int, other: str = "old_log_probs") -> float:
    return sum_of(data, "log_probs", row) - sum_of(data, other, row)


def advantage(data: Data, row: int) -> float:
    return sum_of(data, "advantages", row) / len(tokens(data, row))


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def table(data: Data, loss: TokenLoss) -> list[dict[int, float]]:
    """Per row: token to loss."""
    return [
        {
            t: loss(at(data, "log_probs", row, t), at(data, "old_log_probs", row, t), at(data, "advantages", row, t))
            for t in tokens(data, row)
        }
        for row in range(len(data["log_probs"]))
    ]


def ppo_token(lp: float, old: float, a: float, low: float = 0.2, high: float = 0.2, dual: float | None = 3.0) -> float:
    ratio = math.exp(lp - old)
    objective = min(ratio * a, clip(ratio, 1 - low, 1 + high) * a)
    return -(max(objective, dual * a) if dual is not None and a < 0 else objective)


def ppo(data: Data, **o: Any) -> Any:
    return table(data, lambda lp, old, a: ppo_token(lp, old, a, **o))


def decoupled_ppo(data: Data, weight_cap: float = math.inf) -> Any:
    rows = ppo(data, dual=None)
    for row, losses in enumerate(rows):
        for t in losses:
            weight = math.exp(at(data, "old_log_probs", row, t) - at(data, "rollout_log_probs", row, t))
            losses[t] *= weight if weight <= weight_cap else 0.0
    return rows


def cispo(data: Data) -> Any:
    return table(data, lambda lp, old, a: -min(math.exp(lp - old), 1.28) * a * lp)


def sapo(data: Data) -> Any:
    def loss(lp: float, old: float, a: float) -> float:
        tau = 1.0 if a > 0 else 1.05
        return -4 / tau / (1 + math.exp(-tau * (math.exp(lp - old) - 1))) * a

    return table(data, loss)


def dppo_tv(data: Data, delta: float = 0.2) -> Any:
    def loss(lp: float, old: float, a: float) -> float:
        moved = math.exp(lp) - math.exp(old)
        masked = (a > 0 and moved > delta) or (a < 0 and moved < -delta)
        return 0.0 if masked else -math.exp(lp - old) * a

    return table(data, loss)


def dppo_kl(data: Data, delta: float = 0.05) -> Any:
    def loss(lp: float, old: float, a: float) -> float:
        p, q = math.exp(old), math.exp(lp)
        divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        outward = (a > 0 and q > p) or (a < 0 and q < p)
        return 0.0 if outward and divergence > delta else -math.exp(lp - old) * a

    return table(data, loss)


def m2po(data: Data, threshold: float = 0.04) -> Any:
    """Remove the largest values one by one until the mean of the others is small enough."""
    rows = table(data, lambda lp, old, a: -math.exp(lp - old) * a)
    logs = {
        (row, t): at(data, "log_probs", row, t) - at(data, "old_log_probs", row, t)
        for row, losses in enumerate(rows)
        for t in losses
    }
    outward = [key for key, value in logs.items() if value * at(data, "advantages", *key) > 0]
    outward.sort(key=lambda key: logs[key] ** 2)
    while outward and math.fsum(logs[key] ** 2 for key in outward) / len(outward) > threshold:
        row, t = outward.pop()
        rows[row][t] = 0.0
    return rows


def kl_cov(data: Data, ratio: float = 0.0002) -> Any:
    rows = table(data, lambda lp, old, a: -math.exp(lp - old) * a)
    keys = [(row, t) for row, losses in enumerate(rows) for t in losses]
    mean = {key: math.fsum(at(data, key, *k) for k in keys) / len(keys) for key in ("log_probs", "advantages")}

    def covariance(k: tuple[int, int]) -> float:
        return math.prod(at(data, key, *k) - mean[key] for key in ("log_probs", "advantages"))

    for row, t in sorted(keys, key=covariance, reverse=True)[: max(1, int(ratio * len(keys)))]:
        rows[row][t] += abs(at(data, "log_probs", row, t) - at(data, "old_log_probs", row, t))
    return rows


def reinforce(data: Data) -> Any:
    return table(data, lambda lp, _, a: -a * lp)


def opmd(data: Data, tau: float = 1.0) -> Any:
    return table(data, lambda lp, _, a: -a * lp / (1 + tau))


def sppo(data: Data) -> Any:
    return table(data, lambda lp, old, a: -a * math.log(clip(math.exp(lp - old), 1 / 1.3, 1.3)))


def rec(data: Data) -> Any:
    """REC-OneSide-NoIS."""

    def loss(lp: float, old: float, a: float) -> float:
        ratio = math.exp(lp - old)
        return -a * lp if (a >= 0 and ratio <= 1.2) or (a <= 0 and ratio >= 0.8) else 0.0

    return table(data, loss)


def sft(data: Data) -> Any:
    return table(data, lambda lp, _, __: -lp)


def gspo(data: Data) -> Any:
    rows = []
    for row in range(len(data["log_probs"])):
        own = tokens(data, row)
        s = math.exp(log_ratio(data, row) / len(own))
        values = {t: at(data, "advantages", row, t) for t in own}
        rows.append({t: -min(s * a, clip(s, 1 - 3e-4, 1 + 4e-4) * a) for t, a in values.items()})
    return rows


def topr(data: Data) -> Any:
    rows = []
    for row in range(len(data["log_probs"])):
        weight = 1.0 if advantage(data, row) > 0 else min(1.0, math.exp(log_ratio(data, row)))
        rows.append(
            {t: -weight * at(data, "advantages", row, t) * at(data, "log_probs", row, t) for t in tokens(data, row)}
        )
    return rows


def gmpo(data: Data) -> Any:
    rows = []
    for row in range(len(data["log_probs"])):
        a, product = advantage(data, row), 1.0
        for t in tokens(data, row):
            ratio = math.exp(at(data, "log_probs", row, t) - at(data, "old_log_probs", row, t))
            bounded = clip(ratio, math.exp(-0.4), math.exp(0.4))
            product *= min(ratio, bounded) if a > 0 else max(ratio, bounded)
        rows.append(-a * product ** (1 / len(tokens(data, row))))
    return rows


def dro(data: Data) -> Any:
    return [
        -math.fsum(at(data, "advantages", row, t) * at(data, "log_probs", row, t) for t in tokens(data, row))
        + 0.5 * log_ratio(data, row) ** 2
        for row in range(len(data["log_probs"]))
    ]


def peers(data: Data, key: str, row: int) -> list[int]:
    return [other for other in range(len(data[key])) if data[key][other] == data[key][row]]


def opmd_kimi(data: Data, tau: float = 1.0) -> Any:
    rows = []
    for row in range(len(data["log_probs"])):
        group = [float(data["rewards"][other]) for other in peers(data, "group_ids", row)]
        log_z = math.log(math.fsum(math.exp(r / tau) for r in group) / len(group))
        a = float(data["rewards"][row]) - tau * log_z - tau * log_ratio(data, row, "ref_log_probs")
        rows.append(a**2)
    return rows


def opmd_pairwise(data: Data, tau: float = 1.0) -> Any:
    """Each pair's square on its second row."""
    a = [
        float(data["rewards"][row]) - tau * log_ratio(data, row, "ref_log_probs") for row in range(len(data["rewards"]))
    ]
    return [
        math.fsum((a[row] - a[other]) ** 2 for other in peers(data, "group_ids", row) if other < row)
        for row in range(len(a))
    ]


def dpo(data: Data, beta: float = 0.1, label_smoothing: float = 0.0) -> Any:
    """Each pair's loss twice over: half of the sequences are pairs."""
    rows = []
    for row in range(len(data["log_probs"])):
        one, other = peers(data, "pair_ids", row)
        chosen, rejected = (one, other) if data["rewards"][one] > data["rewards"][other] else (other, one)
        z = beta * (log_ratio(data, chosen, "ref_log_probs") - log_ratio(data, rejected, "ref_log_probs"))
        rows.append(
            -(1 - label_smoothing) * math.log(1 / (1 + math.exp(-z)))
            - label_smoothing * math.log(1 / (1 + math.exp(z)))
        )
    return rows


REFERENCES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        cispo,
        decoupled_ppo,
        dpo,
        dppo_kl,
        dppo_tv,
        dro,
        gmpo,
        gspo,
        kl_cov,
        m2po,
        opmd,
        opmd_kimi,
        opmd_pairwise,
        ppo,
        rec,
        reinforce,
        sapo,
        sft,
        sppo,
        topr,
    )
} | {"gpg": reinforce}
ELSEWHERE = {"clip_cov", "mix", "mix_chord"}  #: compared below


def aggregated(rows: list[Any], mode: str, norm: float = 7.0) -> float:
    """A list of dicts (losses of tokens) or of numbers (one per sequence) by a mode of aggregation."""
    if not isinstance(rows[0], dict):
        total = math.fsum(rows)
        return {"token-sum": total, "seq-mean-token-sum-norm": total / len(rows) / norm}.get(mode, total / len(rows))
    sums = [math.fsum(row.values()) for row in rows]
    if mode == "token-mean":
        return math.fsum(sums) / sum(len(row) for row in rows)
    if mode == "token-sum":
        return math.fsum(sums)
    if mode == "seq-mean-token-mean":
        return math.fsum(total / len(row) for total, row in zip(sums, rows, strict=True)) / len(rows)
    return math.fsum(sums) / len(rows) / (norm if mode.endswith("norm") else 1.0)


def test_every_loss_has_a_reference() -> None:
    assert set(LOSSES) == {*REFERENCES, *ELSEWHERE}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", sorted(REFERENCES))
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 100_000), scale=st.sampled_from([0.0, 0.1, 1.0]))
def test_equals_the_reference(name: str, aggregation: str, seed: int, scale: float) -> None:
    """Under the default options."""
    data = batch(seed=seed, scale=scale)
    found, _ = policy_loss(name, aggregation=aggregation, length_norm=7.0, **data, **counts(data))
    expected = aggregated(REFERENCES[name](data), aggregation)
    if name == "dpo" and aggregation == "token-sum":
        expected /= 2  # the reference lists each pair twice
    assert expected == pytest.approx(float(found), rel=1e-9, abs=1e-12)


OTHER_OPTIONS = [
    ("ppo", {"clip_low": 0.1, "clip_high": 0.3, "clip_dual": None}, {"low": 0.1, "high": 0.3, "dual": None}),
    ("ppo", {"clip_dual": 1.2}, {"dual": 1.2}),
    ("decoupled_ppo", {"weight_cap": 1.1}, {"weight_cap": 1.1}),
    ("dppo_tv", {"delta_low": 0.02, "delta_high": 0.02}, {"delta": 0.02}),
    ("dppo_kl", {"delta_low": 0.01, "delta_high": 0.01}, {"delta": 0.01}),
    ("m2po", {"m2_threshold": 0.01}, {"threshold": 0.01}),
    ("kl_cov", {"kl_cov_ratio": 0.25}, {"ratio": 0.25}),
    ("opmd", {"tau": 3.0}, {"tau": 3.0}),
    ("opmd_kimi", {"tau": 0.5}, {"tau": 0.5}),
    ("opmd_pairwise", {"tau": 2.0}, {"tau": 2.0}),
    ("dpo", {"beta": 0.7, "label_smoothing": 0.2}, {"beta": 0.7, "label_smoothing": 0.2}),
]


@pytest.mark.parametrize(("name", "options", "reference"), OTHER_OPTIONS)
def test_equals_the_reference_under_other_options(
    name: str, options: dict[str, Any], reference: dict[str, Any]
) -> None:
    for seed in range(5):
        data = batch(seed=seed, scale=0.8)
        found, _ = policy_loss(name, aggregation="seq-mean-token-sum", **data, **counts(data), **options)
        expected = aggregated(REFERENCES[name](data, **reference), "seq-mean-token-sum")
        assert expected == pytest.approx(float(found), rel=1e-9)


@pytest.mark.parametrize("phi", [None, False, True])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_mix_is_two_losses_each_by_its_own_counts(aggregation: str, phi: bool | None) -> None:
    data = batch(seed=6)
    name, options = ("mix", {}) if phi is None else ("mix_chord", {"phi": phi})
    own = {"global_tokens": 1, "global_sequences": 1}  # of no use here
    expert = data["expert_mask"]
    expected = 0.0
    for weight, rows, reference in ((0.75, ~expert, ppo), (0.25, expert, sft)):
        part = {key: value[rows] for key, value in data.items()}
        losses = reference(part)
        if reference is sft and phi:
            losses = table(part, lambda lp, _, __: -lp * math.exp(lp) * (1 - math.exp(lp)))
        expected += weight * aggregated(losses, aggregation)
    exact = {key: value for key, value in counts(data).items() if key not in own}
    for given_counts in ({}, exact):
        found, _ = policy_loss(
            name, aggregation=aggregation, length_norm=7.0, mu=0.25, **data, **own, **given_counts, **options
        )
        assert expected == pytest.approx(float(found), rel=1e-9)


def test_mix_with_rows_of_one_kind_only() -> None:
    data = batch(seed=6)
    for kind, reference, weight in ((False, ppo, 0.9), (True, sft, 0.1)):
        data["expert_mask"][:] = kind
        found, _ = policy_loss("mix", **data, global_tokens=1, global_sequences=1)
        assert weight * aggregated(reference(data), "token-mean") == pytest.approx(float(found), rel=1e-9)


def test_mix_wants_both_counts_or_none() -> None:
    with refused("algorithm.input"):
        policy_loss("mix", **batch(), global_tokens=1, global_sequences=1, global_usual_tokens=4)


def test_clip_cov_cuts_as_many_tokens_as_asked_among_the_candidates() -> None:
    data = batch(rows=40, seed=9)
    options = {"clip_cov_ratio": 0.05, "clip_cov_lower": 0.2, "clip_cov_upper": 2.0}
    mask = data["response_mask"]
    covariance = (data["log_probs"] - data["log_probs"][mask].mean()) * (
        data["advantages"] - data["advantages"][mask].mean()
    )
    plain, cut = (
        loss_of("clip_cov", data, aggregation="token-sum", **{**options, **more})[1]
        for more in ({"clip_cov_lower": 1e9, "clip_cov_upper": 2e9}, {})
    )
    changed = plain != cut
    assert int(0.05 * int(mask.sum())) == int(changed.sum())
    assert bool(((covariance > 0.2) & (covariance < 2.0))[changed].all())
    assert 0.0 == float(cut[changed].abs().max())
    assert aggregated(ppo(data, dual=None), "token-sum") == pytest.approx(
        loss_of("clip_cov", data, aggregation="token-sum", **{**options, "clip_cov_lower": 1e9, "clip_cov_upper": 2e9})[
            0
        ]
    )
    other = loss_of("clip_cov", data, aggregation="token-sum", **options, seed=1)[1]
    assert not torch.equal(cut, other), "another seed draws other tokens"


REC_CASES = [
    ({"clip": "two-side"}, lambda r, a: 0.8 <= r <= 1.2, lambda r, a: 1.0),
    ({"clip": "none", "weight": "importance"}, lambda r, a: True, lambda r, a: r),
    ({"clip": "none", "weight": "advantage", "temperature": 2.0}, lambda r, a: True, lambda r, a: math.exp(a / 2)),
    (
        {"clip": "ring", "ring_low": 0.3, "ring_high": 0.4},
        lambda r, a: 0.8 <= r <= 1.2 or (a >= 0 and r <= 0.7) or (a <= 0 and r >= 1.4),
        lambda r, a: 1.0,
    ),
]


@pytest.mark.parametrize(("options", "kept", "weight"), REC_CASES)
def test_the_rec_family(options: dict[str, Any], kept: Any, weight: Any) -> None:
    data = batch(seed=3, scale=0.8)

    def loss(lp: float, old: float, a: float) -> float:
        ratio = math.exp(lp - old)
        return -a * weight(ratio, a) * lp if kept(ratio, a) else 0.0

    plain = loss_of("rec", data, **{"regularizer": "none", **options})[0]
    assert aggregated(table(data, loss), "token-mean") == pytest.approx(plain, rel=1e-9)
    squares = table(data, lambda lp, old, a: loss(lp, old, a) + 0.3 * (lp - old) ** 2)
    found = loss_of("rec", data, **options, regularizer="k2", regularizer_coefficient=0.3)[0]
    assert aggregated(squares, "token-mean") == pytest.approx(found, rel=1e-9)
    forward = table(data, lambda lp, old, a: loss(lp, old, a) - 0.3 * lp)
    found = loss_of("rec", data, **options, regularizer="forward_kl", regularizer_coefficient=0.3)[0]
    assert aggregated(forward, "token-mean") == pytest.approx(found, rel=1e-9)


def test_dro_per_token() -> None:
    data = batch(seed=3)
    expected = table(data, lambda lp, old, a: -a * lp + 0.25 * (lp - old) ** 2)
    assert aggregated(expected, "token-mean") == pytest.approx(loss_of("dro", data, beta=0.5, level="token")[0])


def test_the_three_forms_of_opmd_step_the_same_way() -> None:
    """Appendix A.3: at pi = pi_old the pairwise gradient is K 2 tau (1 + tau) times that of the simple form.

    Kimi's, whose baseline is another, is that of the simple form with its own advantages.
    """
    data = batch(seed=8, scale=0.0)
    tau, size = 0.5, 4
    inputs = {"token_rewards": torch.zeros(8, 5, dtype=torch.float64), "response_mask": data["response_mask"]}
    inputs["token_rewards"][:, 0] = data["rewards"]
    forms = {}
    for baseline in ("mean", "log_avg_exp"):
        data["advantages"] = advantages("opmd", group_ids=data["group_ids"], baseline=baseline, tau=tau, **inputs)[0]
        forms[baseline] = loss_of("opmd", data, aggregation="seq-mean-token-sum", tau=tau)[1]
    pairwise = loss_of("opmd_pairwise", data, tau=tau, reference="old")[1]
    torch.testing.assert_close(2 * tau * size * (1 + tau) * forms["mean"], pairwise)
    kimi = loss_of("opmd_kimi", data, tau=tau, reference="old")[1]
    torch.testing.assert_close(2 * tau * (1 + tau) * forms["log_avg_exp"], kimi)
    del data["rewards"]
    torch.testing.assert_close(kimi, loss_of("opmd_kimi", data, tau=tau, reference="old")[1])


def test_a_constant_on_a_groups_rewards_changes_neither_kimis_nor_the_pairwise_form() -> None:
    data = batch(seed=8)
    moved = {**data, "rewards": data["rewards"] + 10.0 * data["group_ids"]}
    for name in ("opmd_kimi", "opmd_pairwise"):
        assert loss_of(name, data)[0] == pytest.approx(loss_of(name, moved)[0], rel=1e-9)


def test_two_responses_are_one_square() -> None:
    data = batch(rows=2, seed=8)
    data["group_ids"][:] = 0
    a = [float(data["rewards"][row]) - log_ratio(data, row, "ref_log_probs") for row in (0, 1)]
    assert (a[0] - a[1]) ** 2 / 2 == pytest.approx(loss_of("opmd_pairwise", data)[0], rel=1e-9)


def test_dpo_by_hand() -> None:
    """log ratios 2 and -1, beta 0.5: z = 1.5; without rewards the first row is the chosen one."""
    inputs = {
        "log_probs": torch.tensor([[-1.0], [-3.0]]),
        "ref_log_probs": torch.tensor([[-3.0], [-2.0]]),
        "response_mask": torch.ones(2, 1),
        "pair_ids": torch.tensor([7, 7]),
        "global_tokens": 2,
        "global_sequences": 2,
    }
    loss, metrics = policy_loss("dpo", beta=0.5, **inputs)
    assert math.log1p(math.exp(-1.5)) == pytest.approx(float(loss))
    assert 1.0 == float(metrics["policy/preference_accuracy"])
    loss, metrics = policy_loss("dpo", beta=0.5, rewards=torch.tensor([0.0, 1.0]), **inputs)
    assert math.log1p(math.exp(1.5)) == pytest.approx(float(loss))
    assert 0.0 == float(metrics["policy/preference_accuracy"])


@pytest.mark.parametrize("margin", [-1e4, -30.0, 0.0, 30.0, 1e4])
def test_dpo_has_its_slope_at_any_margin(margin: float) -> None:
    """At 0, too, where training starts: -sigmoid(-z) for the chosen row."""
    log_probs = torch.tensor([[margin], [0.0]], requires_grad=True)
    loss, _ = policy_loss(
        "dpo",
        log_probs=log_probs,
        ref_log_probs=torch.zeros(2, 1),
        response_mask=torch.ones(2, 1),
        pair_ids=torch.zeros(2, dtype=torch.long),
        global_tokens=2,
        global_sequences=2,
        beta=1.0,
    )
    loss.backward()
    slope = 0.0 if margin > 700 else 1.0 / (1.0 + math.exp(margin)) if margin > -700 else 1.0
    assert max(0.0, -margin) == pytest.approx(float(loss.detach()), abs=0.7)
    assert log_probs.grad is not None
    assert [-slope, slope] == pytest.approx(log_probs.grad[:, 0].tolist())


def test_dpo_refuses_what_is_no_pair_and_a_tie() -> None:
    data = batch()
    data["pair_ids"] = torch.tensor([0, 0, 1, 1, 2, 2, 3, 4])
    with refused("algorithm.input", "row 6, pair_ids 3"):
        loss_of("dpo", data)
    data["pair_ids"] = torch.arange(8) // 2
    data["rewards"][:] = 1.0
    with refused("algorithm.input", "row 0, pair_ids 0"):
        loss_of("dpo", data)
    with refused("algorithm.input", "pair_ids"):
        policy_loss("dpo", **{**data, "pair_ids": None}, global_tokens=1, global_sequences=1)


def test_prepared_dpo_is_the_gradient_at_the_prepared_point_only() -> None:
    """Prepared columns are valid for one optimizer step; a later step needs new margins."""
    data = batch(seed=2)
    columns = prepare("dpo", **data, beta=0.4)
    assert {"dpo_margins", "dpo_signs"} == set(columns)
    assert {1.0, -1.0} == set(columns["dpo_signs"].tolist())


def test_prepare_is_empty_for_what_can_be_split() -> None:
    assert {} == prepare("ppo", **batch())


def test_gspo_on_tokens_by_hand() -> None:
    """Two tokens with log-ratios 0.1 and 0.3: s = e^0.2 on both."""
    inputs = {
        "log_probs": torch.tensor([[-1.0, -1.0]]),
        "old_log_probs": torch.tensor([[-1.1, -1.3]]),
        "response_mask": torch.ones(1, 2),
        "global_tokens": 2,
        "global_sequences": 1,
    }
    up, _ = policy_loss("gspo", advantages=torch.ones(1, 2), **inputs)
    down, _ = policy_loss("gspo", advantages=-torch.ones(1, 2), **inputs)
    assert [-(1 + 4e-4), math.exp(0.2)] == pytest.approx([float(up), float(down)], rel=1e-6)


def test_sapo_at_the_old_policy() -> None:
    """f(1) = 2 / tau, f'(1) = 1: loss -2 A / tau, gradient -A."""
    log_probs = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    loss, _ = policy_loss(
        "sapo",
        log_probs=log_probs,
        old_log_probs=log_probs.detach(),
        advantages=torch.tensor([[1.0, -2.0]], dtype=torch.float64),
        response_mask=torch.ones(1, 2),
        global_tokens=2,
        global_sequences=1,
        aggregation="token-sum",
    )
    loss.backward()
    assert -2.0 + 4.0 / 1.05 == pytest.approx(float(loss.detach()))
    assert log_probs.grad is not None
    torch.testing.assert_close(torch.tensor([[-1.0, 2.0]], dtype=torch.float64), log_probs.grad)


@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo", "dppo_tv", "dppo_kl", "m2po", "clip_cov"])
def test_at_the_old_policy_a_trust_region_does_nothing(name: str) -> None:
    """The gradient is the policy gradient's, -A / tokens (gspo and gmpo: of the row's mean)."""
    data = batch(seed=4, scale=0.0)
    data["advantages"] = data["advantages"][:, :1].expand(8, 5).contiguous()
    mode = "seq-mean-token-mean"
    options = {"clip_cov_lower": 1e9, "clip_cov_upper": 2e9} if name == "clip_cov" else {}
    found = loss_of(name, data, aggregation=mode, **options)[1]
    lengths = data["response_mask"].sum(-1, keepdim=True)
    torch.testing.assert_close(-data["advantages"] * data["response_mask"] / lengths / 8, found)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("opmd", {"tau": -1.0}),
        ("opmd_kimi", {"tau": 0.0}),
        ("opmd_kimi", {"reference": "new"}),
        ("sapo", {"tau_pos": 0.0}),
        ("dpo", {"label_smoothing": 0.5}),
        ("mix", {"mu": 1.5}),
        ("dro", {"level": "row"}),
        ("rec", {"clip": "both"}),
        ("rec", {"weight": "reward"}),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        loss_of(name, batch(), **options)
    assert "algorithm.input" == caught.value.code


def test_chords_schedule() -> None:
    settings = {"warmup_steps": 4, "decay_steps": 10, "peak": 0.8, "valley": 0.2}
    assert [0.0, 0.4, 0.8, 0.5, 0.2, 0.2] == pytest.approx(
        [chord_mu(step, **settings) for step in (0, 2, 4, 9, 14, 99)]
    )
