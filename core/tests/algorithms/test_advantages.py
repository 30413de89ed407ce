"""Every advantage estimator against a slow reference in plain Python, written from its paper, and at its edges."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.algorithms import advantages, names, part
from jackfield.errors import ConfigError
from jackfield_testing import refused

from .cases import Case, Rows


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def std(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    return math.sqrt(math.fsum((value - mean(values)) ** 2 for value in values) / (len(values) - 1))


def grpo(case: Case) -> Rows:
    s = case.scores
    return case.on_tokens(
        [
            0.0 if len(g) == 1 else (s[i] - mean([s[j] for j in g])) / (std([s[j] for j in g]) + 1e-6)
            for i, g in enumerate(case.groups())
        ]
    )


def dr_grpo(case: Case) -> Rows:
    s = case.scores
    return case.on_tokens([s[i] - mean([s[j] for j in g]) for i, g in enumerate(case.groups())])


def grpo_passk(case: Case) -> Rows:
    s, rows = case.scores, []
    for i, g in enumerate(case.groups()):
        others = [s[j] for j in g if j != i]
        gap = max(0.0, s[i] - max(others)) if others else 0.0
        rows.append(gap / (std([s[j] for j in g]) + 1e-6))
    return case.on_tokens(rows)


def rloo(case: Case) -> Rows:
    s = case.scores
    return case.on_tokens(
        [0.0 if len(g) == 1 else s[i] - mean([s[j] for j in g if j != i]) for i, g in enumerate(case.groups())]
    )


def opo(case: Case) -> Rows:
    s, n = case.scores, [sum(row) for row in case.mask.tolist()]
    rows = []
    for i, g in enumerate(case.groups()):
        total = sum(n[j] for j in g)
        baseline = math.fsum(n[j] * s[j] for j in g) / total if total else 0.0
        rows.append(0.0 if len(g) == 1 else s[i] - baseline)
    return case.on_tokens(rows)


def gpg(case: Case) -> Rows:
    s, groups = case.scores, case.groups()
    useful = [i for i, g in enumerate(groups) if len({s[j] for j in g}) > 1]
    alpha = case.rows / len(useful) if useful else 1.0
    return case.on_tokens([alpha * (s[i] - mean([s[j] for j in g])) for i, g in enumerate(groups)])


def gdpo(case: Case) -> Rows:
    dimensions, groups = case.inputs["reward_dimensions"].T.tolist(), case.groups()
    total = [
        0.0
        if len(g) == 1
        else math.fsum((d[i] - mean([d[j] for j in g])) / (std([d[j] for j in g]) + 1e-6) for d in dimensions)
        for i, g in enumerate(groups)
    ]
    counted = [value for value, g in zip(total, groups, strict=True) if len(g) > 1]
    return case.on_tokens(
        [
            0.0 if len(g) == 1 else (value - mean(counted)) / (std(counted) + 1e-6)
            for value, g in zip(total, groups, strict=True)
        ]
    )


def opmd(case: Case) -> Rows:
    return dr_grpo(case)


def asymre(case: Case) -> Rows:
    s = case.scores
    return case.on_tokens(
        [0.0 if len(g) == 1 else s[i] - (mean([s[j] for j in g]) - 0.1) for i, g in enumerate(case.groups())]
    )


def topr(case: Case) -> Rows:
    return case.on_tokens(case.scores)


def compact(case: Case) -> list[list[tuple[int, float, float]]]:
    """Each row as its model tokens alone: (column, reward until the next model token, value)."""
    result = []
    for row in range(case.rows):
        tokens: list[tuple[int, float, float]] = []
        for column in range(case.length):
            reward = float(case.rewards[row, column])
            if case.mask[row, column]:
                tokens.append((column, reward, float(case.inputs["values"][row, column])))
            elif tokens:
                last = tokens[-1]
                tokens[-1] = (last[0], last[1] + reward, last[2])
        result.append(tokens)
    return result


def gae(case: Case, gamma: float = 1.0, lam: float = 1.0) -> Rows:
    """The sum of equation 16, term by term."""
    table = [[0.0] * case.length for _ in range(case.rows)]
    for row, tokens in enumerate(compact(case)):
        deltas = [
            reward + (gamma * tokens[t + 1][2] if t + 1 < len(tokens) else 0.0) - value
            for t, (_, reward, value) in enumerate(tokens)
        ]
        for t, (column, _, _) in enumerate(tokens):
            table[row][column] = math.fsum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
    return table


def to_go(case: Case, gamma: float = 1.0) -> Rows:
    table = [[0.0] * case.length for _ in range(case.rows)]
    for row, tokens in enumerate(compact(case)):
        for t, (column, _, _) in enumerate(tokens):
            table[row][column] = math.fsum(gamma**k * reward for k, (_, reward, _) in enumerate(tokens[t:]))
    return table


def whiten(table: Rows, keep: list[list[bool]]) -> Rows:
    kept = [v for row, marks in zip(table, keep, strict=True) for v, mark in zip(row, marks, strict=True) if mark]
    return [
        [(v - mean(kept)) / (std(kept) + 1e-8) if mark else 0.0 for v, mark in zip(row, marks, strict=True)]
        for row, marks in zip(table, keep, strict=True)
    ]


def reinforce_plus_plus(case: Case) -> Rows:
    return whiten(to_go(case), case.mask.tolist())


def reinforce_plus_plus_baseline(case: Case) -> Rows:
    keep = [[mark and len(g) > 1 for mark in marks] for marks, g in zip(case.mask.tolist(), case.groups(), strict=True)]
    return whiten(dr_grpo(case), keep)


def remax(case: Case) -> Rows:
    baseline = case.inputs["baseline_rewards"].tolist()
    keep = case.mask.tolist()
    return [
        [value - baseline[i] if mark else 0.0 for value, mark in zip(row, keep[i], strict=True)]
        for i, row in enumerate(to_go(case))
    ]


def optimal_token_baseline(case: Case) -> Rows:
    pi, squares = case.inputs["old_log_probs"].exp(), case.inputs["sum_pi_squared"]
    columns = [[c for c in range(case.length) if case.mask[row, c]] for row in range(case.rows)]
    returns = to_go(case)
    weight = [
        [
            math.fsum(1 - 2 * float(pi[row, c]) + float(squares[row, c]) for c in columns[row][: t + 1])
            for t in range(len(columns[row]))
        ]
        for row in range(case.rows)
    ]
    table = [[0.0] * case.length for _ in range(case.rows)]
    for row, g in enumerate(case.groups()):
        for t, column in enumerate(columns[row]):
            reaching = [j for j in g if len(columns[j]) > t]
            total = math.fsum(weight[j][t] for j in reaching)
            baseline = math.fsum(weight[j][t] * returns[j][columns[j][t]] for j in reaching) / (total + 1e-8)
            table[row][column] = returns[row][column] - baseline if len(reaching) > 1 else 0.0
    return table


def relative(values: dict[Any, float], key: Callable[[Any], Any]) -> dict[Any, float]:
    result = {}
    for own, value in values.items():
        peers = [other for name, other in values.items() if key(name) == key(own)]
        result[own] = 0.0 if len(peers) == 1 else (value - mean(peers)) / (std(peers) + 1e-6)
    return result


def runs_of(case: Case) -> dict[tuple[int, int], list[int]]:
    """(task, run) to its rows in the order of their steps."""
    runs: dict[tuple[int, int], list[int]] = {}
    tasks, rollout_ids, steps = (case.inputs[key].tolist() for key in ("group_ids", "rollout_ids", "step_ids"))
    for row in sorted(range(case.rows), key=lambda row: steps[row]):
        runs.setdefault((tasks[row], rollout_ids[row]), []).append(row)
    return runs


def step_wise_grpo(case: Case) -> Rows:
    s, runs = case.scores, runs_of(case)
    of_run = relative({run: s[rows[-1]] for run, rows in runs.items()}, lambda run: run[0])
    return case.on_tokens([next(of_run[run] for run, rows in runs.items() if i in rows) for i in range(case.rows)])


def gigpo(case: Case) -> Rows:
    s, runs = case.scores, runs_of(case)
    tasks, anchors = case.inputs["group_ids"].tolist(), case.inputs["anchor_ids"].tolist()
    of_run = relative({run: math.fsum(s[row] for row in rows) for run, rows in runs.items()}, lambda run: run[0])
    later = {
        row: math.fsum(0.95**k * s[other] for k, other in enumerate(rows[position:]))
        for rows in runs.values()
        for position, row in enumerate(rows)
    }
    of_step = relative(later, lambda row: (tasks[row], anchors[row]))
    return case.on_tokens(
        [next(of_run[run] for run, rows in runs.items() if i in rows) + of_step[i] for i in range(case.rows)]
    )


REFERENCES: dict[str, Callable[[Case], Rows]] = {
    function.__name__: function
    for function in (
        asymre,
        dr_grpo,
        gae,
        gdpo,
        gigpo,
        gpg,
        grpo,
        grpo_passk,
        opmd,
        opo,
        optimal_token_baseline,
        reinforce_plus_plus,
        reinforce_plus_plus_baseline,
        remax,
        rloo,
        step_wise_grpo,
        topr,
    )
} | {"reinforce": to_go}
ESTIMATORS = sorted(REFERENCES)
#: Which estimators compare a row with others, so that a row alone gets 0.
RELATIVE = sorted(name for name in ESTIMATORS if "group_ids" in part("advantages", name).needs)


def close(expected: Rows, found: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(expected, dtype=torch.float64), found, rtol=1e-7, atol=1e-7)


def test_every_estimator_has_a_reference() -> None:
    assert set(names("advantages")) <= {*ESTIMATORS, "leave_one_out"}


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 100_000), rows=st.integers(1, 10))
def test_equals_the_reference(name: str, seed: int, rows: int) -> None:
    case = Case(seed, rows=rows)
    close(REFERENCES[name](case), case.found(name))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 100_000), gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]), lam=st.sampled_from([0.0, 0.9, 1.0]))
def test_gae_and_rewards_to_go_discount_model_tokens_only(seed: int, gamma: float, lam: float) -> None:
    case = Case(seed)
    close(gae(case, gamma, lam), case.found("gae", gamma=gamma, lam=lam))
    close(to_go(case, gamma), case.found("reinforce", gamma=gamma))


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 100_000))
def test_responses_without_observations_take_the_short_way_to_the_same_result(seed: int) -> None:
    """Model tokens first, then padding on which a reward may stand."""
    case = Case(seed)
    lengths = torch.randint(1, case.length + 1, (case.rows, 1), generator=torch.Generator().manual_seed(seed))
    case.mask = torch.arange(case.length) < lengths
    close(gae(case, 0.9, 0.8), case.found("gae", gamma=0.9, lam=0.8))
    close(to_go(case, 0.9), case.found("reinforce", gamma=0.9))
    close(optimal_token_baseline(case), case.found("optimal_token_baseline"))


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 100_000))
def test_variants_of_grpo(seed: int) -> None:
    case = Case(seed)
    s, groups = case.scores, case.groups()
    batch = [0.0 if len(g) == 1 else (s[i] - mean([s[j] for j in g])) / (std(s) + 1e-6) for i, g in enumerate(groups)]
    close(case.on_tokens(batch), case.found("grpo", std="batch"))
    kept = case.mask.tolist()
    likelihood = [
        math.fsum(v for v, mark in zip(row, marks, strict=True) if mark)
        for row, marks in zip(case.inputs["old_log_probs"].tolist(), kept, strict=True)
    ]
    ranks = [
        sum(likelihood[j] < likelihood[i] for j in g) + (sum(likelihood[j] == likelihood[i] for j in g) - 1) / 2
        for i, g in enumerate(groups)
    ]
    adjusted = [s[i] * (1 - 0.25 * rank / len(g)) for i, (g, rank) in enumerate(zip(groups, ranks, strict=True))]
    expected = [
        0.0 if len(g) == 1 else (adjusted[i] - mean([adjusted[j] for j in g])) / (std([adjusted[j] for j in g]) + 1e-6)
        for i, g in enumerate(groups)
    ]
    close(case.on_tokens(expected), case.found("grpo", rank_penalty=0.25))


def test_rank_penalty_treats_equally_likely_responses_alike() -> None:
    """The ranks 0, 1, 2 of three equal likelihoods are all 1, in any order of rows."""
    found, _ = advantages(
        "grpo",
        token_rewards=torch.ones(3, 1),
        response_mask=torch.ones(3, 1),
        group_ids=torch.zeros(3, dtype=torch.long),
        old_log_probs=torch.full((3, 1), -1.0),
        rank_penalty=0.5,
    )
    assert [0.0, 0.0, 0.0] == pytest.approx(found[:, 0].tolist(), abs=1e-6)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 100_000), tau=st.sampled_from([0.1, 1.0, 3.0]))
def test_opmd_log_avg_exp(seed: int, tau: float) -> None:
    case = Case(seed)
    s = case.scores
    rows = [
        s[i] - tau * math.log(math.fsum(math.exp(s[j] / tau) for j in g) / len(g)) for i, g in enumerate(case.groups())
    ]
    close(case.on_tokens(rows), case.found("opmd", baseline="log_avg_exp", tau=tau))


def test_opmd_log_avg_exp_does_not_overflow() -> None:
    found, _ = advantages(
        "opmd",
        token_rewards=torch.tensor([[1000.0], [1001.0]]),
        response_mask=torch.ones(2, 1),
        group_ids=torch.zeros(2, dtype=torch.long),
        baseline="log_avg_exp",
        tau=0.01,
    )
    assert [-1.0 + 0.01 * math.log(2), 0.01 * math.log(2)] == pytest.approx(found[:, 0].tolist(), abs=1e-4)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 100_000))
def test_options_of_the_other_estimators(seed: int) -> None:
    case = Case(seed)
    close(whiten(gae(case), case.mask.tolist()), case.found("gae", whiten=True))
    s, runs = case.scores, runs_of(case)
    of_run = relative({run: math.fsum(s[row] for row in rows) for run, rows in runs.items()}, lambda run: run[0])
    shared = [next(of_run[run] / len(rows) for run, rows in runs.items() if i in rows) for i in range(case.rows)]
    close(case.on_tokens(shared), case.found("step_wise_grpo", rollout_reward="sum", divide_by_steps=True))
    torch.testing.assert_close(case.found("topr", baseline=0.5), case.found("topr") - 0.5 * case.mask)
    torch.testing.assert_close(case.found("gpg", f_norm=2.0), case.found("gpg") / 2)
    single = {**case.inputs, "reward_dimensions": case.rewards.sum(-1, keepdim=True)}
    found, _ = advantages(
        "gdpo", token_rewards=case.rewards, response_mask=case.mask, normalize_over_batch=False, weights=[1.0], **single
    )
    torch.testing.assert_close(case.found("grpo"), found)


def test_gae_by_hand() -> None:
    """gamma 0.9, lam 0.5; the middle token is an observation whose reward of 2 is due to the token before it."""
    adv, returns = advantages(
        "gae",
        token_rewards=torch.tensor([[0.0, 2.0, 1.0]]),
        response_mask=torch.tensor([[1, 0, 1]]),
        values=torch.tensor([[0.5, 99.0, 0.25]]),
        gamma=0.9,
        lam=0.5,
    )
    last = 1.0 - 0.25
    first = (2.0 + 0.9 * 0.25 - 0.5) + 0.45 * last
    assert [first, 0.0, last] == pytest.approx(adv[0].tolist())
    assert [first + 0.5, 0.0, 1.0] == pytest.approx(returns[0].tolist())


def test_golden_values_of_one_group() -> None:
    """Rewards 1, 0, 0, 1 of lengths 1, 2, 3, 4."""
    mask = torch.arange(4)[:, None] >= torch.arange(4)[None, :]
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    inputs = {
        "token_rewards": torch.diag(rewards),
        "response_mask": mask,
        "group_ids": torch.zeros(4, dtype=torch.long),
    }
    root = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    expected = {
        "grpo": [root, -root, -root, root],
        "dr_grpo": [0.5, -0.5, -0.5, 0.5],
        "rloo": [2 / 3, -2 / 3, -2 / 3, 2 / 3],
        "opo": [0.5, -0.5, -0.5, 0.5],
        "gpg": [0.5, -0.5, -0.5, 0.5],
        "asymre": [0.6, -0.4, -0.4, 0.6],
        "grpo_passk": [0.0, 0.0, 0.0, 0.0],
        "topr": [1.0, 0.0, 0.0, 1.0],
    }
    for name, column in expected.items():
        assert column == pytest.approx(advantages(name, **inputs)[0][:, 0].tolist()), name


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 100_000))
def test_rows_may_come_in_any_order(name: str, seed: int) -> None:
    case = Case(seed)
    whole = case.found(name)
    order = torch.randperm(case.rows, generator=torch.Generator().manual_seed(seed))
    case.rewards, case.mask = case.rewards[order], case.mask[order]
    case.inputs = {key: value[order] for key, value in case.inputs.items()}
    torch.testing.assert_close(whole[order], case.found(name), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 100_000))
def test_masked_positions_of_other_inputs_change_nothing(name: str, seed: int) -> None:
    case = Case(seed)
    clean = case.found(name)
    for key in ("values", "old_log_probs", "sum_pi_squared"):
        case.inputs[key] = case.inputs[key].masked_fill(~case.mask, math.nan)
    torch.testing.assert_close(clean, case.found(name))
    assert 0.0 == float(clean.masked_fill(case.mask, 0.0).abs().max())


@pytest.mark.parametrize("name", [name for name in RELATIVE if name not in ("gdpo", "optimal_token_baseline")])
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 100_000), shift=st.sampled_from([-3.0, 0.5, 100.0]))
def test_a_constant_on_all_rewards_of_a_group_changes_nothing(name: str, seed: int, shift: float) -> None:
    """Shift invariance of what compares rows. Steps: a constant on each step is one on each run of equal length."""
    if name in ("step_wise_grpo", "gigpo"):
        case = Case(seed)
        case.inputs["rollout_ids"] = torch.arange(case.rows)
    else:
        case = Case(seed)
    whole = case.found(name)
    case.rewards[:, 0] += shift * (case.inputs["group_ids"] == case.inputs["group_ids"][0])
    torch.testing.assert_close(whole, case.found(name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["dr_grpo", "rloo", "opo", "gpg", "opmd", "reinforce", "topr", "optimal_token_baseline"]
)
def test_unnormalised_estimators_scale_with_the_rewards(name: str) -> None:
    case = Case(3)
    once = case.found(name)
    case.rewards = case.rewards * 5
    torch.testing.assert_close(once * 5, case.found(name))


@pytest.mark.parametrize(
    "name", ["grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "step_wise_grpo", "gigpo"]
)
def test_normalised_estimators_do_not(name: str) -> None:
    case = Case(3)
    once = case.found(name)
    case.rewards = case.rewards * 5
    torch.testing.assert_close(once, case.found(name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RELATIVE)
def test_a_row_alone_gets_nothing(name: str) -> None:
    case = Case(1, rows=1)
    case.mask[:] = True
    case.rewards[0, 2] = 5.0
    assert 0.0 == float(case.found(name).abs().max())


@pytest.mark.parametrize("name", [name for name in RELATIVE if name not in ("asymre", "gdpo")])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6])
def test_equal_rewards_give_nothing(name: str, reward: float) -> None:
    """In float32: the rounding of a mean must not be blown up by a standard deviation of 0."""
    rows = 7
    found, _ = advantages(
        name,
        token_rewards=torch.full((rows, 1), reward),
        response_mask=torch.ones(rows, 1),
        group_ids=torch.zeros(rows, dtype=torch.long),
        rollout_ids=torch.arange(rows),
        old_log_probs=torch.full((rows, 1), -0.5),
        sum_pi_squared=torch.full((rows, 1), 0.5),
    )
    assert float(found.abs().max()) <= 1e-6 * max(1.0, reward)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_batch_without_a_model_token_gives_zeros(name: str) -> None:
    case = Case(2)
    case.mask[:] = False
    assert 0.0 == float(case.found(name).abs().max())


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    case = Case(2)
    case.rewards[4, 1] = bad
    with pytest.raises(ConfigError) as caught:
        case.found(name)
    assert ("algorithm.not-finite", "row 4") == (caught.value.code, caught.value.where)


@pytest.mark.parametrize(
    ("name", "key"), [("gae", "values"), ("gdpo", "reward_dimensions"), ("remax", "baseline_rewards")]
)
def test_other_inputs_that_are_not_finite_are_refused(name: str, key: str) -> None:
    case = Case(2)
    case.mask[3, 0] = True
    case.inputs[key][3] = math.nan
    with refused("algorithm.not-finite", "row 3"):
        case.found(name)
    case.found("grpo")  # which does not look at it


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_an_estimator_needs_is_named(name: str) -> None:
    case = Case(2)
    for key in part("advantages", name).needs:
        if key in case.inputs:
            with refused("algorithm.input", key):
                advantages(name, token_rewards=case.rewards, response_mask=case.mask, **{**case.inputs, key: None})


def test_an_unknown_option_is_refused() -> None:
    with refused("algorithm.input", "normalize_by_std"):
        Case(1).found("grpo", normalise_by_std=False)


@pytest.mark.parametrize(
    "options", [{"std": "run"}, {"baseline": "max"}, {"rollout_reward": "first"}, {"weights": [1.0]}]
)
def test_a_wrong_choice_is_refused(options: dict[str, Any]) -> None:
    name = {"std": "grpo", "baseline": "opmd", "rollout_reward": "step_wise_grpo", "weights": "gdpo"}[
        next(iter(options))
    ]
    with pytest.raises(ConfigError) as caught:
        Case(1).found(name, **options)
    assert "algorithm.input" == caught.value.code


def test_scopes_that_options_raise() -> None:
    assert ["group", "batch"] == [part("advantages", "grpo").scope_with({"std": std}) for std in ("group", "batch")]
    assert ["sequence", "batch"] == [part("advantages", "gae").scope_with({"whiten": on}) for on in (False, True)]


def test_integer_and_half_precision_rewards() -> None:
    case = Case(5)
    case.rewards = case.rewards.round()
    expected = case.found("grpo")
    torch.testing.assert_close(
        expected.float(),
        advantages("grpo", token_rewards=case.rewards.long(), response_mask=case.mask, **case.inputs)[0],
    )
    half, returns = advantages(
        "gae", token_rewards=case.rewards.bfloat16(), response_mask=case.mask, **case.inputs, gamma=0.9
    )
    assert (torch.bfloat16, torch.bfloat16) == (half.dtype, returns.dtype)
    torch.testing.assert_close(case.found("gae", gamma=0.9), half.double(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["grpo", "gae", "optimal_token_baseline", "gigpo"])
def test_two_million_tokens_take_no_loop_over_rows(name: str) -> None:
    """A loop over 4000 rows and their groups would take many seconds; the bound leaves room for a busy machine."""
    rows, length = 4000, 500
    ids = torch.arange(rows) // 8
    inputs = {
        "token_rewards": torch.zeros(rows, length),
        "response_mask": torch.ones(rows, length),
        "group_ids": ids,
        "rollout_ids": torch.arange(rows) % 8,
        "values": torch.zeros(rows, length),
        "old_log_probs": torch.zeros(rows, length),
        "sum_pi_squared": torch.zeros(rows, length),
    }
    start = time.process_time()
    advantages(name, **inputs)
    assert time.process_time() - start < 5.0
