"""Drawing a token from logits."""

from __future__ import annotations

import torch

from jackfield.abc.rollout import SamplingParams


def draw(logits: torch.Tensor, sampling: SamplingParams, generator: torch.Generator) -> tuple[int, float]:
    """A token and its log-probability.

    Args:
        logits: float ``[V]`` of the model, at temperature 1.
        sampling: temperature, then top-k, top-p, min-p.
        generator: the request's own random numbers.
    """
    raw = logits.float().log_softmax(-1)
    if sampling.temperature == 0:
        token = int(raw.argmax())
        return token, float(raw[token])
    probabilities = _filtered((logits.float() / sampling.temperature).softmax(-1), sampling)
    token = int(torch.multinomial(probabilities, 1, generator=generator))
    return token, float(raw[token] if sampling.log_probs == "raw" else probabilities[token].log())


def _filtered(probabilities: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """What top-k, top-p and min-p leave, renormalised."""
    ordered, tokens = probabilities.sort(descending=True, stable=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k:
        kept[sampling.top_k :] = False
    ordered = ordered * kept / (ordered * kept).sum()
    kept &= ordered.cumsum(-1) - ordered < sampling.top_p  # the token that crosses the bound stays
    kept &= ordered >= sampling.min_p * ordered[0]
    kept[0] = True  # whatever rounding says: there is always a token to draw
    result = torch.zeros_like(probabilities).scatter(0, tokens, ordered * kept)
    return result / result.sum()
