"""Bookkeeping of requests in rollout servers: validation, seeds and the tokens of running requests."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import attrs

from jackfield.abc.rollout import GenerateChunk, GenerateRequest, GenerateResult
from jackfield.errors import RolloutError

__all__ = ["Running", "check_request", "mixed", "own_seed", "shifted_seed"]

_MASK = (1 << 64) - 1
_UNSEEDED = 0x5851F42D4C957F2D  #: separates the seeds of requests without a seed from those that callers choose


@attrs.define(eq=False)
class Running:
    """A running request with its tokens so far. The first call that ends it determines the result."""

    request: GenerateRequest
    ended: asyncio.Future[None]
    stream: asyncio.Queue[GenerateChunk | None] | None = None
    token_ids: list[int] = attrs.Factory(list)
    log_probs: list[float] = attrs.Factory(list)
    weight_versions: list[int] = attrs.Factory(list)
    finish_reason: Literal["stop", "length", "abort"] | None = None
    reading: asyncio.Task[None] | None = None  #: task that reads the engine's responses

    def append(self, token_ids: list[int], log_probs: list[float], version: int) -> None:
        """Append tokens that weights of ``version`` generated."""
        self.token_ids += token_ids
        self.log_probs += log_probs
        self.weight_versions += [version] * len(token_ids)
        if self.stream is not None and token_ids:
            self.stream.put_nowait(self._chunk(len(token_ids), None))

    def end(self, reason: Literal["stop", "length", "abort"]) -> None:
        """End the request, which has all its tokens."""
        self.finish_reason = reason
        if self.stream is not None:
            self.stream.put_nowait(self._chunk(0, reason))
            self.stream.put_nowait(None)
        if not self.ended.done():
            self.ended.set_result(None)

    def fail(self, error: Exception) -> None:
        """Fail the request: it gets no more tokens."""
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # mark it as retrieved: the caller may be gone
        if self.stream is not None:
            self.stream.put_nowait(None)

    def result(self) -> GenerateResult:
        """Return the result of ``generate``."""
        return GenerateResult(**self._fields(0, self.finish_reason))

    def _chunk(self, count: int, reason: Literal["stop", "length", "abort"] | None) -> GenerateChunk:
        return GenerateChunk(**self._fields(len(self.token_ids) - count, reason))

    def _fields(self, first: int, reason: str | None) -> dict[str, Any]:
        lists = ("token_ids", "log_probs", "weight_versions")
        tokens = {name: tuple(getattr(self, name)[first:]) for name in lists}
        return {"request_id": self.request.request_id, **tokens, "finish_reason": reason}


def own_seed(seed: int, replica: int, number: int) -> int:
    """Return a seed for a request without one that differs from those that callers choose."""
    return mixed(mixed(mixed(seed + _UNSEEDED) + replica) + number)


def mixed(seed: int) -> int:
    """Return 63 bits that each depend on all bits of a seed (the finaliser of SplitMix64)."""
    state = (seed + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return (state ^ (state >> 31)) >> 1


def shifted_seed(seed: int, by: int) -> int:
    """Return the seed plus ``by``, wrapped to a signed 64-bit integer."""
    return (seed + by + (1 << 63) & _MASK) - (1 << 63)


def check_request(request: GenerateRequest, vocabulary: int, max_model_len: int) -> None:
    """Check that a model with ``vocabulary`` token ids and ``max_model_len`` can generate a request.

    Raises:
        RolloutError: ``rollout.request`` or ``rollout.context-length``, which names the request.
    """
    prompt = request.prompt_ids
    if not prompt:
        raise _invalid(request, "an empty prompt", "at least one token")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        wrong = next(token for token in prompt if not 0 <= token < vocabulary)
        raise _invalid(request, f"token id {wrong}", f"ids from 0 to {vocabulary - 1}")
    if len(prompt) >= max_model_len:
        expected = f"fewer than max_model_len = {max_model_len}"
        raise _invalid(request, f"a prompt of {len(prompt)} tokens", expected, code="rollout.context-length")
    if request.multi_modal_data:
        raise _invalid(request, f"multi_modal_data: {', '.join(request.multi_modal_data)}", "text alone")
    try:
        attrs.validate(request.sampling)  # the request may come from a process that does not check the ranges
    except RolloutError as error:
        raise _invalid(request, f"{error.message}: {error.found}", str(error.expected)) from error


def _invalid(request: GenerateRequest, found: str, expected: str, code: str = "rollout.request") -> RolloutError:
    name = request.request_id
    message = f"request {name!r} cannot be generated"
    return RolloutError(message, code=code, where=name, expected=expected, found=found)
