"""Checks of rollout servers: where a request ends, and which are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from jackfield.abc.rollout import AbortRequest, BaseRolloutServer, GenerateRequest, GenerateResult, SleepRequest
from jackfield.errors import JackfieldError, RolloutError
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support.expecting import refused
from jackfield_conformance.support.rollout import LONG, PAGE, PROMPT, greedy, push, reading, request, serving
from jackfield_conformance.support.rollout_model import END, VOCABULARY, assert_greedy, decode, prompt_that_ends


def _assert_ends(result: GenerateResult, tokens: Sequence[int], reason: str) -> None:
    assert list(tokens) == list(result.token_ids), (
        f"request {result.request_id!r}: expected tokens {list(tokens)}, found {list(result.token_ids)}"
    )
    assert reason == result.finish_reason, (
        f"request {result.request_id!r}: expected finish_reason {reason!r}, found {result.finish_reason!r}"
    )
    lengths = {len(result.token_ids), len(result.log_probs), len(result.weight_versions)}
    assert 1 == len(lengths), f"request {result.request_id!r}: tokens, log-probabilities and versions differ in number"


@check("ROL-030", page=PAGE + "ends", using=serving)
async def stop_tokens_end(subject: Subject, server: BaseRolloutServer) -> None:
    """A request ends with the first of its stop tokens, which is included."""
    path = (await server.generate(greedy("path", 14))).token_ids
    place = next(n for n in range(4, 14) if path[n] not in path[:n])
    never = next(token for token in range(VOCABULARY) if token not in path)
    result = await server.generate(greedy("stopped", 14, stop_token_ids=(never, path[place])))
    _assert_ends(result, path[: place + 1], "stop")
    first = await server.generate(greedy("at once", 14, stop_token_ids=(path[0],)))
    _assert_ends(first, path[:1], "stop")


@check("ROL-031", page=PAGE + "ends", using=serving)
async def end_tokens_end(subject: Subject, server: BaseRolloutServer) -> None:
    """A request ends with the model's own end token, which is included."""
    path = (await server.generate(greedy("path", 12, prompt_that_ends()))).token_ids
    result = await server.generate(greedy("ended", 12, prompt_that_ends(), ignore_eos=False))
    _assert_ends(result, path[: path.index(END) + 1], "stop")


@check("ROL-032", page=PAGE + "ends", using=serving)
async def end_tokens_are_ignored(subject: Subject, server: BaseRolloutServer) -> None:
    """With ``ignore_eos`` a request continues past the model's end token; its own stop tokens still end it."""
    sent = greedy("ignored", 12, prompt_that_ends())
    result = await server.generate(sent)
    _assert_ends(result, result.token_ids, "length")
    assert 12 == len(result.token_ids), f"the request ended after {len(result.token_ids)} of 12 tokens"
    assert_greedy(sent, result)
    end = result.token_ids.index(END)
    late = next(n for n in range(end + 1, 12) if result.token_ids[n] not in result.token_ids[:n])
    stopped = await server.generate(greedy("own", 12, prompt_that_ends(), stop_token_ids=(result.token_ids[late],)))
    _assert_ends(stopped, result.token_ids[: late + 1], "stop")


@check("ROL-033", page=PAGE + "ends", using=serving)
async def limits_are_exact(subject: Subject, server: BaseRolloutServer) -> None:
    """A request without another end has ``max_new_tokens`` tokens and ends with ``length``."""
    path = (await server.generate(greedy("path", 20))).token_ids
    for count in (1, 2, 7, 13):
        _assert_ends(await server.generate(greedy(f"limit-{count}", count)), path[:count], "length")


@check("ROL-034", page=PAGE + "ends")
async def the_model_length_ends(subject: Subject) -> None:
    """Prompt and response together never exceed ``max_model_len``; a request that reaches it ends with ``length``."""
    async with serving(subject, max_model_len=len(PROMPT) + 5) as server:
        result = await server.generate(greedy("too many", 50))
        assert 5 == len(result.token_ids), f"5 tokens had room, {len(result.token_ids)} were generated"
        _assert_ends(result, result.token_ids, "length")
        fits = await server.generate(greedy("fits", 3))
        _assert_ends(fits, result.token_ids[:3], "length")


@check("ROL-035", capability="stop_strings", page=PAGE + "ends", using=serving)
async def stop_strings_end(subject: Subject, server: BaseRolloutServer) -> None:
    """A request ends with the token that completes one of its stop strings in its response."""
    path = (await server.generate(greedy("path", 16))).token_ids
    string, place = _spanning(path)
    result = await server.generate(greedy("stopped", 16, stop=("#", string)))
    _assert_ends(result, path[: place + 1], "stop")
    _assert_ends(await server.generate(greedy("never", 16, stop=("#@",))), path, "length")
    prompt = (*PROMPT, 12)
    own = (await server.generate(greedy("own path", 8, prompt))).token_ids
    text = decode(prompt[-3:-1])
    assert text not in decode(own), "the suite's prompt is badly chosen"
    _assert_ends(await server.generate(greedy("in the prompt", 8, prompt, stop=(text,))), own, "length")


def _spanning(path: Sequence[int]) -> tuple[str, int]:
    """Find a string that two tokens make together, and the place of the token that first completes it."""
    for place in range(4, len(path)):
        string = decode(path[place - 1 : place])[-1] + decode(path[place : place + 1])[0]
        if string not in decode(path[:place]):
            return string, place
    raise AssertionError("the greedy path of the tiny model has no string of its own")


