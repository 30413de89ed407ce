"""Requests in the form of vLLM."""

from __future__ import annotations

from typing import Any

from jackfield.abc.rollout import GenerateRequest
from jackfield.sdk.relay import mixed

_HOTTEST = 2.0  #: highest temperature that vLLM accepts; our logits processor does the rest


def vllm_arguments(request: GenerateRequest, seed: int, max_model_len: int) -> dict[str, Any]:
    """Return the arguments of vLLM's ``SamplingParams`` for a request."""
    sampling = request.sampling
    greedy = sampling.temperature == 0
    heat = min(sampling.temperature, _HOTTEST)
    return {
        "temperature": heat,
        "max_tokens": min(sampling.max_new_tokens, max_model_len - len(request.prompt_ids)),
        "seed": mixed(seed),  # torch's CPU generator uses only the lower half
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "logprobs": 0,  # only of the drawn token
        "extra_args": {
            "jackfield": {
                "top_k": 0 if greedy else sampling.top_k,
                "top_p": 1.0 if greedy else sampling.top_p,
                "min_p": 0.0 if greedy else sampling.min_p,
                "divisor": 1.0 if greedy else sampling.temperature / heat,
                "raw": greedy or sampling.log_probs == "raw",
            }
        },
    }
