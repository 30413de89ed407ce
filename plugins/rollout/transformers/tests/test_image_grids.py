"""Images of any size, with positions in the plane: a server computes what the library does, in every batch."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText

from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield.errors import RolloutError
from jackfield_architectures import save_model
from jackfield_huggingface.images import Grids, ImageInputs

TOKEN, FEATURES = 90, 1176
KINDS = (
    "qwen2_5_vl",
    "qwen3_vl",
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ("qwen2_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe")),
)

Make = Callable[..., GenerateRequest]


def runs(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@pytest.fixture(scope="module", params=KINDS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """The folder of a model with positions in the plane, and the model in float64."""
    folder = str(tmp_path_factory.mktemp(request.param))
    save_model(request.param, folder, image_token_id=TOKEN)  # type: ignore[arg-type]
    settings = {"dtype": torch.float64, "experts_implementation": "eager"}  # others do not take float64
    return folder, AutoModelForImageTextToText.from_pretrained(folder, **settings).eval()


def images(seed: int, *sides: tuple[int, int]) -> dict[str, np.ndarray[Any, Any]]:
    """Random patches of images of so many patches in height and width."""
    grids = np.array([(1, *each) for each in sides], np.int64)
    patches = np.random.default_rng(seed).normal(size=(int(grids.prod(1).sum()), FEATURES)).astype(np.float32)
    return {"pixel_values": patches, "image_grid_thw": grids}


def seen(plain: GenerateRequest, name: str, arrays: dict[str, np.ndarray[Any, Any]]) -> GenerateRequest:
    """A request with images before its prompt."""
    places = (arrays["image_grid_thw"].prod(1) // 4).tolist()
    before = tuple(token for each in places for token in (5, *[TOKEN] * each))
    return attrs.evolve(plain, request_id=name, prompt_ids=before + plain.prompt_ids, multi_modal_data=arrays)


def expected(model: Any, request: GenerateRequest, result: GenerateResult) -> list[float]:
    """The log-probs of a result by the library's own forward in float64, without a cache.

    It finds images by their tokens: later ones are others there, and their embeddings are put in afterwards.
    """
    first = len(request.prompt_ids)
    ids = torch.tensor([(*request.prompt_ids, *result.token_ids)])
    given = {name: torch.from_numpy(array) for name, array in request.multi_modal_data.items()}
    places = int(given["image_grid_thw"].prod(1).sum()) // 4 if given else 0
    held = ids == TOKEN
    marked = ids.masked_fill(held & (held.cumsum(1) > places), 1)
    if given:
        given["mm_token_type_ids"] = (marked == TOKEN).int()
    table = model.get_input_embeddings()
    hook = table.register_forward_hook(lambda *_: F.embedding(ids, table.weight))
    with torch.inference_mode():
        logits = model(input_ids=marked, use_cache=False, **given).logits[0, first - 1 : -1]
    hook.remove()
    return list(logits.log_softmax(-1).gather(1, ids[0, first:, None])[:, 0].tolist())


def test_what_a_model_takes(seeing: tuple[str, Any]) -> None:
    """Placeholder, features and merged patches are found by the model itself."""
    assert Grids(TOKEN, FEATURES, 2) == ImageInputs.of(seeing[1])


@pytest.mark.parametrize("settings", [{}, {"cache": "rows"}, {"steps_per_hop": 1}], ids=["batch", "rows", "hops"])
@runs
async def test_batches_of_all_kinds(
    seeing: tuple[str, Any], serve: Any, make_request: Make, settings: dict[str, Any]
) -> None:
    """Requests with images of several sizes and none share passes, and have the library's log-probs each.

    Some end before others, so that rows move; equal requests are computed once.
    """
    folder, model = seeing
    plain = make_request("none", (5, 6, 7), max_new_tokens=9, seed=1, ignore_eos=True)
    short = make_request("short", (8,), max_new_tokens=2, seed=2, ignore_eos=True)
    requests = [
        seen(short, "first", images(4, (2, 2))),
        plain,
        seen(plain, "one", images(0, (2, 8))),
        seen(plain, "other", images(0, (4, 4))),
        seen(plain, "same", images(0, (2, 8))),
        seen(plain, "two", images(2, (4, 6), (2, 4))),
    ]
    async with serve(folder, **settings) as server:
        results = await asyncio.gather(*map(server.generate, requests))
        alone = await server.generate(attrs.evolve(requests[-1], request_id="alone"))
    for request, result in zip(requests, results, strict=True):
        assert expected(model, request, result) == pytest.approx(list(result.log_probs), abs=1e-4)
    one, other, same, two = (results[number] for number in (2, 3, 4, 5))
    assert one.token_ids == same.token_ids
    assert list(one.log_probs) == pytest.approx(list(same.log_probs), abs=1e-5)
    assert one.log_probs[0] != other.log_probs[0]
    assert two.token_ids == alone.token_ids
    assert list(two.log_probs) == pytest.approx(list(alone.log_probs), abs=1e-5)


@runs
async def test_the_rest_of_a_request_keeps_its_positions(
    seeing: tuple[str, Any], serve: Any, make_request: Make
) -> None:
    """A prompt with tokens behind an image, also placeholders, goes on as the request would have."""
    folder, model = seeing
    plain = make_request("whole", (5, 6), max_new_tokens=8, seed=1, ignore_eos=True)
    whole = seen(plain, "whole", images(0, (4, 8)))
    rest = attrs.evolve(whole, request_id="rest", prompt_ids=(*whole.prompt_ids, 3, TOKEN, 4))
    async with serve(folder) as server:
        result = await server.generate(whole)
        cut = attrs.evolve(whole, request_id="cut", prompt_ids=(*whole.prompt_ids, *result.token_ids[:4]))
        later = await server.generate(attrs.evolve(cut, sampling=attrs.evolve(cut.sampling, temperature=0.0)))
        strange = await server.generate(rest)
    assert expected(model, cut, later) == pytest.approx(list(later.log_probs), abs=1e-4)
    as_answer = attrs.evolve(strange, token_ids=(3, TOKEN, 4, *strange.token_ids))
    assert expected(model, whole, as_answer)[3:] == pytest.approx(list(strange.log_probs), abs=1e-4)


@pytest.mark.parametrize(
    ("arrays", "found"),
    [
        ({"pixel_values": images(0, (2, 8))["pixel_values"]}, "pixel_values"),
        (images(0, (2, 8), (2, 8)), "groups of [4]"),
        ({**images(0, (2, 8)), "image_grid_thw": np.array([[1, 4, 8]])}, "16"),
    ],
    ids=["no grid", "too many", "another grid"],
)
@runs
async def test_what_does_not_fit_is_refused(
    seeing: tuple[str, Any], serve: Any, make_request: Make, arrays: dict[str, Any], found: str
) -> None:
    """Inputs that the model does not take are refused before a pass, and others are served on."""
    plain = make_request("plain", (5, *[TOKEN] * 4, 6), max_new_tokens=2, ignore_eos=True)
    async with serve(seeing[0]) as server:
        with pytest.raises(RolloutError) as refused:
            await server.generate(attrs.evolve(plain, multi_modal_data=arrays))
        assert "rollout.request" == refused.value.code
        assert found in str(refused.value.found)
        assert 2 == len((await server.generate(plain)).token_ids)
