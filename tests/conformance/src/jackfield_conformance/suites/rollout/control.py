"""Checks of rollout servers: streams, aborts and pauses."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from jackfield.abc.rollout import (
    AbortRequest,
    BaseRolloutServer,
    GenerateRequest,
    GenerateResult,
    PauseRequest,
    ResumeRequest,
)
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support.rollout import (
    LONG,
    PAGE,
    PROMPT,
    Reader,
    assert_counted,
    assert_served,
    breathe,
    calling,
    ended,
    greedy,
    reading,
    request,
    serving,
    spawn,
    standing_still,
)
from jackfield_conformance.support.rollout_model import assert_greedy, prompt_that_ends, tolerance


def _assert_aborted(sent: GenerateRequest, result: GenerateResult, at_least: int = 0) -> None:
    """Require that a request ended early, with correct tokens so far."""
    assert "abort" == result.finish_reason, f"{sent.request_id!r} ended with {result.finish_reason!r}, not 'abort'"
    count = len(result.token_ids)
    assert at_least <= count < LONG, f"{sent.request_id!r} was aborted and returned {count} tokens"
    assert count == len(result.log_probs) == len(result.weight_versions), f"{sent.request_id!r}: lengths differ"
    if sent.sampling.temperature == 0:
        assert_greedy(sent, result)


async def _assert_nothing_runs(server: BaseRolloutServer, why: str) -> None:
    """Require that the server is idle after a request of a few tokens."""
    await server.generate(greedy("passer-by", 4))
    await assert_counted(server, 0, 0, why)
    with standing_still(f"{why}, and the model still runs"):
        await breathe()


@check("ROL-050", page=PAGE + "streams", using=serving)
async def streams_equal_results(subject: Subject, server: BaseRolloutServer) -> None:
    """The chunks of a stream together equal the result of ``generate``; only the last one has a finish reason."""
    sents = [
        request("seeded", max_new_tokens=14, seed=3),
        greedy("ending", 12, prompt_that_ends(), ignore_eos=False),
        request("single", max_new_tokens=1, seed=4),
    ]
    for sent in sents:
        whole = await server.generate(sent)
        reader = Reader(server, sent)
        streamed = await reader.result()
        assert whole.token_ids == streamed.token_ids, f"{sent.request_id!r}: other tokens in a stream"
        assert whole.finish_reason == streamed.finish_reason, f"{sent.request_id!r}: another end in a stream"
        assert whole.weight_versions == streamed.weight_versions, f"{sent.request_id!r}: other versions in a stream"
        _assert_close(subject, whole, streamed)
        for chunk in reader.chunks:
            lengths = {len(chunk.token_ids), len(chunk.log_probs), len(chunk.weight_versions)}
            assert 1 == len(lengths), f"{sent.request_id!r}: a chunk's parts differ in length: {chunk}"
            assert sent.request_id == chunk.request_id, f"a chunk of {sent.request_id!r} says {chunk.request_id!r}"
        reasons = [chunk.finish_reason for chunk in reader.chunks]
        assert [None] * (len(reasons) - 1) == reasons[:-1], f"a chunk before the last has a reason: {reasons}"
        assert reasons[-1] is not None, "the last chunk has no finish_reason"


@check("ROL-051", page=PAGE + "streams", using=serving)
async def streams_flow(subject: Subject, server: BaseRolloutServer) -> None:
    """A stream yields tokens as they are generated, not all at the end."""
    reader = Reader(server, greedy("streamed", 12))
    await reader.result()
    assert len(reader.chunks) > 1, "12 tokens came in one chunk, at the end"


@check("ROL-052", page=PAGE + "streams", using=serving)
async def closing_a_stream_aborts(subject: Subject, server: BaseRolloutServer) -> None:
    """Closing the iterator of a stream aborts its request."""
    stream: Any = server.generate_stream(greedy("closed", LONG))
    for _ in range(2):
        await anext(stream)
    await stream.aclose()
    await _assert_nothing_runs(server, "a stream was closed")


def _assert_close(subject: Subject, one: GenerateResult, two: GenerateResult) -> None:
    differences = [abs(a - b) for a, b in zip(one.log_probs, two.log_probs, strict=True)]
    assert max(differences) <= 2 * tolerance(subject), (
        f"{one.request_id!r}: the same tokens have log-probabilities that differ by up to {max(differences):.6f}"
    )


@check("ROL-053", page=PAGE + "aborts", using=serving)
async def aborts_end_requests(subject: Subject, server: BaseRolloutServer) -> None:
    """Aborted requests return their tokens so far with ``abort``, the result names them, and the others continue."""
    streamed, whole, mate = greedy("streamed", LONG), greedy("whole", LONG, PROMPT[1:]), greedy("mate", 24)
    caller, other = calling(server, whole), calling(server, mate)
    reader = await reading(server, streamed, 3)
    result = await server.abort(AbortRequest(request_ids=("streamed", "whole", "unknown")))
    assert ["streamed", "whole"] == sorted(result.request_ids), f"abort says it ended {result.request_ids}"
    _assert_aborted(streamed, await reader.result(), 3)
    _assert_aborted(whole, await caller, 1)
    finished = await other
    assert_greedy(mate, finished)
    assert (24, "length") == (len(finished.token_ids), finished.finish_reason), "an abort has cut another request"


@check("ROL-054", page=PAGE + "aborts", using=serving)
async def aborting_all(subject: Subject, server: BaseRolloutServer) -> None:
    """An abort without ids ends every request, including waiting ones."""
    running = await reading(server, greedy("running", LONG))
    await server.pause(PauseRequest())
    sent = greedy("waiting", 8)
    waiting = calling(server, sent)
    await breathe()
    result = await server.abort(AbortRequest())
    assert ["running", "waiting"] == sorted(result.request_ids), f"abort says it ended {result.request_ids}"
    _assert_aborted(running.sent, await running.result(), 2)
    _assert_aborted(sent, await waiting)
    await server.resume(ResumeRequest())
    nothing = await server.abort(AbortRequest())
    assert () == nothing.request_ids, f"nothing runs, and abort says it ended {nothing.request_ids}"


@check("ROL-055", page=PAGE + "aborts", using=serving)
async def aborted_is_over(subject: Subject, server: BaseRolloutServer) -> None:
    """When ``abort`` returns, the requests generate no more, and their ids are free."""
    sent = greedy("aborted", LONG)
    reader = await reading(server, sent)
    await server.abort(AbortRequest(request_ids=("aborted",)))
    with standing_still("the model runs although its only request was aborted"):
        await assert_counted(server, 0, 0, "the only request was aborted")
        await breathe()
    await reader.result()
    again = await server.generate(greedy("aborted", 5))
    assert 5 == len(again.token_ids), "a new request of an aborted one's id did not get its tokens"


@check("ROL-056", page=PAGE + "aborts", using=serving)
async def cancelling_aborts(subject: Subject, server: BaseRolloutServer) -> None:
    """Cancelling a call of ``generate`` aborts its request, and no other."""
    cancelled, mate = calling(server, greedy("cancelled", LONG, PROMPT[1:])), greedy("mate", 24)
    reader = await reading(server, mate)
    cancelled.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cancelled
    result = await reader.result()
    assert_greedy(mate, result)
    assert 24 == len(result.token_ids), "another request than the cancelled one was cut short"
    await _assert_nothing_runs(server, "a call was cancelled")


@check("ROL-057", page=PAGE + "pauses", using=serving)
async def paused_is_paused(subject: Subject, server: BaseRolloutServer) -> None:
    """When ``pause`` returns, no forward pass runs, and no token comes until ``resume``."""
    reader, caller = Reader(server, greedy("streamed", LONG)), calling(server, greedy("whole", LONG))
    await reader.at_least(3)
    await server.pause(PauseRequest())
    with standing_still("a forward pass runs although the server is paused"):
        count = await reader.drained(server)
        await breathe()
    assert count == len(reader.token_ids), "tokens come although the server is paused"
    await server.resume(ResumeRequest())
    await reader.at_least(count + 3)
    assert len(reader.token_ids) >= count + 3, "no tokens come after resume"
    await server.abort(AbortRequest())
    await reader.result()
    await caller


@check("ROL-058", page=PAGE + "pauses", using=serving)
async def kept_requests_go_on(subject: Subject, server: BaseRolloutServer) -> None:
    """Requests that a pause keeps end as without the pause: with the same tokens and one token budget."""
    sents = [request("seeded", max_new_tokens=LONG, seed=8), greedy("greedy", LONG - 20)]
    expected = [await reader.result() for reader in [Reader(server, sent) for sent in sents]]
    readers = [Reader(server, sent) for sent in sents]
    for count in (4, 9):
        for reader in readers:
            await reader.at_least(count)
        paused = await server.pause(PauseRequest(mode="keep"))
        assert 2 == paused.running, f"pause keeps 2 requests, it says {paused.running}"
        await breathe()
        resumed = await server.resume(ResumeRequest())
        assert 2 == resumed.running, f"resume goes on with 2 requests, it says {resumed.running}"
    for sent, whole, reader in zip(sents, expected, readers, strict=True):
        result = await reader.result()
        assert len(whole.token_ids) == len(result.token_ids), (
            f"{sent.request_id!r} has {len(result.token_ids)} tokens over two pauses, "
            f"its budget is {len(whole.token_ids)}"
        )
        assert whole.token_ids == result.token_ids, f"{sent.request_id!r} drew other tokens after a pause"
        assert whole.finish_reason == result.finish_reason, f"{sent.request_id!r}: {result.finish_reason}"
        _assert_close(subject, whole, result)


@check("ROL-059", page=PAGE + "pauses", using=serving)
async def waiting_for_the_end(subject: Subject, server: BaseRolloutServer) -> None:
    """``pause(wait)`` returns when the running requests have ended by themselves; no new one runs from then on."""
    sents = [greedy("streamed", 24), greedy("whole", 18, PROMPT[1:])]
    caller = calling(server, sents[1])
    reader = await reading(server, sents[0])
    pausing = spawn(server.pause(PauseRequest(mode="wait")), "pause")
    await asyncio.sleep(0)
    new = [greedy("meanwhile", 3), greedy("late", 3)]
    meanwhile = calling(server, new[0])
    paused = await ended(pausing, "the end of the running requests, by pause(wait),")
    assert not meanwhile.done(), "a request that came after pause(wait) was served before resume"
    assert 0 == paused.running, f"pause(wait) says that {paused.running} requests are kept"
    with standing_still("a forward pass runs although pause(wait) has returned"):
        results = [await ended(reader.result(), "a finished request"), await ended(caller, "a finished request")]
        late = calling(server, new[1])
        await breathe()
    for sent, result in zip(sents, results, strict=True):
        assert (sent.sampling.max_new_tokens, "length") == (len(result.token_ids), result.finish_reason), (
            f"pause(wait) has cut {sent.request_id!r}: {len(result.token_ids)} tokens, {result.finish_reason}"
        )
    assert not late.done(), "a new request was served although the server is paused"
    await server.resume(ResumeRequest())
    await assert_served(meanwhile, new[0])
    await assert_served(late, new[1])


@check("ROL-060", page=PAGE + "pauses", using=serving)
async def pausing_by_aborts(subject: Subject, server: BaseRolloutServer) -> None:
    """``pause(abort)`` ends the running requests with their tokens so far."""
    whole = greedy("whole", LONG, PROMPT[1:])
    caller = calling(server, whole)
    reader = await reading(server, greedy("streamed", LONG), 3)
    paused = await server.pause(PauseRequest(mode="abort"))
    assert 0 == paused.running, f"pause(abort) says that {paused.running} requests are kept"
    _assert_aborted(reader.sent, await reader.result(), 3)
    _assert_aborted(whole, await caller, 1)
    sent = greedy("late", 3)
    late = calling(server, sent)
    await breathe()
    assert not late.done(), "a new request was served although the server is paused"
    await server.resume(ResumeRequest())
    await assert_served(late, sent)


@check("ROL-061", page=PAGE + "pauses", using=serving)
async def new_requests_wait(subject: Subject, server: BaseRolloutServer) -> None:
    """Requests that come while the server is paused wait, unharmed, until it resumes."""
    await server.pause(PauseRequest())
    sents = [greedy("one", 6), greedy("two", 9, PROMPT[1:])]
    callers = [calling(server, sent) for sent in sents]
    with standing_still("the model runs although the server is paused"):
        await breathe()
        await assert_counted(server, 0, 2, "two requests wait")
    assert not any(caller.done() for caller in callers), "a request was answered although the server is paused"
    await server.resume(ResumeRequest())
    for sent, caller in zip(sents, callers, strict=True):
        await assert_served(caller, sent)


@check("ROL-062", page=PAGE + "pauses", using=serving)
async def pausing_twice(subject: Subject, server: BaseRolloutServer) -> None:
    """Pausing a paused server and resuming a running one change nothing; one ``resume`` ends any number of pauses."""
    await server.resume(ResumeRequest())
    for mode in ("keep", "wait", "abort"):
        await server.pause(PauseRequest(mode="keep"))
        await server.pause(PauseRequest(mode=mode))
        sent = greedy("between", 4)
        caller = calling(server, sent)
        await breathe()
        assert not caller.done(), "a request was answered although the server is paused"
        await server.resume(ResumeRequest())
        await assert_served(caller, sent)
        await server.resume(ResumeRequest())
