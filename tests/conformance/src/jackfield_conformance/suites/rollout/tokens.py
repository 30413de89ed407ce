"""Checks of rollout servers: which tokens are drawn, and their log-probabilities."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import torch

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, GenerateResult, SamplingParams
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support.rollout import PAGE, PROMPT, checked, greedy, request, serving
from jackfield_conformance.support.rollout_model import (
    VOCABULARY,
    assert_greedy,
    assert_log_probs,
    log_probs_of,
    model_logits,
)

_DRAWS = 200  #: of the test of the distribution
_SHORT, _MEDIUM, _LONG = (5,), (12, 44, 3, 50, 28), (*range(30, 60), 8, 19, 4)
#: Their texts would be tokenised to fewer tokens: neighbours make a pair that is a token.
_MERGEABLE = ((2, 3, 40, 4, 5), (24, 6, 7, 8), (33, 2, 3), (16, 17, 18, 19, 20))


@check("ROL-010", page=PAGE + "results", using=serving)
async def results_have_their_shape(subject: Subject, server: BaseRolloutServer) -> None:
    """A result has the request's id, and one log-probability and one weight version for each token."""
    sent = request("the request's own id", max_new_tokens=9, seed=1)
    result = await server.generate(sent)
    assert sent.request_id == result.request_id, f"the result is of {result.request_id!r}, not of {sent.request_id!r}"
    lengths = len(result.token_ids), len(result.log_probs), len(result.weight_versions)
    assert (9, 9, 9) == lengths, f"expected 9 tokens, log-probabilities and versions, found {lengths}"
    assert all(isinstance(token, int) and 0 <= token < VOCABULARY for token in result.token_ids), (
        f"token ids are integers of the vocabulary, found {result.token_ids}"
    )
    assert all(isinstance(value, float) and value <= 0 for value in result.log_probs), (
        f"log-probabilities are floats of at most 0, found {result.log_probs}"
    )
    assert {0} == set(result.weight_versions), f"a new server has version 0, found {result.weight_versions}"


@check("ROL-011", page=PAGE + "sampling", using=serving)
async def greedy_is_the_most_probable(subject: Subject, server: BaseRolloutServer) -> None:
    """Temperature 0 draws the most probable token each time."""
    for number, prompt in enumerate((PROMPT, _SHORT, _MEDIUM, _LONG)):
        sent = greedy(f"greedy-{number}", 20, prompt)
        result = await server.generate(sent)
        assert 20 == len(result.token_ids), f"asked for 20 tokens, got {len(result.token_ids)}"
        assert_greedy(sent, result)


@check("ROL-012", page=PAGE + "tokens", using=serving)
async def prompts_are_ids(subject: Subject, server: BaseRolloutServer) -> None:
    """A prompt is used as token ids: it is never turned into text and back, which may yield other tokens."""
    for number, prompt in enumerate(_MERGEABLE):
        await checked(subject, server, greedy(f"ids-{number}", 6, prompt))


@check("ROL-013", page=PAGE + "log-probabilities", using=serving)
async def log_probs_are_the_models(subject: Subject, server: BaseRolloutServer) -> None:
    """The log-probability of each token equals that of an independent forward pass, within the declared tolerance."""
    for number, prompt in enumerate((PROMPT, _SHORT, _LONG)):
        await checked(subject, server, request(f"plain-{number}", prompt, max_new_tokens=16, seed=number))
    await checked(subject, server, greedy("greedy", 16))


@check("ROL-014", page=PAGE + "log-probabilities")
async def temperature_is_processed(subject: Subject) -> None:
    """Processed log-probabilities are those of the logits divided by the temperature."""
    await _assert_processed(subject, {"temperature": 0.6}, {"temperature": 1.8})


@check("ROL-015", page=PAGE + "log-probabilities")
async def raw_is_raw(subject: Subject) -> None:
    """Raw log-probabilities are those of the model's logits at temperature 1, whatever the sampling parameters."""
    await _assert_processed(
        subject,
        {"temperature": 0.6, "log_probs": "raw"},
        {"temperature": 1.5, "top_k": 6, "log_probs": "raw"},
        {"top_p": 0.6, "min_p": 0.02, "log_probs": "raw"},
    )


@check("ROL-016", page=PAGE + "sampling")
async def top_k_is_processed(subject: Subject) -> None:
    """``top_k`` keeps the k most probable tokens and renormalises."""
    await _assert_processed(subject, {"top_k": 3}, {"top_k": 9}, {"top_k": 1})


