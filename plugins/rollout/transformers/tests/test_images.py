"""Images in prompts: what the server computes is what the library does, alone and in batches, interrupted or not."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from jackfield.abc.rollout import AbortRequest, GenerateRequest, GenerateResult
from jackfield.errors import RolloutError
from jackfield_architectures import save_model
from jackfield_huggingface.images import ImageInputs, SameSize

TOKEN, PLACES, SHAPE = 90, 4, (3, 28, 28)
LARGE = (3, 56, 56)  #: of Mistral 3, which merges patches
PROMPT = (5, *[TOKEN] * PLACES, 6, 7)

Make = Callable[..., GenerateRequest]


def runs(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """The folder of a LLaVA whose images have four places, and the model."""
    folder = tmp_path_factory.mktemp("llava")
    return str(folder), save_model("llava", folder, image_token_id=TOKEN)


def image(seed: int, count: int = 1, shape: tuple[int, ...] = SHAPE) -> np.ndarray[Any, Any]:
    """Random pixels, the same for the same seed."""
    return np.random.default_rng(seed).normal(size=(count, *shape)).astype(np.float32)


def expected(model: Any, request: GenerateRequest, result: GenerateResult) -> list[float]:
    """The log-probs of a result by one pass of the library over its tokens, without a cache."""
    first = len(request.prompt_ids)
    ids = torch.tensor([(*request.prompt_ids, *result.token_ids)])
    pixels = request.multi_modal_data.get("pixel_values")
    given = {} if pixels is None else {"pixel_values": torch.from_numpy(pixels)}
    if model.config.model_type == "mistral3":
        given["image_sizes"] = torch.tensor([LARGE[1:]] * len(given["pixel_values"]))
    with torch.inference_mode():
        logits = model(input_ids=ids, **given).logits[0, first - 1 : -1]
    return list(logits.log_softmax(-1).gather(1, ids[0, first:, None])[:, 0].tolist())


def test_what_a_model_takes(seeing: tuple[str, Any]) -> None:
    """Placeholder, places and shape are found by the model itself; other models take no images."""
    assert SameSize(TOKEN, PLACES, SHAPE) == ImageInputs.of(seeing[1])


@runs
async def test_a_model_that_is_told_sizes(serve: Any, make_request: Make, tmp_path: Any) -> None:
    """Mistral 3 gets the size of each image, and has the library's log-probs."""
    model = save_model("mistral3", tmp_path, image_token_id=TOKEN)
    assert SameSize(TOKEN, PLACES, LARGE) == ImageInputs.of(model)
    data = {"pixel_values": image(0, 2, LARGE), "image_sizes": np.array([LARGE[1:]] * 2)}  # as its processor says
    plain = make_request("two", (*PROMPT, *PROMPT), max_new_tokens=6, seed=1, ignore_eos=True)
    request = attrs.evolve(plain, multi_modal_data=data)
    async with serve(str(tmp_path)) as server:
        result, blind = await asyncio.gather(
            server.generate(request),
            server.generate(
                attrs.evolve(request, request_id="other", multi_modal_data={"pixel_values": image(1, 2, LARGE)})
            ),
        )
    assert pytest.approx(expected(model, request, result), abs=1e-4) == list(result.log_probs)
    assert result.log_probs != blind.log_probs


@runs
async def test_batches_of_all_kinds(seeing: tuple[str, Any], serve: Any, make_request: Make) -> None:
    """Requests with one image, another, two images and none share passes, and have the library's log-probs each."""
    folder, model = seeing
    plain = make_request("none", (5, 6, 7), max_new_tokens=6, seed=1, ignore_eos=True)
    requests = [
        plain,
        attrs.evolve(plain, request_id="one", prompt_ids=PROMPT, multi_modal_data={"pixel_values": image(0)}),
        attrs.evolve(plain, request_id="other", prompt_ids=PROMPT, multi_modal_data={"pixel_values": image(1)}),
        attrs.evolve(plain, request_id="same", prompt_ids=PROMPT, multi_modal_data={"pixel_values": image(0)}),
        attrs.evolve(
            plain, request_id="two", prompt_ids=(*PROMPT, *PROMPT), multi_modal_data={"pixel_values": image(2, 2)}
        ),
    ]
    async with serve(folder) as server:
        results = await asyncio.gather(*map(server.generate, requests))
    for request, result in zip(requests, results, strict=True):
        if TOKEN not in result.token_ids:  # the library would take it for a place of an image
            assert expected(model, request, result) == pytest.approx(list(result.log_probs), abs=1e-4)
    one, other, same = (results[number] for number in (1, 2, 3))
    assert (one.token_ids, one.log_probs) == (same.token_ids, same.log_probs)
    assert one.log_probs[0] != other.log_probs[0]


