"""Checks of packages of hooks: the losses and estimators that they register."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from jackfield_conformance.registry import Capability, Subject, check
from jackfield_conformance.support.algorithms import (
    LENGTH,
    PAGE,
    ROWS,
    Batch,
    batch,
    constants_kept,
    estimate_of,
    loss_of,
    options_of,
    padded,
    parts,
    refuses,
    rows_of,
)

if TYPE_CHECKING:
    import torch

CAPABILITIES: dict[str, Capability] = {}

_SPLIT = ((0, 3), (1, 2, 4, 6, 7), (5,))  #: uneven micro-batches, which split the groups
_ORDER = (5, 2, 7, 0, 3, 6, 1, 4)
_STEP = 1e-6
_STRIDE = 3  #: every third position is moved
_BENDS = 1  #: positions at which a difference may straddle a bend, such as that of a clip


def _close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    away = float((found - wanted).abs().max())
    assert away <= 1e-8 * max(1.0, float(wanted.abs().max())), f"{what}: the largest difference is {away:.3g}"


@check("ALG-010", page=f"{PAGE}parts")
def parts_are_registered(subject: Subject) -> None:
    """Each part explains itself in the first paragraph of a docstring, and an algorithm names parts that exist."""
    from jackfield.algorithms.settings import describe

    with parts(subject) as found:
        for one in found:
            if one.kind not in ("tracker", "preparation"):
                assert describe(one)["equation"], f"{one.kind} {one.name} has no docstring with its equation"


@check("ALG-011", page=f"{PAGE}losses")
def gradients_are_right(subject: Subject) -> None:
    """The gradient of a loss equals finite differences in float64, where what is detached is a constant."""
    with parts(subject, "loss") as found:
        for one in found:
            data, options = batch(seed=3), options_of(subject, one)
            with constants_kept() as again:
                _, gradient = loss_of(one, data, options)
                wrong = []
                for place in range(0, ROWS * LENGTH, _STRIDE):
                    row, token, slope = *divmod(place, LENGTH), 0.0
                    for sign in (1.0, -1.0):
                        moved = {**data, "log_probs": data["log_probs"].clone()}
                        moved["log_probs"][row, token] += sign * _STEP
                        again()
                        slope += sign * loss_of(one, moved, options)[0] / (2 * _STEP)
                    if abs(slope - float(gradient[row, token])) > 1e-6 * max(1.0, abs(slope)):
                        wrong.append(f"[{row}, {token}]: {float(gradient[row, token]):.6g}, not {slope:.6g}")
            places = "; ".join(wrong[:4])
            assert len(wrong) <= _BENDS, f"loss {one.name} has other gradients than differences at {places}"


@check("ALG-012", page=f"{PAGE}losses")
def losses_ignore_padding(subject: Subject) -> None:
    """Positions outside the mask change neither a loss nor its gradient."""
    with parts(subject, "loss") as found:
        for one in found:
            data, options = batch(seed=4), options_of(subject, one)
            (loss, gradient), (wider, more) = loss_of(one, data, options), loss_of(one, padded(data), options)
            assert abs(loss - wider) <= 1e-9 * max(1.0, abs(loss)), f"loss {one.name}: {wider} with padding, not {loss}"
            _close(more[:, :LENGTH], gradient, f"the gradient of loss {one.name} with padding")
            assert not more[:, LENGTH:].any(), f"loss {one.name} has a gradient on padding"


@check("ALG-013", page=f"{PAGE}losses")
def losses_can_be_split(subject: Subject) -> None:
    """The sum of a loss over any micro-batches is the loss of the whole batch, and so is the gradient."""
    with parts(subject, "loss") as found:
        for one in found:
            data, options = batch(seed=5), options_of(subject, one)
            (loss, gradient), (total, sum_) = loss_of(one, data, options), loss_of(one, data, options, _SPLIT)
            assert abs(loss - total) <= 1e-9 * max(1.0, abs(loss)), f"loss {one.name}: {total} in parts, {loss} at once"
            _close(sum_, gradient, f"the gradient of loss {one.name} in micro-batches")


@check("ALG-014", page=f"{PAGE}losses")
def losses_know_no_order(subject: Subject) -> None:
    """The order of rows changes no loss."""
    with parts(subject, "loss") as found:
        for one in found:
            data, options = batch(seed=6), options_of(subject, one)
            if "seed" in one.options:  # it draws by position
                continue
            (loss, gradient), (other, moved) = loss_of(one, data, options), loss_of(one, rows_of(data, _ORDER), options)
            assert abs(loss - other) <= 1e-9 * max(1.0, abs(loss)), f"loss {one.name}: {other} in another order"
            _close(moved, gradient[list(_ORDER)], f"the gradient of loss {one.name} in another order")


@check("ALG-015", page=f"{PAGE}losses")
def losses_are_finite(subject: Subject) -> None:
    """A loss and its gradient are finite, or refused, for far policies, an empty row, and advantages that are all 0."""
    import torch

    with parts(subject, "loss") as found:
        for one in found:
            options = options_of(subject, one)
            for what, data in _extremes().items():
                if (made := refuses(partial(loss_of, one, data, options))) is None:
                    continue
                loss, gradient = made
                good = torch.isfinite(gradient).all() and abs(loss) < float("inf")
                assert good, f"loss {one.name} is not finite with {what}: {loss}"


@check("ALG-021", page=f"{PAGE}estimators")
def estimators_ignore_padding(subject: Subject) -> None:
    """Positions outside the mask have advantage 0, and change no other."""
    with parts(subject, "advantages") as found:
        for one in found:
            data, options = batch(seed=7), options_of(subject, one)
            for name, own, wider in zip(
                ("advantages", "returns"),
                estimate_of(one, data, options),
                estimate_of(one, padded(data), options),
                strict=True,
            ):
                _close(wider[:, :LENGTH], own, f"{name} of {one.name} with padding")
                assert not wider[:, LENGTH:].any(), f"{one.name} has {name} on padding"
                assert not own[~data["response_mask"]].any(), f"{one.name} has {name} outside the mask"


@check("ALG-022", page=f"{PAGE}estimators")
def estimators_know_no_order(subject: Subject) -> None:
    """Neither the order of rows and groups nor the numbers of groups change an advantage."""
    with parts(subject, "advantages") as found:
        for one in found:
            data, options = batch(seed=8), options_of(subject, one)
            moved = rows_of(data, _ORDER)
            own, other = estimate_of(one, data, options)[0], estimate_of(one, moved, options)[0]
            _close(other, own[list(_ORDER)], f"advantages of {one.name} in another order")
            named = {**data, "group_ids": 7 - 3 * data["group_ids"]}
            _close(estimate_of(one, named, options)[0], own, f"advantages of {one.name} with other group numbers")


@check("ALG-023", page=f"{PAGE}estimators")
def estimators_keep_their_scope(subject: Subject) -> None:
    """An estimator that says ``token``, ``sequence`` or ``group`` estimates a group without the others."""
    with parts(subject, "advantages") as found:
        for one in found:
            data, options = batch(seed=9), options_of(subject, one)
            if one.scope_with(options) == "batch":
                continue
            rows = [row for row in range(ROWS) if data["group_ids"][row] == 0]
            alone, own = estimate_of(one, rows_of(data, rows), options)[0], estimate_of(one, data, options)[0]
            _close(alone, own[rows], f"{one.name} has scope {one.scope}; advantages of a group without the others")


@check("ALG-024", page=f"{PAGE}estimators")
def estimators_are_finite(subject: Subject) -> None:
    """Advantages are finite, or refused, for equal rewards, huge ones, a group of one, and a row without tokens."""
    import torch

    with parts(subject, "advantages") as found:
        for one in found:
            options = options_of(subject, one)
            for what, data in _extremes().items():
                made = refuses(partial(estimate_of, one, data, options)) or ()
                assert all(bool(torch.isfinite(each).all()) for each in made), f"{one.name} is not finite with {what}"


def _extremes() -> dict[str, Batch]:
    """Return batches at the edges by what is special about them."""
    import torch

    plain = batch(seed=10)

    def scored(scores: torch.Tensor, **changes: Any) -> Batch:
        rewards = torch.zeros_like(plain["token_rewards"])
        rewards[:, 0] = scores
        fields = {"token_rewards": rewards, "rewards": scores, "reward_dimensions": scores[:, None].repeat(1, 2)}
        return {**plain, **fields, **changes}

    empty = plain["response_mask"].clone()
    empty[2] = False
    far = plain["old_log_probs"] - 30.0
    ones = torch.ones(ROWS, dtype=torch.float64)
    return {
        "equal rewards": scored(ones, advantages=torch.zeros_like(plain["advantages"]), baseline_rewards=ones),
        "rewards of 1e6": scored(1e6 * plain["rewards"]),
        "groups of one": {**plain, "group_ids": torch.arange(ROWS)},
        "an empty row": {**plain, "response_mask": empty},
        "old log-probs that are 30 lower": {**plain, "old_log_probs": far},
        "log-probs that are 30 lower": {**plain, "log_probs": plain["log_probs"] - 30.0},
    }