@check("ROL-017", page=PAGE + "sampling")
async def top_p_is_processed(subject: Subject) -> None:
    """``top_p`` keeps the smallest set of most probable tokens with at least this probability, and renormalises."""
    await _assert_processed(subject, {"top_p": 0.8}, {"top_p": 0.35}, {"top_p": 0.01})


@check("ROL-018", page=PAGE + "sampling")
async def min_p_is_processed(subject: Subject) -> None:
    """``min_p`` keeps tokens with at least this share of the most probable token's probability, and renormalises."""
    await _assert_processed(subject, {"min_p": 0.1}, {"min_p": 0.5}, {"min_p": 1.0})


@check("ROL-019", page=PAGE + "sampling")
async def filters_have_their_order(subject: Subject) -> None:
    """Temperature, top-k, top-p and min-p apply in this order, each to the result of the previous one."""
    await _assert_processed(
        subject,
        {"temperature": 2.0, "top_p": 0.7},
        {"temperature": 0.5, "min_p": 0.2},
        {"top_k": 8, "top_p": 0.75},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.3},
    )


async def _assert_processed(subject: Subject, *settings: dict[str, Any]) -> None:
    """Require that filters keep the sampled tokens, and that log-probabilities are those after the filters."""
    async with serving(subject) as server:
        for number, sampling in enumerate(settings):
            await checked(subject, server, request(f"{sampling}", max_new_tokens=16, seed=10 + number, **sampling))


@check("ROL-020", page=PAGE + "sampling", using=serving)
async def draws_are_distributed(subject: Subject, server: BaseRolloutServer) -> None:
    """Tokens are drawn with the reported probabilities, each token of a request independently of the previous one."""
    sampling: dict[str, Any] = {"temperature": 0.8, "top_k": 24, "max_new_tokens": 2}
    sent = [request(f"draw-{seed}", seed=seed, **sampling) for seed in range(_DRAWS)]
    results = await asyncio.gather(*(server.generate(each) for each in sent))
    params = SamplingParams(temperature=0.8, top_k=24)
    pairs = [result.token_ids for result in results]
    first = log_probs_of(model_logits("base", PROMPT)[-1], params).exp().expand(_DRAWS, -1)
    after = {one: log_probs_of(model_logits("base", (*PROMPT, one))[-1], params).exp() for one, _ in pairs}
    second = torch.stack([after[one] for one, _ in pairs])
    _assert_distributed([one for one, _ in pairs], first, "first tokens")
    _assert_distributed([two for _, two in pairs], second, "second tokens")
    for what, order in (("by id", None), ("by probability", True)):
        places = _places(first, [one for one, _ in pairs], order), _places(second, [two for _, two in pairs], order)
        correlation = float(torch.corrcoef(torch.stack(places))[0, 1])
        assert abs(correlation) <= 6 / _DRAWS**0.5, (
            f"the first and the second token of a request depend on each other: their places in the cumulative "
            f"distribution, ordered {what}, correlate by {correlation:.2f}"
        )


def _places(probabilities: torch.Tensor, tokens: list[int], order: bool | None) -> torch.Tensor:
    """Return each token's place in the cumulative distribution ``[draws, V]``: uniform in (0, 1) up to its grain."""
    indexes = torch.tensor(tokens)[:, None]
    if order:
        probabilities, ranks = probabilities.sort(descending=True)
        indexes = (ranks == indexes).int().argmax(1, keepdim=True)
    return (probabilities.cumsum(1) - probabilities / 2).gather(1, indexes).squeeze(1)


def _assert_distributed(tokens: list[int], probabilities: torch.Tensor, what: str) -> None:
    """Apply Pearson's chi-square, with rare tokens pooled; the bound is exceeded once in 1e9 measurements."""
    counts, total = Counter(tokens), len(tokens)
    expected = probabilities.sum(0).tolist()
    large = [token for token, value in enumerate(expected) if value >= 4]
    rest = total - sum(expected[token] for token in large), total - sum(counts[token] for token in large)
    pairs = [(expected[token], counts[token]) for token in large] + ([rest] if rest[0] > 0.5 else [])
    statistic = sum((found - value) ** 2 / value for value, found in pairs)
    degrees = len(pairs) - 1
    bound = degrees + 9 * degrees**0.5 + 18
    assert statistic <= bound, f"{what} of {total} draws: chi-square {statistic:.0f} with {degrees} degrees of freedom"