@runs
async def test_the_rest_of_a_request_keeps_its_images(seeing: tuple[str, Any], serve: Any, make_request: Make) -> None:
    """What an abort has cut goes on with its tokens so far as the prompt, as if it had not been cut."""
    folder, _ = seeing
    whole = make_request("whole", PROMPT, max_new_tokens=24, temperature=0.0, ignore_eos=True)
    whole = attrs.evolve(whole, multi_modal_data={"pixel_values": image(3)})
    async with serve(folder, steps_per_hop=1) as server:
        undisturbed = await server.generate(whole)
        begun = [chunk async for chunk in _until(server, attrs.evolve(whole, request_id="cut"), 5)]
        so_far = tuple(token for chunk in begun for token in chunk.token_ids)
        assert 5 <= len(so_far) < 24
        sampling = attrs.evolve(whole.sampling, max_new_tokens=24 - len(so_far))
        rest = attrs.evolve(whole, request_id="rest", prompt_ids=(*PROMPT, *so_far), sampling=sampling)
        assert undisturbed.token_ids == (*so_far, *(await server.generate(rest)).token_ids)


async def _until(server: Any, request: GenerateRequest, count: int) -> Any:
    """The chunks of a request that is aborted once it has some tokens."""
    found = 0
    async for chunk in server.generate_stream(request):
        found += len(chunk.token_ids)
        if found >= count and chunk.finish_reason is None:
            await server.abort(AbortRequest(request_ids=(request.request_id,)))
        yield chunk


@runs
async def test_a_generated_placeholder_stays_a_token(seeing: tuple[str, Any], serve: Any, make_request: Make) -> None:
    """A placeholder behind those of the images is a token like others: the rest of a request may have it."""
    folder, _ = seeing
    asked = make_request("more", (*PROMPT, TOKEN), max_new_tokens=3, temperature=0.0, ignore_eos=True)
    async with serve(folder) as server:
        one, other = [
            await server.generate(attrs.evolve(asked, multi_modal_data={"pixel_values": image(seed)}))
            for seed in (0, 1)
        ]
        assert one.log_probs != other.log_probs


@pytest.mark.parametrize(
    "arrays",
    [
        {"pixel_values": [1.0]},
        {"pixel_values": np.zeros((1, 3, 8, 8), np.float32)},
        {"pixel_values": np.zeros((1, *SHAPE), np.int64)},
        {"pixel_values": np.zeros((2, *SHAPE), np.float32)},
        {"image_sizes": np.zeros((1, 2), np.float32)},
        {"pixel_values": image(0), "image_sizes": np.array([[28, 14]])},
    ],
    ids=["no array", "another size", "integers", "too many", "another name", "padding"],
)
@runs
async def test_what_does_not_fit_is_refused(
    seeing: tuple[str, Any], serve: Any, make_request: Make, arrays: dict[str, Any]
) -> None:
    """Inputs that the model does not take are refused before a pass, and others are served on."""
    plain = make_request("plain", PROMPT, max_new_tokens=2, ignore_eos=True)
    async with serve(seeing[0]) as server:
        with pytest.raises(RolloutError) as refused:
            await server.generate(attrs.evolve(plain, multi_modal_data=arrays))
        assert "rollout.request" == refused.value.code
        assert 2 == len((await server.generate(plain)).token_ids)


@runs
async def test_a_text_model_refuses_images(serve: Any, make_request: Make, folder: str) -> None:
    """A model without a vision tower never ignores an image."""
    async with serve() as server:
        with pytest.raises(RolloutError) as refused:
            await server.generate(attrs.evolve(make_request("x"), multi_modal_data={"pixel_values": image(0)}))
        assert "rollout.request" == refused.value.code
