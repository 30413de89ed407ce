"""Tokens and log-probabilities against the library's own generation and forward passes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from jackfield.abc.rollout import AbortRequest, GenerateResult

PROMPTS = [tuple(random.Random(length).choices(range(2, 61), k=length)) for length in (1, 3, 17, 33, 8, 4)]


def greedy_by_library(model: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0
    )
    return tuple(out[0, len(prompt) :].tolist())


def log_probs_by_forward(model: Any, prompt: tuple[int, ...], result: GenerateResult) -> torch.Tensor:
    """``[T, V]`` at temperature 1, float64 arithmetic, one pass over the whole text."""
    ids = torch.tensor([[*prompt, *result.token_ids]])
    with torch.no_grad():
        logits = model.double()(ids).logits[0, len(prompt) - 1 : -1]
    model.float()
    return logits.log_softmax(-1)


def test_greedy_tokens_are_the_librarys(serve: Any, make_request: Any, reference: Any) -> None:
    """Prompts of 1 to 33 tokens in one batch, each until its end token or 40 tokens."""

    async def main() -> list[GenerateResult]:
        async with serve() as server:
            requests = [make_request(n, p, temperature=0, max_new_tokens=40) for n, p in enumerate(PROMPTS)]
            return await asyncio.gather(*(server.generate(request) for request in requests))

    results = asyncio.run(main())
    for prompt, result in zip(PROMPTS, results, strict=True):
        expected = greedy_by_library(reference, prompt, 40)
        assert expected == result.token_ids
        assert ("stop" if expected[-1] == 1 else "length") == result.finish_reason


@pytest.mark.parametrize("settings", [{}, {"max_batch_size": 2}, {"attention": "eager"}, {"max_prefill_tokens": 4}])
def test_joining_at_any_time_changes_no_token(serve: Any, make_request: Any, reference: Any, settings: Any) -> None:
    """Requests join while others are in the middle, and leave at different times."""

    async def main() -> list[GenerateResult]:
        async with serve(**settings) as server:
            tasks = []
            guide = server.generate_stream(make_request("guide", temperature=0, max_new_tokens=60, ignore_eos=True))
            count = 0
            async for _ in guide:
                if count < len(PROMPTS):
                    request = make_request(count, PROMPTS[count], temperature=0, max_new_tokens=10 + 3 * count)
                    tasks.append(asyncio.create_task(server.generate(request)))
                count += 1
            return await asyncio.gather(*tasks)

    for index, result in enumerate(asyncio.run(main())):
        assert greedy_by_library(reference, PROMPTS[index], 10 + 3 * index) == result.token_ids


@pytest.mark.parametrize("kind", ["processed", "raw"])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.6},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.2, "top_p": 0.7},
        {"min_p": 0.05},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0},
    ],
)
def test_log_probs_are_a_forwards(serve: Any, make_request: Any, reference: Any, sampling: Any, kind: str) -> None:
    """Within 1e-5 of an independent float64 computation, beside neighbours of all other kinds."""

    async def main() -> GenerateResult:
        async with serve() as server:
            neighbours = [
                make_request("a", PROMPTS[2], temperature=0, max_new_tokens=9),
                make_request("b", PROMPTS[3], temperature=0.5, seed=3, max_new_tokens=30),
                make_request("c", PROMPTS[4], top_k=3, seed=4, log_probs="raw", max_new_tokens=17),
            ]
            own = make_request(
                "own", PROMPTS[1], seed=11, max_new_tokens=24, ignore_eos=True, log_probs=kind, **sampling
            )
            results = await asyncio.gather(*(server.generate(one) for one in [*neighbours, own]))
            assert not server._loop.decoder._modes  # nothing is computed for rows that have left
            return results[-1]

    result = asyncio.run(main())
    raw = log_probs_by_forward(reference, PROMPTS[1], result)
    temperature = sampling.get("temperature", 1.0)
    wanted = raw if kind == "raw" or temperature == 0 else distribution(raw / temperature, sampling)
    expected = wanted.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
    assert len(result.log_probs) == 24
    torch.testing.assert_close(torch.tensor(result.log_probs, dtype=torch.float64), expected, atol=1e-5, rtol=0)


def distribution(scaled: torch.Tensor, sampling: dict[str, Any]) -> torch.Tensor:
    """Filters written from their definitions, row by row and token by token."""
    rows = []
    for row in scaled.softmax(-1).tolist():
        order = sorted(range(len(row)), key=lambda token: -row[token])
        order = order[: sampling.get("top_k") or None]
        total, kept, mass = sum(row[token] for token in order), [], 0.0
        for token in order:
            if mass / total < sampling.get("top_p", 1.0):
                kept.append(token)
            mass += row[token]
        kept = [token for token in kept if row[token] >= sampling.get("min_p", 0.0) * row[order[0]]]
        left = torch.full((len(row),), -torch.inf, dtype=torch.float64)
        left[kept] = (
            torch.tensor([row[token] for token in kept], dtype=torch.float64) / sum(row[t] for t in kept)
        ).log()
        rows.append(left)
    return torch.stack(rows)


def test_a_seed_fixes_the_tokens_whatever_else_runs(serve: Any, make_request: Any) -> None:
    """Alone, in a batch, and in another place of another batch."""

    async def main() -> list[tuple[int, ...]]:
        async with serve(max_batch_size=8) as server:
            own: dict[str, Any] = {"seed": 42, "max_new_tokens": 20, "temperature": 1.3, "ignore_eos": True}
            alone = await server.generate(make_request("own", PROMPTS[4], **own))
            found = [alone.token_ids]
            for round_ in (0, 1):
                others = [make_request((round_, n), PROMPTS[n], seed=n, max_new_tokens=5 * n + 2) for n in range(5)]
                mine = make_request("own", PROMPTS[4], **own)
                batch = [mine, *others] if round_ else [*others, mine]
                results = await asyncio.gather(*(server.generate(one) for one in batch))
                found += [one.token_ids for one in results if one.request_id == "own"]
            return found

    first, *rest = asyncio.run(main())
    assert [first, first] == rest


def test_two_seeds_differ_and_two_servers_of_one_seed_agree(serve: Any, make_request: Any) -> None:
    """Requests without a seed draw from the replica's: different from each other, the same in the same order."""

    async def main(seed: int) -> list[tuple[int, ...]]:
        async with serve(context={"seed": seed}) as server:
            requests = [make_request(n, max_new_tokens=20, temperature=2.0) for n in range(3)]
            return [one.token_ids for one in await asyncio.gather(*(server.generate(r) for r in requests))]

    first = asyncio.run(main(1))
    assert first == asyncio.run(main(1))
    assert len(set(first + asyncio.run(main(2)))) == 6


