"""The critic's loss, the entropy bonus and distillation against their definitions in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from jackfield.abc.engine import TokenOutput
from jackfield.algorithms import LossSpec, names, resolve_loss
from jackfield.algorithms.losses import VALUE_LOSS, distillation_loss, value_loss
from jackfield.errors import ConfigError
from jackfield_testing import refused

from .cases import batch, counts


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def test_the_value_loss_against_its_definition() -> None:
    data = batch(seed=1)
    values, old, returns = data["log_probs"], data["old_log_probs"], data["advantages"]
    inputs = {"returns": returns, "response_mask": data["response_mask"], "aggregation": "token-mean"}
    inputs |= {key: counts(data)[key] for key in ("global_tokens", "global_sequences")}

    def reference(clip_at: float | None) -> float:
        total = []
        for row in range(8):
            for t in range(5):
                if not data["response_mask"][row, t]:
                    continue
                v, o, r = float(values[row, t]), float(old[row, t]), float(returns[row, t])
                bounded = v if clip_at is None else clip(v, o - clip_at, o + clip_at)
                total.append(0.5 * max((v - r) ** 2, (bounded - r) ** 2))
        return math.fsum(total) / len(total)

    assert reference(0.2) == pytest.approx(float(value_loss(values=values, old_values=old, **inputs)[0]))
    assert reference(None) == pytest.approx(float(value_loss(values=values, clip=None, **inputs)[0]))
    with refused("algorithm.input", "old_values"):
        value_loss(values=values, **inputs)
    values = values.clone()
    values[2, 0] = math.nan
    with refused("algorithm.not-finite", "row 2, response token 0"):
        value_loss(values=values, clip=None, **inputs)


def test_a_policy_loss_rewards_entropy() -> None:
    entropy = torch.tensor([[1.0, 3.0, math.nan]], requires_grad=True)
    counts = {"global_tokens": 2, "global_sequences": 1}
    composed = resolve_loss(LossSpec(name="sft", options={"entropy_coefficient": 0.5}, global_counts=counts))
    data = TensorDict({"response_mask": torch.tensor([[1, 1, 0]])}, batch_size=[1])
    loss, metrics = composed(TokenOutput(log_probs=torch.zeros(1, 3), entropy=entropy), data)
    loss.backward()
    assert (-1.0, 2.0) == (float(loss.detach()), float(metrics["policy/entropy"]))
    assert entropy.grad is not None
    assert [-0.25, -0.25, 0.0] == entropy.grad[0].tolist()


def vocabulary(seed: int, size: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(4, 3, size, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in "st")
    mask = torch.rand(4, 3, generator=generator) < 0.7
    mask[:, 0] = True
    return student, teacher, mask


def kl_reference(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


@pytest.mark.parametrize("name", names("distillation"))
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10_000))
def test_distillation_against_its_definition(name: str, seed: int) -> None:
    student, teacher, mask = vocabulary(seed)

    def reference(s: list[float], t: list[float]) -> float:
        m = [0.3 * a + 0.7 * b for a, b in zip(t, s, strict=True)]
        return {
            "forward_kl": kl_reference(t, s),
            "reverse_kl": kl_reference(s, t),
            "jsd": 0.3 * kl_reference(t, m) + 0.7 * kl_reference(s, m),
        }[name]

    kept = [(row, t) for row in range(4) for t in range(3) if mask[row, t]]
    expected = math.fsum(reference(student[k].exp().tolist(), teacher[k].exp().tolist()) for k in kept) / len(kept)
    options = {"beta": 0.3} if name == "jsd" else {}
    total = 0.0
    for rows in (slice(0, 1), slice(1, 4)):
        junk = student[rows].masked_fill(~mask[rows].unsqueeze(-1), math.nan).requires_grad_()
        loss, _ = distillation_loss(
            name,
            log_probs=junk,
            teacher_log_probs=teacher[rows],
            response_mask=mask[rows],
            global_tokens=len(kept),
            global_sequences=4,
            **options,
        )
        loss.backward()
        assert junk.grad is not None
        assert bool(junk.grad.isfinite().all())
        total += float(loss.detach())
    assert expected == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("name", names("distillation"))
def test_a_student_that_equals_its_teacher_has_nothing_to_learn(name: str) -> None:
    logits = torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(-1)
    loss, _ = distillation_loss(
        name,
        log_probs=log_probs,
        teacher_log_probs=log_probs.detach(),
        response_mask=torch.ones(2, 2),
        global_tokens=4,
        global_sequences=2,
    )
    loss.backward()
    assert 0.0 == pytest.approx(float(loss.detach()), abs=1e-12)
    assert logits.grad is not None
    assert 0.0 == pytest.approx(float(logits.grad.abs().max()), abs=1e-12)


def test_tokens_that_the_teacher_excludes() -> None:
    """Fine for forward KL and JSD; infinite for reverse KL, and then it is named."""
    student = torch.tensor([[[0.5, 0.5]]]).log()
    teacher = torch.tensor([[[1.0, 0.0]]]).log()
    inputs = {
        "log_probs": student,
        "teacher_log_probs": teacher,
        "response_mask": torch.ones(1, 1),
        "global_tokens": 1,
        "global_sequences": 1,
    }
    assert math.log(2) == pytest.approx(float(distillation_loss("forward_kl", **inputs)[0]))
    mixed = 0.5 * math.log(1 / 0.75) + 0.5 * (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2))
    assert mixed == pytest.approx(float(distillation_loss("jsd", **inputs)[0]))
    with refused("algorithm.not-finite", "row 0, response token 0"):
        distillation_loss("reverse_kl", **inputs)
    with refused("algorithm.input"):
        distillation_loss("jsd", beta=1.0, **inputs)


def test_a_critic_finds_its_loss_by_name_and_shares_of_it_add_up() -> None:
    generator = torch.Generator().manual_seed(3)
    values, returns, old = torch.rand(3, 4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.7
    counts = {"global_tokens": int(mask.sum()), "global_sequences": 4}
    spec = LossSpec(name=VALUE_LOSS, options={"clip": 0.1, "aggregation": "seq-mean-token-mean"}, global_counts=counts)
    function = resolve_loss(spec)
    total = 0.0
    for rows in (slice(0, 1), slice(1, 4)):
        data = {"response_mask": mask[rows], "returns": returns[rows], "values": old[rows]}
        output = TokenOutput(log_probs=torch.zeros_like(values[rows]), values=values[rows])
        loss, metrics = function(output, data)
        assert float(loss) == pytest.approx(float(metrics["value/loss"]))
        total += float(loss)
    expected, _ = value_loss(
        values=values,
        returns=returns,
        response_mask=mask,
        old_values=old,
        clip=0.1,
        aggregation="seq-mean-token-mean",
        **counts,  # type: ignore[arg-type]
    )
    assert float(expected) == pytest.approx(total)


def test_an_error_of_a_micro_batch_names_the_row_of_the_batch() -> None:
    ones, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    bad = ones.clone()
    bad[1, 2] = math.inf
    function = resolve_loss(LossSpec(name="sft", global_counts={"global_tokens": 6, "global_sequences": 2}))
    with pytest.raises(ConfigError) as caught:
        function(TokenOutput(log_probs=bad), {"response_mask": mask, "row": torch.tensor([7, 4])})
    assert "row 4, response token 2" == caught.value.where
