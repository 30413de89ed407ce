"""Random numbers and drawing, without a model."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from jackfield.abc.rollout import SamplingParams
from jackfield_rollout_transformers.sampling import RowTable, draw, mix, modes_of, uniforms

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def reference_uniform(seed: int, counter: int) -> float:
    """The same hash in Python's unbounded integers."""
    bits = mix((mix(seed) + (counter + 1) * 0x9E3779B97F4A7C15) & MASK)
    return ((bits >> 12) + 0.5) * 2.0**-52


def test_random_numbers_are_the_hash_they_claim_to_be() -> None:
    """64-bit arithmetic in signed tensors equals unsigned integer arithmetic."""
    seeds = [0, 1, 2, 123456789, (1 << 63) + 5, MASK, -1]
    counters = [0, 1, 7, 4095, 1 << 20, 3, 9]
    table = RowTable.build([(SamplingParams(), seed, 0, 0) for seed in seeds], CPU)
    found = uniforms(table.integers[:, 3], torch.tensor(counters))
    assert [reference_uniform(seed, counter) for seed, counter in zip(seeds, counters, strict=True)] == found.tolist()


def test_random_numbers_are_uniform_and_uncorrelated() -> None:
    """Over neighbouring seeds and over token numbers: chi-square of 64 bins, and serial correlation."""
    for seeds, counters in ((torch.arange(64_000), 3), (torch.full((64_000,), 5), torch.arange(64_000))):
        state = torch.tensor([mix(seed) for seed in seeds.tolist()], dtype=torch.uint64).view(torch.int64)
        numbers = uniforms(state, torch.as_tensor(counters).expand(64_000))
        assert float(numbers.min()) > 0
        assert float(numbers.max()) < 1
        counts = torch.histc(numbers, 64, 0, 1)
        assert float(((counts - 1000) ** 2 / 1000).sum()) < 103  # 99.9 % quantile of chi-square with 63 degrees
        pairs = torch.corrcoef(torch.stack((numbers[:-1], numbers[1:])))
        assert abs(float(pairs[0, 1])) < 4 / math.sqrt(64_000)


def expected_probabilities(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """float64, from the definitions, one token at a time."""
    probabilities = (logits.double() / sampling.temperature).softmax(-1)
    order = probabilities.argsort(descending=True).tolist()[: sampling.top_k or None]
    total, mass, kept = float(probabilities[order].sum()), 0.0, []
    for token in order:
        if mass / total < sampling.top_p:
            kept.append(token)
        mass += float(probabilities[token])
    kept = [token for token in kept if probabilities[token] >= sampling.min_p * probabilities[order[0]]]
    result = torch.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.5, top_k=6),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.3, top_k=9, top_p=0.85, min_p=0.05),
    ],
)
def test_draws_follow_the_distribution(sampling: SamplingParams) -> None:
    """Chi-square over 40,000 seeds; nothing outside the support is ever drawn; the log-probability is the token's."""
    rows = 40_000
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    table = RowTable.build([(sampling, seed, 0, 0) for seed in range(rows)], CPU)
    needs = modes_of(sampling)
    needed = Counter({name: count * rows for name, count in needs.items()})
    tokens, log_probs = draw(logits.expand(rows, 12), table, needed)
    wanted = expected_probabilities(logits, sampling)
    counts = tokens.bincount(minlength=12).double()
    assert counts[wanted == 0].sum() == 0
    support = wanted > 0
    statistic = ((counts - rows * wanted)[support] ** 2 / (rows * wanted)[support]).sum()
    assert float(statistic) < 31.3  # 99.9 % quantile of chi-square with 11 degrees, the largest case
    torch.testing.assert_close(log_probs.double(), wanted[tokens].log(), atol=1e-5, rtol=0)


def test_a_row_draws_the_same_beside_other_kinds() -> None:
    """Greedy, filtered, tempered and raw rows in one batch give what each gives alone."""
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.4, log_probs="raw"),
        SamplingParams(top_k=2, log_probs="raw"),
        SamplingParams(temperature=0, log_probs="raw"),
    ]
    logits = torch.randn(len(kinds), 30, generator=torch.Generator().manual_seed(0)) * 3
    rows = [(kind, 100 + n, 0, n) for n, kind in enumerate(kinds)]
    together = draw(logits, RowTable.build(rows, CPU), sum((modes_of(kind) for kind in kinds), Counter()))
    for n, kind in enumerate(kinds):
        alone = draw(logits[n : n + 1], RowTable.build(rows[n : n + 1], CPU), modes_of(kind))
        assert alone[0].item() == together[0][n].item()
        assert alone[1].item() == pytest.approx(together[1][n].item(), abs=1e-6)


def test_modes_count() -> None:
    """What no row needs any more is not computed any more."""
    kinds = [SamplingParams(temperature=0), SamplingParams(top_k=1, log_probs="raw"), SamplingParams(temperature=2)]
    total = sum((modes_of(kind) for kind in kinds), Counter())
    assert Counter(greedy=1, filtered=1, tempered=1, raw=1) == total
    for kind in kinds:
        total -= modes_of(kind)
    assert Counter() == total


def test_impossible_tokens_are_never_drawn() -> None:
    """A probability of exactly 0 has no share of (0, 1), at the beginning, in the middle or at the end."""
    logits = torch.full((2000, 9), -math.inf)
    logits[:, [2, 3, 6]] = 0.0
    table = RowTable.build([(SamplingParams(), seed, 0, 0) for seed in range(2000)], CPU)
    tokens, _ = draw(logits, table, Counter())
    assert {2, 3, 6} == set(tokens.tolist())


def test_a_large_vocabulary_keeps_its_tail() -> None:
    """150,000 equally likely tokens: sums in float32 would lump them; here the upper half gets its half."""
    rows = 100
    table = RowTable.build([(SamplingParams(), seed, 0, 0) for seed in range(rows)], CPU)
    tokens, log_probs = draw(torch.zeros(1, 150_000).expand(rows, -1), table, Counter())
    assert abs(int((tokens >= 75_000).sum()) - rows / 2) < 20
    assert log_probs.tolist() == pytest.approx([-math.log(150_000)] * rows, abs=1e-5)