@check("ROL-021", page=PAGE + "seeds")
async def a_seed_repeats(subject: Subject) -> None:
    """A request with a seed yields the same tokens each time, also on another server."""
    sent = request("seeded", max_new_tokens=16, seed=7, temperature=1.3)
    async with serving(subject) as server:
        one, two = await server.generate(sent), await server.generate(sent)
    async with serving(subject, seed=5, replica=2) as server:
        three = await server.generate(sent)
    assert one.token_ids == two.token_ids, f"seed 7 drew {one.token_ids}, and then {two.token_ids}"
    assert one.token_ids == three.token_ids, f"seed 7 drew {one.token_ids}, and {three.token_ids} on another server"


@check("ROL-022", page=PAGE + "seeds", using=serving)
async def a_seed_has_no_neighbours(subject: Subject, server: BaseRolloutServer) -> None:
    """A request with a seed yields the same tokens whatever other requests run."""
    sent = request("seeded", max_new_tokens=16, seed=7, temperature=1.3)
    alone = await server.generate(sent)
    others = [request(f"mate-{n}", PROMPT[n:], max_new_tokens=4 + 5 * n, seed=n) for n in range(4)]
    before, among, *_ = await asyncio.gather(
        server.generate(others[0]), server.generate(sent), *(server.generate(other) for other in others[1:])
    )
    assert 4 == len(before.token_ids), "a neighbour did not get its tokens"
    assert alone.token_ids == among.token_ids, f"seed 7 drew {alone.token_ids} alone, {among.token_ids} among others"


@check("ROL-023", page=PAGE + "seeds", using=serving)
async def seeds_differ(subject: Subject, server: BaseRolloutServer) -> None:
    """Different seeds draw different tokens, and so do different requests without a seed."""
    sampling: dict[str, Any] = {"max_new_tokens": 16, "temperature": 1.3}
    seeded = await _in_order(server, [request(f"seed-{seed}", seed=seed, **sampling) for seed in (0, 1, 2, 1 << 40)])
    unseeded = await _in_order(server, [request(f"none-{number}", **sampling) for number in range(4)])
    assert 4 == len(set(seeded)), f"requests with different seeds drew the same tokens: {seeded}"
    assert 4 == len(set(unseeded)), f"requests without a seed drew the same tokens: {unseeded}"


@check("ROL-024", page=PAGE + "seeds")
async def the_replica_has_a_seed(subject: Subject) -> None:
    """Requests without a seed draw from the replica's seed: the same seed repeats the tokens, another one does not."""
    runs = {}
    for name, seed in (("first", 3), ("again", 3), ("other", 4)):
        async with serving(subject, seed=seed) as server:
            runs[name] = await _in_order(server, [request(f"r-{n}", max_new_tokens=12) for n in range(2)])
    assert runs["first"] == runs["again"], "two replicas with one seed drew different tokens for the same requests"
    assert runs["first"] != runs["other"], "two replicas with different seeds drew the same tokens"


async def _in_order(server: BaseRolloutServer, requests: list[GenerateRequest]) -> list[tuple[int, ...]]:
    return [(await server.generate(each)).token_ids for each in requests]


@check("ROL-025", page=PAGE + "requests", using=serving)
async def requests_do_not_mix(subject: Subject, server: BaseRolloutServer) -> None:
    """Requests of different lengths that run together each get their own tokens, as many as they asked for."""
    prompts = (PROMPT, _SHORT, _MEDIUM, _LONG[:20], PROMPT, PROMPT[2:])
    counts = (3, 17, 9, 2, 12, 24)
    sent = [greedy(f"together-{n}", counts[n], prompt) for n, prompt in enumerate(prompts)]
    results: list[GenerateResult] = await asyncio.gather(*(server.generate(each) for each in sent))
    for each, result in zip(sent, results, strict=True):
        assert each.request_id == result.request_id, f"{each.request_id!r} got the result of {result.request_id!r}"
        assert each.sampling.max_new_tokens == len(result.token_ids), (
            f"{each.request_id!r} asked for {each.sampling.max_new_tokens} tokens and got {len(result.token_ids)}"
        )
        assert_greedy(each, result)
        assert_log_probs(subject, each, result)