def test_sharing_a_prompt_changes_no_token(serve: Any, make_request: Any) -> None:
    """A group of one prompt is prefilled once; each member draws what it would draw alone."""

    async def main() -> tuple[list[Any], list[Any]]:
        async with serve() as server:

            def member(n: int) -> Any:
                return make_request(n, PROMPTS[2], seed=n, max_new_tokens=12)

            together = await asyncio.gather(*(server.generate(member(n)) for n in range(6)))
            return together, [await server.generate(member(n)) for n in range(6)]

    together, alone = asyncio.run(main())
    assert [one.token_ids for one in alone] == [one.token_ids for one in together]


def test_a_stream_yields_what_generate_returns(serve: Any, make_request: Any) -> None:
    """Token by token, with log-probabilities and versions; the reason comes last."""

    async def main() -> tuple[GenerateResult, list[Any]]:
        async with serve() as server:
            whole = await server.generate(make_request("a", seed=7, max_new_tokens=15))
            return whole, [
                chunk async for chunk in server.generate_stream(make_request("a", seed=7, max_new_tokens=15))
            ]

    whole, chunks = asyncio.run(main())
    assert whole.token_ids == tuple(token for chunk in chunks for token in chunk.token_ids)
    assert whole.log_probs == pytest.approx([value for chunk in chunks for value in chunk.log_probs], abs=1e-6)
    assert whole.weight_versions == tuple(version for chunk in chunks for version in chunk.weight_versions)
    assert [None] * (len(chunks) - 1) + [whole.finish_reason] == [chunk.finish_reason for chunk in chunks]
    assert [1] * len(whole.token_ids) + [0] == [len(chunk.token_ids) for chunk in chunks]


def test_ends(serve: Any, make_request: Any, reference: Any) -> None:
    """A stop token ends and is included, ``ignore_eos`` ignores the model's own only, limits are exact."""
    free = greedy_by_library_ignoring_end(reference, PROMPTS[1], 30)
    stop = free[9]
    first = free.index(stop)

    async def main() -> list[GenerateResult]:
        async with serve(context={"max_model_len": 20}) as server:
            common: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
            return [
                await server.generate(make_request("stop", PROMPTS[1], stop_token_ids=(stop,), **common)),
                await server.generate(make_request("one", PROMPTS[1], max_new_tokens=1, **common)),
                await server.generate(make_request("limit", PROMPTS[1], max_new_tokens=500, **common)),
            ]

    stopped, one, limited = asyncio.run(main())
    assert (free[: first + 1], "stop") == (stopped.token_ids, stopped.finish_reason)
    assert (free[:1], "length") == (one.token_ids, one.finish_reason)
    assert (free[: 20 - len(PROMPTS[1])], "length") == (limited.token_ids, limited.finish_reason)


