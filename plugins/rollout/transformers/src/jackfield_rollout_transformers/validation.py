"""What a request must be like."""

from __future__ import annotations

import math

from jackfield.abc.rollout import GenerateRequest, SamplingParams
from jackfield.errors import RolloutError

__all__ = ["check_request"]


def check_request(request: GenerateRequest, vocabulary: int, max_model_len: int) -> None:
    """Refuse what cannot be generated.

    Raises:
        RolloutError: ``rollout.request``, naming the request.
    """
    prompt = request.prompt_ids
    if not prompt:
        raise _invalid(request, "an empty prompt", "at least one token")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        wrong = next(token for token in prompt if not 0 <= token < vocabulary)
        raise _invalid(request, f"token id {wrong}", f"ids of 0 to {vocabulary - 1}")
    if len(prompt) >= max_model_len:
        raise _invalid(request, f"a prompt of {len(prompt)} tokens", f"fewer than max_model_len = {max_model_len}")
    if request.multi_modal_data:
        raise _invalid(request, f"multi_modal_data with {', '.join(request.multi_modal_data)}", "text only")
    _check_sampling(request, request.sampling)


def _check_sampling(request: GenerateRequest, sampling: SamplingParams) -> None:
    for fits, found, expected in (
        (sampling.max_new_tokens >= 1, f"max_new_tokens={sampling.max_new_tokens}", "at least 1"),
        (
            sampling.temperature >= 0 and math.isfinite(sampling.temperature),
            f"temperature={sampling.temperature}",
            "0 (greedy) or more",
        ),
        (0 < sampling.top_p <= 1, f"top_p={sampling.top_p}", "more than 0, at most 1"),
        (0 <= sampling.top_k < 1 << 63, f"top_k={sampling.top_k}", "0 (off) or more"),
        (0 <= sampling.min_p <= 1, f"min_p={sampling.min_p}", "0 to 1"),
        (sampling.logprobs in ("processed", "raw"), f"logprobs={sampling.logprobs!r}", "processed or raw"),
        (all(sampling.stop), "an empty stop string", "non-empty strings"),
    ):
        if not fits:
            raise _invalid(request, found, expected)


def _invalid(request: GenerateRequest, found: str, expected: str) -> RolloutError:
    return RolloutError(
        f"request {request.request_id!r} cannot be generated",
        code="rollout.request",
        where=request.request_id,
        expected=expected,
        found=found,
    )
