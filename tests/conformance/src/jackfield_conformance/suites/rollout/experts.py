"""Checks of rollout servers: the experts of a mixture, which training uses again."""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support.rollout import PAGE, greedy, serving
from jackfield_conformance.support.rollout_experts import (
    EXPERTS_PER_TOKEN,
    LAYERS,
    expected_experts,
    mixture_folder,
)


def _assert_experts(sent: GenerateRequest, result: GenerateResult) -> None:
    ids, name = (*sent.prompt_ids, *result.token_ids)[:-1], f"request {sent.request_id!r}"
    found = result.routed_experts
    assert isinstance(found, np.ndarray), f"{name}: routed_experts is {found!r}, expected an array"
    assert found.dtype == np.int16, f"{name}: routed_experts is {found.dtype}, expected int16"
    shape = (len(ids), LAYERS, EXPERTS_PER_TOKEN)
    assert found.shape == shape, f"{name}: routed_experts has the shape {found.shape}, expected {shape}"
    ordered, expected = torch.from_numpy(found.astype(np.int64)).sort(-1).values, expected_experts(ids)
    wrong = (ordered != expected).any(-1).any(-1).nonzero().flatten().tolist()
    assert not wrong, f"{name}: the experts of the tokens at {wrong[:8]} are not those of the model"


@check("ROL-120", capability="router_replay", page=PAGE + "experts")
async def results_have_the_experts_of_each_token(subject: Subject) -> None:
    """With ``ModelSpec.router_replay`` a result has the experts that each layer's router chose for each token but the
    last: of the prompt, also of one that requests share, and of the response."""
    sent = [greedy("one", 6, (5, 6, 7)), greedy("other", 3, (9, 8, 4, 30, 22)), greedy("shares", 5, (5, 6, 7))]
    async with serving(subject, folder=mixture_folder(), router_replay=True) as server:
        results = await asyncio.gather(*map(server.generate, sent))
        results.append(await server.generate(last := greedy("alone", 1, (5, 6, 7, 12))))
    for request, result in zip([*sent, last], results, strict=True):
        _assert_experts(request, result)


@check("ROL-121", capability="router_replay", page=PAGE + "experts")
async def experts_are_returned_where_they_are_asked_for(subject: Subject) -> None:
    """Without ``ModelSpec.router_replay`` results have no experts."""
    async with serving(subject, folder=mixture_folder()) as server:
        result = await server.generate(greedy("one", 3, (5, 6, 7)))
    assert result.routed_experts is None, "a result has experts that were not asked for"
