"""Checks of rollout servers: images in prompts, on a tiny LLaVA that the suite makes."""

from __future__ import annotations

import asyncio

import attrs
import pytest

from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield.errors import JackfieldError
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support.expecting import refused
from jackfield_conformance.support.rollout import PAGE, serving
from jackfield_conformance.support.rollout_images import TOLERANCE, expected_log_probs, seeing, seeing_folder


def _assert_seen(sent: GenerateRequest, result: GenerateResult) -> None:
    expected = expected_log_probs(sent, result)
    found = list(result.log_probs[: len(expected)])
    assert expected == pytest.approx(found, abs=TOLERANCE), (
        f"request {sent.request_id!r}: expected the model's log-probabilities with the image {expected}, found {found}"
    )


@check("ROL-112", capability="multi_modal", page=PAGE + "images")
async def images_reach_the_model(subject: Subject) -> None:
    """Equal prompts with different images, side by side and one after the other, have the model's log-probabilities
    with their own image each."""
    one, other = seeing("one", 6, 1), seeing("other", 6, 2)
    blind = attrs.evolve(one, request_id="without an image", multi_modal_data={})
    async with serving(subject, folder=seeing_folder()) as server:
        together = await asyncio.gather(*map(server.generate, (one, other, blind)))
        again = await server.generate(attrs.evolve(other, request_id="other again"))
    assert together[0].log_probs[0] != together[1].log_probs[0], "another image gives the same log-probability"
    for sent, result in zip((one, other, blind), together, strict=True):
        _assert_seen(sent, result)
    _assert_seen(other, again)


@check("ROL-113", capability="multi_modal", page=PAGE + "images")
async def images_stay_with_a_request(subject: Subject) -> None:
    """The rest of a request, sent with its tokens so far and the same image, continues as if it was not interrupted."""
    whole = seeing("whole", 8, 3)
    async with serving(subject, folder=seeing_folder()) as server:
        undisturbed = await server.generate(whole)
        begun = undisturbed.token_ids[:3]
        sampling = attrs.evolve(whole.sampling, max_new_tokens=5)
        rest = attrs.evolve(whole, request_id="rest", prompt_ids=(*whole.prompt_ids, *begun), sampling=sampling)
        found = await server.generate(rest)
    expected, log_probs = undisturbed.token_ids[3:], undisturbed.log_probs[3:]
    assert expected == found.token_ids, f"expected tokens {expected}, found {found.token_ids}"
    assert log_probs == pytest.approx(found.log_probs, abs=TOLERANCE)


@check("ROL-114", capability="multi_modal", page=PAGE + "images")
async def images_that_do_not_fit_are_refused(subject: Subject) -> None:
    """An image without its places in the prompt, and an input that the model does not have, are refused; others are
    served on."""
    fitting = seeing("fitting", 3, 1)
    unplaced = attrs.evolve(fitting, request_id="unplaced", prompt_ids=(5, 6, 7))
    unknown = {"no_such_input": fitting.multi_modal_data["pixel_values"]}
    async with serving(subject, folder=seeing_folder()) as server:
        for sent in (unplaced, attrs.evolve(fitting, request_id="unknown", multi_modal_data=unknown)):
            with refused(JackfieldError, "rollout.request", "plugin.capability"):
                await server.generate(sent)
        _assert_seen(fitting, await server.generate(fitting))
