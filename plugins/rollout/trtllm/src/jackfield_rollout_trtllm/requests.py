"""Requests to TensorRT-LLM, and its answers. Names are those of its LLM API, 1.2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jackfield.abc.rollout import GenerateRequest, RolloutContext
from jackfield.errors import PluginError, RolloutError
from jackfield.sdk.relay import mixed
from jackfield_rollout_trtllm.config import Config

EXTENSION = "jackfield_rollout_trtllm.worker.WorkerExtension"


def llm_arguments(config: Config, context: RolloutContext) -> dict[str, Any]:
    """Return the arguments of ``AsyncLLM``, except ``kv_cache_config``, an object of TensorRT-LLM."""
    return {
        **config.arguments,
        "model": context.model.path,
        "dtype": context.model.dtype,
        "trust_remote_code": context.model.trust_remote_code,
        "max_seq_len": context.max_model_len,
        "max_batch_size": config.max_batch_size,
        "tensor_parallel_size": config.tensor_parallel,
        "ray_worker_extension_cls": EXTENSION,
    }


def check_sampling(request: GenerateRequest) -> None:
    """Refuse sampling parameters for which TensorRT-LLM's log-probabilities are of another distribution.

    They are of the softmax, which is the distribution drawn from at temperature 1 without filters. Other requests that
    are not greedy raise ``plugin.capability``.
    """
    sampling = request.sampling
    filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    if sampling.temperature == 0 or (sampling.temperature == 1 and not filters):
        return
    raise PluginError(
        "TensorRT-LLM's log-probabilities of such a request are not known to be those that were asked for",
        code="plugin.capability",
        where=request.request_id,
        expected="temperature 0, or temperature 1 without top_k, top_p and min_p",
        found={name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "log_probs")},
    )


def sampling_arguments(request: GenerateRequest, left: int, seed: int) -> dict[str, Any]:
    """Return the ``SamplingParams`` arguments for a request's remaining ``left`` tokens, drawn by ``seed``."""
    sampling = request.sampling
    greedy = sampling.temperature == 0
    return {
        "max_tokens": left,
        "temperature": 1.0 if greedy else sampling.temperature,
        "top_k": 1 if greedy else None,
        "seed": mixed(seed),
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "include_stop_str_in_output": True,
        "ignore_eos": sampling.ignore_eos,
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "logprobs": 1,
    }


def new_tokens(completion: Any, known: int, name: str) -> tuple[list[int], list[float]]:
    """Return a ``CompletionOutput``'s tokens after the first ``known``, and the log-probability of each."""
    tokens: Sequence[int] = list(completion.token_ids)
    entries: Sequence[Any] = list(completion.logprobs or ())
    if len(tokens) != len(entries):
        raise RolloutError(
            "TensorRT-LLM tells another number of log-probabilities than of tokens",
            code="rollout.failed",
            where=name,
            expected=len(tokens),
            found=len(entries),
        )
    pairs = list(zip(tokens, entries, strict=True))[known:]
    return [token for token, _ in pairs], [_log_prob(token, entry, name) for token, entry in pairs]


def _log_prob(token: int, entry: Any, name: str) -> float:
    """Return a token's log-probability; an entry is a number or a mapping with the drawn token."""
    if not isinstance(entry, Mapping):
        return float(entry)
    if token not in entry:
        raise RolloutError(
            "TensorRT-LLM does not tell the log-probability of a token that it drew", code="rollout.failed", where=name
        )
    found: Any = entry[token]
    return float(getattr(found, "logprob", found))