async def _assert_refused(server: BaseRolloutServer, sent: GenerateRequest, *codes: str) -> None:
    """Require that ``generate`` and ``generate_stream`` refuse a request and name it."""
    with refused(RolloutError, "rollout.request", *codes, naming=sent.request_id):
        await server.generate(sent)
    with refused(RolloutError, "rollout.request", *codes, naming=sent.request_id):
        async for _ in server.generate_stream(sent):
            pass


@check("ROL-036", page=PAGE + "refusals")
async def prompts_have_a_length(subject: Subject) -> None:
    """An empty prompt, and one without room for an answer, is refused with ``rollout.request``.

    A prompt that leaves no room within ``max_model_len`` may also have the code ``rollout.context-length``.
    """
    async with serving(subject, max_model_len=10) as server:
        await _assert_refused(server, request("empty-prompt", ()))
        await _assert_refused(server, request("long-prompt", range(2, 12)), "rollout.context-length")
        await _assert_refused(server, request("longer-prompt", range(2, 40)), "rollout.context-length")
        result = await server.generate(greedy("fits", 1, range(2, 11)))
        _assert_ends(result, result.token_ids[:1], "length")


@check("ROL-037", page=PAGE + "refusals", using=serving)
async def prompts_have_a_vocabulary(subject: Subject, server: BaseRolloutServer) -> None:
    """A prompt with an id outside the vocabulary is refused with ``rollout.request``, and running requests continue."""
    mate = greedy("mate", 20)
    running = await reading(server, mate, 1)
    for number, token in enumerate((VOCABULARY, -1, 1 << 40)):
        await _assert_refused(server, request(f"bad-id-{number}", (5, token, 6)))
    result = await running.result()
    assert_greedy(mate, result)
    assert 20 == len(result.token_ids), "a request that ran beside refused ones was cut short"


@check("ROL-038", page=PAGE + "refusals", using=serving)
async def sampling_has_its_ranges(subject: Subject, server: BaseRolloutServer) -> None:
    """Sampling parameters out of range are refused with ``rollout.request``, not clipped."""
    wrong: tuple[dict[str, Any], ...] = (
        {"max_new_tokens": 0},
        {"temperature": -0.5},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"temperature": 1e-300},
        {"temperature": 1e308},
        {"temperature": float("inf")},
        {"max_new_tokens": 1 << 40},
        {"top_k": 1 << 70},
        {"seed": 1 << 70},
    )
    with attrs.validators.disabled():  # another process may send such requests unchecked
        sent = [request(f"wrong-sampling-{number}", **sampling) for number, sampling in enumerate(wrong)]
    for each in sent:
        await _assert_refused(server, each)


@check("ROL-041", page=PAGE + "refusals", using=serving)
async def extremes_harm_no_neighbour(subject: Subject, server: BaseRolloutServer) -> None:
    """Sampling at the ends of its ranges is served, and other requests get the same tokens as alone."""
    extremes: tuple[dict[str, Any], ...] = (
        {"temperature": 0.01, "top_p": 1e-300},
        {"temperature": 0.01},
        {"temperature": 100},
        {"top_p": 1e-300, "top_k": 2**31 - 1},
        {"min_p": 1.0},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
    )
    sent = [request(f"extreme-{number}", max_new_tokens=3, **each) for number, each in enumerate(extremes)]
    mate = greedy("mate", 24)
    running = await reading(server, mate, 1)
    for each in sent:
        result = await server.generate(each)
        _assert_ends(result, result.token_ids[:3], "length")
        assert all(value <= 1e-4 for value in result.log_probs), f"{each.sampling}: {result.log_probs}"
    result = await running.result()
    assert_greedy(mate, result)
    assert 24 == len(result.token_ids), "a request that ran beside extreme ones was cut short"


@check("ROL-039", page=PAGE + "refusals", using=serving)
async def ids_are_taken(subject: Subject, server: BaseRolloutServer) -> None:
    """A request with the id of a running one is refused, and the running one continues; afterwards the id is free."""
    reader = await reading(server, greedy("the-same-id", LONG))
    await _assert_refused(server, greedy("the-same-id", 3, PROMPT[1:]))
    count = len(reader.token_ids)
    await reader.at_least(count + 2)
    assert len(reader.token_ids) >= count + 2, "the request whose id was used again has ended"
    await server.abort(AbortRequest())
    assert_greedy(reader.sent, await reader.result())
    again = await server.generate(greedy("the-same-id", 3))
    _assert_ends(again, reader.token_ids[:3], "length")


@check("ROL-040", page=PAGE + "capabilities", using=serving)
async def the_undeclared_is_refused(subject: Subject, server: BaseRolloutServer) -> None:
    """A request that needs a capability which the manifest does not declare is refused, never silently ignored."""
    codes = "plugin.capability", "rollout.request"
    plain = greedy("plain", 5)
    before = await server.generate(plain)
    if not subject.has("multi_modal"):
        with refused(JackfieldError, *codes):
            await server.generate(attrs.evolve(greedy("image", 5), multi_modal_data={"images": [b""]}))
    if not subject.has("stop_strings"):
        with refused(JackfieldError, *codes):
            await server.generate(greedy("string", 5, stop=("#",)))
    for kind in ("adapter", "delta"):
        if not subject.has(f"weights_{kind}"):
            with refused(JackfieldError, "plugin.capability"):
                await push(subject, server, 1, kind=kind)
    if not subject.has("sleep"):
        with refused(JackfieldError, "plugin.capability"):
            await server.sleep(SleepRequest())
    after = await server.generate(plain)
    assert before == after, f"a refusal has changed the server: {before} before, {after} after"
