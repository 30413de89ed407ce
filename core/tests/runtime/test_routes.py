"""The experts of answers are put together to those of sequences."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jackfield.abc.agent import AgentSequence
from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield.runtime.routes import NAME, Routes


def answer(prompt: tuple[int, ...], tokens: tuple[int, ...], call: int) -> tuple[GenerateRequest, GenerateResult]:
    """Return a request and its result; each token's experts are (the token, the call), in two layers."""
    ids = (*prompt, *tokens)[:-1]
    experts = np.array([[[token, call], [token, call]] for token in ids], dtype=np.int16)
    lists: Any = {"token_ids": tokens, "log_probs": (0.0,) * len(tokens), "weight_versions": (0,) * len(tokens)}
    request = GenerateRequest(request_id=f"{call}", prompt_ids=prompt)
    return request, GenerateResult(request_id=f"{call}", finish_reason="stop", routed_experts=experts, **lists)


def sequence(prompt: tuple[int, ...], response: tuple[int, ...]) -> AgentSequence:
    size = len(response)
    rest: Any = {"response_mask": (1,) * size, "response_log_probs": (0.0,) * size, "weight_versions": (0,) * size}
    return AgentSequence(prompt_ids=prompt, response_ids=response, **rest)


@given(turns=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=5), rest=st.integers(0, 2))
def test_tokens_have_the_experts_of_the_first_call_that_has_seen_them(turns: list[tuple[int, int]], rest: int) -> None:
    """Turns of (inserted, generated) tokens: the last one of an answer is seen by the next call."""
    routes, ids, calls, number = Routes(), [100], list[int](), 0
    for call, (inserted, generated) in enumerate(turns):
        ids += range(200, 200 + inserted)
        made = tuple(range(number, number + generated))
        routes.note(*answer(tuple(ids), made, call))
        ids += made
        calls += [call] * (len(ids) - 1 - len(calls))
        number += generated
    ids += [300] * rest
    (found,) = routes.added([sequence((100,), tuple(ids[1:]))])
    experts = found.multi_modal_inputs[NAME]
    assert experts.shape == (len(ids) - 1, 2, 2)
    assert experts.dtype == np.int16
    seen = len(calls)
    assert seen == len(ids) - 1 - rest
    assert experts[:seen, 0, 0].tolist() == ids[:seen]
    assert experts[:seen, 1, 1].tolist() == calls
    assert (experts[seen:] == -1).all()


def test_another_sequence_does_not_get_them() -> None:
    routes = Routes()
    routes.note(*answer((1, 2), (3, 4), 0))
    own, other = routes.added([sequence((1, 2), (3, 4)), sequence((1, 9), (3, 4))])
    assert NAME in own.multi_modal_inputs
    assert other == sequence((1, 9), (3, 4))


def test_a_server_without_them_adds_nothing() -> None:
    routes = Routes()
    request, result = answer((1, 2), (3, 4), 0)
    routes.note(request, attrs.evolve(result, routed_experts=None))
    assert routes.added([sequence((1, 2), (3, 4))]) == [sequence((1, 2), (3, 4))]


def test_a_new_try_forgets_them() -> None:
    routes = Routes()
    routes.note(*answer((1, 2), (3, 4), 0))
    routes.clear()
    assert routes.added([sequence((1, 2), (3, 4))]) == [sequence((1, 2), (3, 4))]
