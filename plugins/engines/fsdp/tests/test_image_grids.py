"""Images of any size, with positions in the plane: an engine computes what the library does, and trains the tower."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from transformers import AutoModelForImageTextToText

from jackfield.errors import EngineError
from jackfield.sdk.arrays import pack
from jackfield.sdk.jagged import jagged
from jackfield_architectures import save_model

TOKEN, FEATURES, MERGE, VOCABULARY = 90, 1176, 2, 96
KINDS = (
    "qwen2_5_vl",
    "qwen3_vl",
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ("qwen2_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe")),
)

Arrays = dict[str, np.ndarray[Any, Any]]
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with positions in the plane; Qwen3-VL adds features to its first layer, too."""
    made = tmp_path_factory.mktemp(request.param)
    save_model(request.param, made, image_token_id=TOKEN)
    return made


def images(seed: int, *sides: tuple[int, int]) -> Arrays:
    """Random patches of images of so many patches in height and width."""
    grids = np.array([(1, *each) for each in sides], np.int64)
    patches = np.random.default_rng(seed).normal(size=(int(grids.prod(1).sum()), FEATURES)).astype(np.float32)
    return {"pixel_values": patches, "image_grid_thw": grids}


def make_rows(make: Callable[..., Rows]) -> Rows:
    """Rows with a wide image, the same prompt with a tall one, two images and none; answers have placeholders."""
    rows = make([(3, 5), (3, 4), (5, 6), (7, 3), (2, 8)], vocabulary=VOCABULARY - 10)
    given = [images(0, (2, 6)), images(1, (6, 2)), images(2, (4, 4), (2, 4)), None, images(3, (4, 6))]
    rows[1]["prompt_ids"] = rows[0]["prompt_ids"]
    rows[4]["response_ids"][0] = rows[4]["response_ids"][2] = TOKEN
    for row, arrays in zip(rows, given, strict=True):
        row["images"] = arrays
        if arrays is not None:
            places = (arrays["image_grid_thw"].prod(1) // MERGE**2).tolist()
            row["prompt_ids"] = [token for each in places for token in (7, *[TOKEN] * each)] + row["prompt_ids"]
    rows[4]["prompt_ids"] = rows[4]["prompt_ids"][:-2]  # the image is the prompt's end
    return rows


def with_images(batch: TensorDict, rows: Rows) -> TensorDict:
    """Add the column of the images to a batch."""
    contents = [pack(row["images"] or {}) for row in rows]
    batch["multi_modal_inputs"] = jagged([torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in contents])
    return batch


def by_library(model: Any, row: dict[str, Any]) -> torch.Tensor:
    """The log-probs of a row by the library's own forward in float64.

    It finds images by their tokens: those of the answer are other ones there, and their embeddings put in afterwards.
    """
    prompt, answer = row["prompt_ids"], torch.tensor(row["response_ids"])
    ids = torch.tensor([[*prompt, *row["response_ids"]]])
    marked = ids.clone()
    marked[0, len(prompt) :][answer == TOKEN] = 1
    given: dict[str, torch.Tensor] = {}
    if row["images"] is not None:
        given = {name: torch.from_numpy(array) for name, array in row["images"].items()}
        given["mm_token_type_ids"] = (marked == TOKEN).int()
    table = model.get_input_embeddings()
    hook = table.register_forward_hook(lambda *_: F.embedding(ids, table.weight))
    with torch.no_grad():
        logits = model(input_ids=marked, use_cache=False, **given).logits[0, len(prompt) - 1 : -1]
    hook.remove()
    return logits.log_softmax(-1).gather(1, answer[:, None])[:, 0].float()


@pytest.mark.parametrize("micro_batch_tokens", [1, 50, 10_000])
def test_log_probs_are_the_librarys(kit: ModuleType, build: Any, folder: Path, micro_batch_tokens: int) -> None:
    """In each split of the rows, with images of several sizes and without; images matter."""
    rows = make_rows(kit.make_rows)
    engine = build(folder=folder, micro_batch_tokens=micro_batch_tokens)
    with engine.eval_mode():
        output = engine.forward_backward_batch(with_images(kit.make_batch(rows), rows), None, forward_only=True)
    settings = {"dtype": torch.float64, "experts_implementation": "eager"}  # others do not take float64
    library = AutoModelForImageTextToText.from_pretrained(folder, **settings).eval()
    for row, found in zip(rows, output.log_probs.unbind(), strict=True):
        torch.testing.assert_close(by_library(library, row), found, rtol=1e-4, atol=1e-4)
    one, other = output.log_probs.unbind()[:2]
    assert (one[:4] - other).abs().max() > 1e-3


def test_gradients_reach_the_tower_and_no_split_changes_them(kit: ModuleType, build: Any, folder: Path) -> None:
    """The sum over micro-batches is that of one pass; features of lower layers of the tower get gradients, too."""
    rows = make_rows(kit.make_rows)
    loss = kit.PolicyLoss(rows, entropy=0.01)
    whole, split = (
        kit.gradients(build(folder=folder, micro_batch_tokens=most), with_images(kit.make_batch(rows), rows), loss)
        for most in (10_000, 30)
    )
    reached = {name for name, gradient in whole.items() if "visual" in name and gradient.abs().max() > 1e-6}
    assert any(".blocks.0." in name for name in reached)
    assert any("merger" in name for name in reached)
    if any("deepstack" in name for name in whole):
        assert any("deepstack" in name for name in reached)
    for name, gradient in whole.items():
        torch.testing.assert_close(gradient, split[name], rtol=1e-3, atol=1e-6)


def test_a_critic_sees_images(kit: ModuleType, build: Any, folder: Path) -> None:
    """Values depend on the patches, too."""
    rows = make_rows(kit.make_rows)[:2]
    rows[1]["response_ids"] = rows[0]["response_ids"][:4]
    engine = build(folder=folder, role="critic", value_head=True)
    with engine.eval_mode():
        batch = with_images(kit.make_batch(rows), rows)
        one, other = engine.forward_backward_batch(batch, None, forward_only=True).values.unbind()
    assert not torch.allclose(one[:4], other)


def changed(**arrays: Any) -> dict[str, Any]:
    return {**images(0, (2, 6)), **arrays}


@pytest.mark.parametrize(
    ("arrays", "prompt", "found"),
    [
        ({"pixel_values": images(0, (2, 6))["pixel_values"]}, (3,), "pixel_values"),
        (changed(pixel_values=np.zeros((12, 8), np.float32)), (3,), "(12, 8)"),
        (changed(image_grid_thw=np.array([[1, 2, 6, 1]])), (3,), "(1, 4)"),
        (changed(image_grid_thw=np.array([[1, 3, 4]])), (3,), "[[1, 3, 4]]"),
        (changed(image_grid_thw=np.array([[2, 2, 6]])), (6,), "[[2, 2, 6]]"),
        (changed(image_grid_thw=np.array([[1, 2, 8]])), (4,), "12"),
        (images(0, (2, 6)), (2,), "groups of [2]"),
        (images(0, (2, 6), (2, 4)), (5,), "groups of [5]"),
        (images(0, (2, 6), (2, 4)), (2, 3), "groups of [2, 3]"),
    ],
    ids=["no grid", "features", "grid", "odd side", "video", "patches", "too few", "no token between", "other order"],
)
def test_what_does_not_fit_is_refused(
    kit: ModuleType, build: Any, folder: Path, arrays: Arrays, prompt: tuple[int, ...], found: str
) -> None:
    """Each kind of mistake is named before a pass."""
    (row,) = kit.make_rows([(3, 5)], vocabulary=VOCABULARY - 10)
    row["images"] = arrays
    row["prompt_ids"] = [token for each in prompt for token in (7, *[TOKEN] * each)]
    engine = build(folder=folder)
    with engine.eval_mode(), pytest.raises(EngineError) as refused:
        engine.forward_backward_batch(with_images(kit.make_batch([row]), [row]), None, forward_only=True)
    assert "engine.failed" == refused.value.code
    assert found in str(refused.value.found)
