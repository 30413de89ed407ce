"""Images beside tokens: their pixels reach the model in every split of the rows, and gradients reach its vision tower.

As a script with a file of settings it is one of two ranks, of which one has no images.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tensordict import NonTensorStack, TensorDict
from transformers import AutoModelForImageTextToText

from jackfield.abc.engine import LoadCheckpointRequest, LoraSpec, SaveCheckpointRequest
from jackfield.errors import EngineError
from jackfield.sdk.arrays import pack
from jackfield.sdk.jagged import jagged
from jackfield_architectures import save_model
from jackfield_commands import CommandServer
from jackfield_engine_fsdp.config import Config
from jackfield_ranks import run_ranks

TOKEN, PLACES, SHAPE, VOCABULARY = 90, 4, (3, 28, 28), 96
TOWER = "vision_tower"

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a LLaVA whose images have four places."""
    folder = tmp_path_factory.mktemp("llava")
    save_model("llava", folder, image_token_id=TOKEN)
    return folder


def image(seed: int, count: int = 1) -> np.ndarray[Any, Any]:
    """Random pixels."""
    return np.random.default_rng(seed).normal(size=(count, *SHAPE)).astype(np.float32)


def make_rows(make: Callable[..., Rows]) -> Rows:
    """Rows with one image, the same prompt with another, two images and none; some answers have a placeholder."""
    rows = make([(3, 5), (3, 4), (5, 6), (7, 3), (2, 8)], vocabulary=VOCABULARY - 10)
    images = [image(0), image(1), image(2, 2), None, image(3)]
    rows[1]["prompt_ids"] = rows[0]["prompt_ids"]
    rows[4]["response_ids"][2] = TOKEN
    for row, pixels in zip(rows, images, strict=True):
        row["pixels"] = pixels
        if pixels is not None:
            row["prompt_ids"] = [7, *[TOKEN] * (PLACES * len(pixels)), *row["prompt_ids"]]
    return rows


def with_images(batch: TensorDict, rows: Rows, *, plain: bool = False) -> TensorDict:
    """Add the column of the images to a batch, as jagged bytes, or as plain values."""
    contents = [pack({} if row["pixels"] is None else {"pixel_values": row["pixels"]}) for row in rows]
    if plain:
        batch["multi_modal_inputs"] = NonTensorStack(*contents)
    else:
        batch["multi_modal_inputs"] = jagged(
            [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in contents]
        )
    return batch


def by_library(folder: Path, row: dict[str, Any]) -> torch.Tensor:
    """The log-probs of a row by the library. A placeholder in the answer gets its token's embedding."""
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    prompt, response = row["prompt_ids"], torch.tensor(row["response_ids"])
    ids = torch.tensor([[*prompt, *row["response_ids"]]])
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(ids)
        if row["pixels"] is not None:
            sizes = {"image_sizes": torch.tensor([row["pixels"].shape[2:]] * len(row["pixels"]))}
            told = sizes if model.config.model_type == "mistral3" else {}
            features = torch.cat(list(model.get_image_features(torch.from_numpy(row["pixels"]), **told).pooler_output))
            places = [place for place, token in enumerate(prompt) if token == TOKEN]
            embeddings[0, places] = features
        logits = model(inputs_embeds=embeddings).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, response[:, None])[:, 0]


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 10_000])
@pytest.mark.parametrize("plain", [False, True], ids=["jagged", "bytes"])
def test_log_probs_are_the_librarys(
    kit: ModuleType, build: Any, llava: Path, micro_batch_tokens: int, plain: bool
) -> None:
    """In each split of the rows, with images and without, also where an answer has a placeholder."""
    rows = make_rows(kit.make_rows)
    engine = build(folder=llava, micro_batch_tokens=micro_batch_tokens)
    batch = with_images(kit.make_batch(rows), rows, plain=plain)
    with engine.eval_mode():
        output = engine.forward_backward_batch(batch, None, forward_only=True)
    for row, found in zip(rows, output.log_probs.unbind(), strict=True):
        torch.testing.assert_close(by_library(llava, row), found, rtol=1e-4, atol=1e-4)


def test_a_model_that_is_told_sizes(kit: ModuleType, build: Any, tmp_path: Path) -> None:
    """Mistral 3 gets the size of each image, and has the library's log-probs."""
    save_model("mistral3", tmp_path, image_token_id=TOKEN)
    (row,) = kit.make_rows([(3, 5)], vocabulary=VOCABULARY - 10)
    pixels = image(0, 8).reshape(2, 3, 56, 56)
    row |= {"pixels": pixels, "prompt_ids": [7, *[TOKEN] * (PLACES * 2), *row["prompt_ids"]]}
    engine = build(folder=tmp_path)
    with engine.eval_mode():
        output = engine.forward_backward_batch(with_images(kit.make_batch([row]), [row]), None, forward_only=True)
    torch.testing.assert_close(by_library(tmp_path, row), output.log_probs.unbind()[0], rtol=1e-4, atol=1e-4)


