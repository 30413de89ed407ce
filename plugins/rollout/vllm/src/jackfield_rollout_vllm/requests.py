"""Requests in the form of vLLM."""

from __future__ import annotations

from typing import Any

from jackfield.abc.rollout import GenerateRequest
from jackfield.sdk.requests import mixed

_HOTTEST = 2.0  #: temperature that vLLM takes; what is beyond is done by our own logits processor


def vllm_arguments(request: GenerateRequest, seed: int, max_model_len: int) -> dict[str, Any]:
    """Arguments of vLLM's ``SamplingParams`` that mean what the request says."""
    sampling = request.sampling
    greedy = sampling.temperature == 0
    heat = min(sampling.temperature, _HOTTEST)
    return {
        "temperature": heat,
        "max_tokens": min(sampling.max_new_tokens, max_model_len - len(request.prompt_ids)),
        "seed": mixed(seed),  # torch's generator of CPUs takes the lower half alone
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "logprobs": 0,  # of the drawn token alone
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
