"""No split, order or masked value changes any registered loss, and its gradient is that of its value."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.abc.engine import TokenOutput
from jackfield.algorithms import LossSpec, part, policy_loss, prepare, resolve_loss
from jackfield.errors import ConfigError
from jackfield_testing import refused

from .cases import AGGREGATIONS, LOSSES, OPTIONS, batch, counts, loss_of

#: Losses that hold something fixed on purpose: their gradient is not that of their value.
STOPPED = {"cispo", "topr", "rec", "mix_chord"}


def splits(rows: int, cuts: list[int], seed: int) -> list[torch.Tensor]:
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    edges = [0, *sorted(set(cuts)), rows]
    return [order[start:end] for start, end in itertools.pairwise(edges) if end > start]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None, max_examples=8)
@given(cuts=st.lists(st.integers(1, 7), max_size=4), seed=st.integers(0, 10_000))
def test_a_split_batch_has_the_loss_gradient_and_metrics_of_the_whole(
    name: str, aggregation: str, cuts: list[int], seed: int
) -> None:
    """This holds for any micro-batches in any order, even with split groups and pairs."""
    data = batch(seed=seed)
    whole = loss_of(name, data, aggregation=aggregation)
    split = loss_of(name, data, splits(8, cuts, seed), aggregation)
    assert whole[0] == pytest.approx(split[0], rel=1e-9, abs=1e-12)
    torch.testing.assert_close(whole[1], split[1], rtol=1e-9, atol=1e-12)
    assert whole[2] == pytest.approx(split[2], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10_000))
def test_the_order_of_rows_changes_nothing(name: str, seed: int) -> None:
    data = batch(seed=seed)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    shuffled = {key: value[order] for key, value in data.items()}
    if name == "clip_cov":  # draws at random: the same tokens must be drawn
        columns = prepare(name, **data, **OPTIONS[name])
        data |= columns
        shuffled |= {key: value[order] for key, value in columns.items()}
    whole, permuted = loss_of(name, data), loss_of(name, shuffled)
    assert whole[0] == pytest.approx(permuted[0], rel=1e-9, abs=1e-12)
    torch.testing.assert_close(whole[1][order], permuted[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_masked_positions_change_nothing(name: str, aggregation: str) -> None:
    """Neither NaN nor infinity where the mask is 0, nor columns of padding (but by the width that norms by it)."""
    data = batch(seed=3)
    junk = dict(data)
    for key in ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages"):
        junk[key] = data[key].masked_fill(~data["response_mask"], math.nan)
        padding = torch.full((8, 2), math.inf, dtype=torch.float64)
        junk[key] = torch.cat([junk[key], padding], -1)
    junk["response_mask"] = torch.cat([data["response_mask"], torch.zeros(8, 2, dtype=torch.bool)], -1)
    clean, dirty = (loss_of(name, one, aggregation=aggregation, **_fixed(name)) for one in (data, junk))
    assert clean[0] == pytest.approx(dirty[0], rel=1e-12)
    torch.testing.assert_close(clean[1] * data["response_mask"], dirty[1][:, :-2])
    assert 0.0 == float(dirty[1][:, -2:].abs().max())


def _fixed(name: str) -> dict[str, object]:
    return {"seed": 5} if name == "clip_cov" else {}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_rows_without_a_token_add_nothing_to_the_gradient(name: str, aggregation: str) -> None:
    """Two more rows, empty, with the same counts (engines pad batches with such rows)."""
    data = batch(seed=5)
    padded = {key: torch.cat([value, value[:2]]) for key, value in data.items()}
    padded["response_mask"][8:] = False
    padded["pair_ids"][8:] = 99
    padded["group_ids"][8:] = 99
    padded["expert_mask"][8:] = False
    options = {"rewards": None} if name == "dpo" else {}
    whole = loss_of(name, {**data, **options}, aggregation=aggregation, **_fixed(name))
    own = counts(data)
    log_probs = padded.pop("log_probs").clone().requires_grad_()
    loss, _ = policy_loss(
        name,
        log_probs=log_probs,
        aggregation=aggregation,
        length_norm=7.0,
        **{**padded, **options},
        **own,
        **OPTIONS.get(name, {}),
        **_fixed(name),
    )
    loss.backward()
    assert log_probs.grad is not None
    torch.testing.assert_close(whole[1], log_probs.grad[:8], rtol=1e-9, atol=1e-12)
    assert 0.0 == float(log_probs.grad[8:].abs().max())
    if name != "dpo":  # a pair of two empty answers is worth log 2
        assert whole[0] == pytest.approx(float(loss.detach()), rel=1e-9)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in STOPPED])
@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 10_000))
def test_gradients_are_finite_differences(name: str, seed: int) -> None:
    data = batch(rows=4, length=3, seed=seed)
    data |= prepare(name, **data, **OPTIONS.get(name, {})) if name in ("clip_cov", "kl_cov", "m2po") else {}
    _, gradient, _ = loss_of(name, data, aggregation="seq-mean-token-sum")
    step = 1e-6
    kinks = 0
    for row in range(4):
        for token in range(3):
            sides = []
            for sign in (1.0, -1.0):
                moved = {**data, "log_probs": data["log_probs"].clone()}
                moved["log_probs"][row, token] += sign * step
                sides.append(loss_of(name, moved, aggregation="seq-mean-token-sum")[0])
            slope = (sides[0] - sides[1]) / (2 * step)
            kinks += abs(slope - float(gradient[row, token])) > 1e-6 * max(1.0, abs(slope))
    assert kinks <= 1, "a difference may straddle one bend"


def test_losses_with_fixed_factors_have_the_gradient_of_the_policy_gradient_theorem() -> None:
    """cispo, topr and rec: -w A at each token of the mask, w without a gradient."""
    data = batch(seed=2)
    mask = data["response_mask"]
    tokens = int(mask.sum())
    ratio = (data["log_probs"] - data["old_log_probs"]).exp()
    expected = -(ratio.clamp(0.0, 1.28) * data["advantages"]) * mask / tokens
    torch.testing.assert_close(expected, loss_of("cispo", data)[1])
    expected = -(ratio * data["advantages"]) * mask / tokens
    found = loss_of("rec", data, clip="none", weight="importance", regularizer="none")[1]
    torch.testing.assert_close(expected, found)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_a_log_prob_that_is_not_finite_is_refused_and_named(name: str, bad: float) -> None:
    data = batch(seed=1)
    data["log_probs"][3, 0] = bad
    with pytest.raises(ConfigError) as caught:
        loss_of(name, data)
    assert ("algorithm.not-finite", "row 3, response token 0") == (caught.value.code, caught.value.where)


@pytest.mark.parametrize("name", LOSSES)
def test_other_inputs_that_are_not_finite_are_named_where_they_are_used(name: str) -> None:
    chosen = part("loss", name)
    for key in ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages"):
        data = batch(seed=1)
        data[key][2, 0] = math.nan
        if key not in chosen.inputs:
            loss_of(name, data)
            continue
        with refused("algorithm.not-finite", f"{key} is nan"):
            loss_of(name, data)


@pytest.mark.parametrize("name", LOSSES)
def test_float32_is_as_good_as_its_type(name: str) -> None:
    data = batch(seed=7)
    single = {key: value.float() if value.is_floating_point() else value for key, value in data.items()}
    fixed = _fixed(name)
    assert loss_of(name, data, **fixed)[0] == pytest.approx(loss_of(name, single, **fixed)[0], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_an_unknown_option_is_refused(name: str) -> None:
    with refused("algorithm.input", "clip_lo"):
        loss_of(name, batch(), clip_lo=0.1)


@pytest.mark.parametrize("name", LOSSES)
def test_a_missing_input_is_named(name: str) -> None:
    data = batch()
    required = [key for key in part("loss", name).needs if key in data and key not in ("log_probs", "response_mask")]
    for key in required:
        with refused("algorithm.input", key):
            policy_loss(name, **{**data, key: None}, global_tokens=9, global_sequences=8)


@pytest.mark.parametrize("name", LOSSES)
def test_an_engine_gets_the_same_loss_by_a_spec(name: str) -> None:
    """Split into micro-batches, with what was prepared; never silently on parts of a group."""
    data = batch(seed=4)
    options = {**OPTIONS.get(name, {}), **_fixed(name), "aggregation": "seq-mean-token-mean"}
    function = resolve_loss(LossSpec(name=name, options=options, global_counts=counts(data)))
    columns = prepare(name, **data, **OPTIONS.get(name, {}), **_fixed(name))
    whole = loss_of(name, data, aggregation="seq-mean-token-mean", **_fixed(name))[0]
    total = 0.0
    for rows in (slice(0, 3), slice(3, 8)):
        share = {key: value[rows] for key, value in {**data, **columns}.items()}
        loss, metrics = function(TokenOutput(log_probs=share.pop("log_probs")), share)
        assert float(loss) == float(metrics["policy/loss"])
        total += float(loss)
    assert whole == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("name", [name for name in LOSSES if part("loss", name).whole_batch])
def test_an_engine_refuses_a_whole_batch_loss_without_what_it_needs(name: str) -> None:
    data = batch()
    few = {"global_tokens": 10, "global_sequences": 8}
    function = resolve_loss(LossSpec(name=name, options={}, global_counts=few))
    with refused("algorithm.input"):
        function(TokenOutput(log_probs=data["log_probs"]), data)


def test_a_constant_norm_is_asked_for_where_widths_differ() -> None:
    spec = LossSpec(
        name="ppo",
        options={"aggregation": "seq-mean-token-sum-norm"},
        global_counts={"global_tokens": 1, "global_sequences": 1},
    )
    with refused("algorithm.input", "length_norm"):
        resolve_loss(spec)


def test_a_spec_with_an_unknown_option_is_refused_before_the_first_batch() -> None:
    with refused("algorithm.input", "clip_high"):
        resolve_loss(
            LossSpec(name="ppo", options={"clip_hi": 0.3}, global_counts={"global_tokens": 1, "global_sequences": 1})
        )


def test_shapes_that_differ_are_refused() -> None:
    data = batch()
    data["advantages"] = data["advantages"][:, :-1]
    with refused("algorithm.input"):
        loss_of("ppo", data)
    data = batch()
    data["expert_mask"] = data["expert_mask"][:-1]
    with refused("algorithm.input"):
        policy_loss("mix", **data, global_tokens=1, global_sequences=1)


@pytest.mark.parametrize("name", LOSSES)
def test_a_part_says_whether_it_has_one_value_per_sequence(name: str) -> None:
    """Token weights cannot correct such a part, and an error says so."""
    data = batch(seed=4)
    weights = {"rollout_weights": torch.ones_like(data["log_probs"])}
    if part("loss", name).per_sequence:
        with refused("algorithm.input"):
            loss_of(name, {**data, **weights})
    else:
        assert loss_of(name, data)[0] == pytest.approx(loss_of(name, {**data, **weights})[0])


def test_the_kl_beside_a_mixture_is_that_of_the_policys_own_rows() -> None:
    data = batch(seed=5)
    spec = LossSpec(name="mix", options={"kl": "k2", "kl_coefficient": 1.0}, global_counts=counts(data))
    own = data["response_mask"] & ~data["expert_mask"].bool().unsqueeze(-1)
    _, metrics = resolve_loss(spec)(TokenOutput(log_probs=data["log_probs"]), data)
    squares = 0.5 * (data["log_probs"] - data["ref_log_probs"]).square()
    tokens = counts(data)["global_tokens"]
    assert float(squares[own].sum() / tokens) == pytest.approx(float(metrics["policy/kl"]))