def greedy_by_library_ignoring_end(model: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=count, eos_token_id=-1, pad_token_id=0
    )
    return tuple(out[0, len(prompt) :].tolist())


def test_the_models_end_token_ends(serve: Any, make_request: Any) -> None:
    """Hot sampling meets the end token soon; it is the last token, and only the last."""

    async def main() -> list[GenerateResult]:
        async with serve() as server:
            requests = [make_request(n, seed=n, temperature=2.0, max_new_tokens=60) for n in range(40)]
            return await asyncio.gather(*(server.generate(request) for request in requests))

    ended = [result for result in asyncio.run(main()) if result.finish_reason == "stop"]
    assert len(ended) > 5
    assert all(result.token_ids.index(1) == len(result.token_ids) - 1 for result in ended)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_stop_string_ends_with_the_token_that_completes_it(
    serve: Any, make_request: Any, reference: Any, pieces: int
) -> None:
    """The text of token n is ``wn``; a string may span tokens."""
    free = greedy_by_library_ignoring_end(reference, PROMPTS[2], 30)
    words = [f"w{token}" for token in free]
    wanted = " ".join(words[6 : 6 + pieces])
    end = next(n for n in range(1, 31) if wanted in " ".join(words[:n]))

    async def main() -> GenerateResult:
        async with serve() as server:
            request = make_request("a", PROMPTS[2], temperature=0, stop=("never", wanted), ignore_eos=True)
            return await server.generate(request)

    result = asyncio.run(main())
    assert (free[:end], "stop") == (result.token_ids, result.finish_reason)


def test_more_requests_than_rows(serve: Any, make_request: Any, reference: Any) -> None:
    """Twenty requests on four rows: finished rows make room, nothing is lost or mixed up."""
    prompts = [PROMPTS[n % len(PROMPTS)] for n in range(20)]

    async def main() -> list[GenerateResult]:
        async with serve(max_batch_size=4, max_cache_tokens=200) as server:
            requests = [
                make_request(n, prompt, temperature=0, max_new_tokens=1 + (7 * n) % 13)
                for n, prompt in enumerate(prompts)
            ]
            return await asyncio.gather(*(server.generate(request) for request in requests))

    for n, result in enumerate(asyncio.run(main())):
        assert str(n) == result.request_id
        assert greedy_by_library(reference, prompts[n], 1 + (7 * n) % 13) == result.token_ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(serve: Any, make_request: Any, reference: Any, dtype: str) -> None:
    """Log-probabilities of a 16-bit model stay near those of the 32-bit one."""

    async def main() -> GenerateResult:
        async with serve(dtype=dtype) as server:
            return await server.generate(make_request("a", PROMPTS[2], seed=1, max_new_tokens=10, ignore_eos=True))

    result = asyncio.run(main())
    expected = log_probs_by_forward(reference, PROMPTS[2], result).gather(1, torch.tensor(result.token_ids)[:, None])
    assert expected[:, 0].tolist() == pytest.approx(list(result.log_probs), abs=0.5)


def test_one_burst_is_deterministic(serve: Any, make_request: Any) -> None:
    """Requests submitted together, without seeds, twice: bitwise the same results."""

    async def main() -> list[GenerateResult]:
        async with serve(max_batch_size=6) as server:
            requests = [make_request(n, PROMPTS[n % 6], temperature=1.1, max_new_tokens=3 + n % 7) for n in range(30)]
            return await asyncio.gather(*(server.generate(request) for request in requests))

    assert asyncio.run(main()) == asyncio.run(main())


def test_abort_of_nothing(serve: Any) -> None:
    """Aborting on an idle server, or an unknown request, ends nothing."""

    async def main() -> Any:
        async with serve() as server:
            return await server.abort(AbortRequest(request_ids=("nobody",)))

    assert asyncio.run(main()).request_ids == ()


def test_batch_invariant_results_are_the_same_to_the_last_bit(serve: Any, make_request: Any) -> None:
    """Tokens and log-probabilities do not depend on which other requests the server has, and when they came."""

    async def alone() -> list[GenerateResult]:
        async with serve(batch_invariant=True) as server:
            return [await server.generate(make_request(n, p, seed=n, max_new_tokens=12)) for n, p in enumerate(PROMPTS)]

    async def together() -> list[GenerateResult]:
        async with serve(batch_invariant=True) as server:
            numbered = reversed(list(enumerate(PROMPTS)))
            requests = [make_request(n, p, seed=n, max_new_tokens=12) for n, p in numbered]
            return list(reversed(await asyncio.gather(*(server.generate(request) for request in requests))))

    for one, other in zip(asyncio.run(alone()), asyncio.run(together()), strict=True):
        assert (one.token_ids, one.log_probs) == (other.token_ids, other.log_probs)