def test_gradients_reach_the_tower_and_no_split_changes_them(kit: ModuleType, build: Any, llava: Path) -> None:
    """The sum over micro-batches is that of one pass; without images the tower gets none."""
    rows = make_rows(kit.make_rows)
    loss = kit.PolicyLoss(rows, entropy=0.01)
    whole, split = (
        kit.gradients(build(folder=llava, micro_batch_tokens=most), with_images(kit.make_batch(rows), rows), loss)
        for most in (10_000, 30)
    )
    assert any(TOWER in name and gradient.abs().max() > 1e-6 for name, gradient in whole.items())
    for name, gradient in whole.items():
        torch.testing.assert_close(gradient, split[name], rtol=1e-3, atol=1e-6)
    blind = kit.gradients(build(folder=llava), kit.make_batch(rows[3:4]), loss)
    assert not any(TOWER in name and gradient.abs().max() > 0 for name, gradient in blind.items())


def test_a_critic_sees_images(kit: ModuleType, build: Any, llava: Path) -> None:
    """Values depend on the pixels, too."""
    rows = make_rows(kit.make_rows)[:2]
    rows[1]["response_ids"] = rows[0]["response_ids"][:4]
    engine = build(folder=llava, role="critic", value_head=True)
    with engine.eval_mode():
        batch = with_images(kit.make_batch(rows), rows)
        one, other = engine.forward_backward_batch(batch, None, forward_only=True).values.unbind()
    assert not torch.allclose(one[:4], other)


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["weights", "adapter"])
def test_save_load_step_is_step(kit: ModuleType, build: Any, llava: Path, lora: Any, tmp_path: Path) -> None:
    """A native checkpoint of a model with a vision tower continues bit for bit; an adapter is the language model's."""
    rows = make_rows(kit.make_rows)
    batch, loss = with_images(kit.make_batch(rows), rows), kit.PolicyLoss(rows)
    engine, other = build(folder=llava, lora=lora), build(folder=llava, lora=lora)
    kit.train(engine, batch, loss)
    engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "saved")))
    other.load_checkpoint(LoadCheckpointRequest(folder=str(tmp_path / "saved")))
    kit.train(engine, batch, loss)
    kit.train(other, batch, loss)
    expected, found = kit.weights(engine), kit.weights(other)
    assert sorted(expected) == sorted(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    if lora is not None:
        assert not [name for name in expected if TOWER in name]


def test_published_names_are_the_folders(kit: ModuleType, build: Any, llava: Path, tmp_path: Path) -> None:
    """Names and shapes are those of the folder, and an exported folder is loaded by the library with equal values."""
    rows = make_rows(kit.make_rows)
    engine = build(folder=llava)
    kit.train(engine, with_images(kit.make_batch(rows), rows), kit.PolicyLoss(rows))
    published, before = kit.weights(engine), load_file(llava / "model.safetensors")
    assert {name: value.shape for name, value in before.items()} == {
        name: value.shape for name, value in published.items()
    }
    assert [name for name in before if TOWER in name and not torch.equal(before[name], published[name])]
    engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "exported"), format="huggingface"))
    with engine.eval_mode():
        batch = with_images(kit.make_batch(rows), rows)
        output = engine.forward_backward_batch(batch, None, forward_only=True)
    torch.testing.assert_close(
        by_library(tmp_path / "exported", rows[0]), output.log_probs.unbind()[0], rtol=1e-4, atol=1e-4
    )


def test_what_does_not_fit_is_refused(kit: ModuleType, build: Any, llava: Path) -> None:
    """Images of another size, more of them than places, and images for a model of text."""
    rows = make_rows(kit.make_rows)[:1]
    engine, text = build(folder=llava), build()
    for pixels in (np.zeros((1, 3, 8, 8), np.float32), image(0, 2)):
        wrong = [{**rows[0], "pixels": pixels}]
        with engine.eval_mode(), pytest.raises(EngineError) as refused:
            engine.forward_backward_batch(with_images(kit.make_batch(wrong), wrong), None, forward_only=True)
        assert "engine.failed" == refused.value.code
    short = [{**rows[0], "prompt_ids": [1, 2], "response_ids": [1] * 5}]
    with text.eval_mode(), pytest.raises(EngineError) as refused:
        text.forward_backward_batch(with_images(kit.make_batch(short), short), None, forward_only=True)
    assert "engine.failed" == refused.value.code


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_a_rank_without_images_keeps_up(
    kit: ModuleType, build: Any, llava: Path, jackfield: CommandServer, tmp_path: Path
) -> None:
    """Two ranks, of which one has no images, end with the gradients of one rank that has all rows."""
    run_ranks(jackfield, Path(__file__), tmp_path, 2, {"model": str(llava)}, 100.0)
    rows = make_rows(kit.make_rows)
    expected = kit.gradients(build(folder=llava), with_images(kit.make_batch(rows), rows), kit.PolicyLoss(rows))
    found = load_file(tmp_path / "gradients.safetensors")
    for name, gradient in expected.items():
        torch.testing.assert_close(gradient, found[name], rtol=1e-3, atol=1e-6)


def _main(settings: dict[str, Any]) -> None:
    import worker

    rank, folder, out = settings["rank"], settings["model"], Path(settings["out"])
    rows = make_rows(worker.make_rows)
    options = {"rank": rank, "world_size": 2, "init_method": f"file://{out}/meeting"}
    engine = worker.make_engine(folder, Config(wrap="layers"), **options)
    mine = [row for row in rows if (row["pixels"] is None) == (rank == 1)]
    batch = with_images(worker.make_batch(mine), mine)
    gradients = worker.gradients(engine, batch, worker.PolicyLoss(rows))
    if rank == 0:
        save_file(gradients, out / "gradients.safetensors")
    engine.close()


if __name__ == "__main__":
    _main(json.loads(Path(sys.argv[1]).read_text()))
