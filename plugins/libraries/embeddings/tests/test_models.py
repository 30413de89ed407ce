"""Embeddings of a model in a folder, against single passes of the same model without padding."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from jackfield.abc.operator import OperatorContext
from jackfield.errors import OperatorError
from jackfield.sdk import structure
from jackfield_chat_model import byte_tokenizer, save_chat_model
from jackfield_embeddings import Embedder, EmbedderConfig, make_embedder

TEXTS = ("two words", "", "a longer text, which has a few more words than the others", "é", "two words", "x" * 90)


@pytest.fixture(scope="module", params=["decoder", "encoder"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3, whose tokens see what is before them, or a BERT, whose tokens see all others."""
    made = tmp_path_factory.mktemp("model") / request.param
    if request.param == "decoder":
        save_chat_model(str(made))
        return made
    config = BertConfig(
        vocab_size=264, hidden_size=24, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        BertModel(config).save_pretrained(made)
    byte_tokenizer().save_pretrained(made)
    return made


def embedder(folder: Path, **settings: Any) -> Embedder:
    given = {"name": "transformers", "path": str(folder), **settings}
    return make_embedder(structure(EmbedderConfig, given), OperatorContext())


def embedded(folder: Path, *texts: str, **settings: Any) -> NDArray[np.float64]:
    async def main() -> NDArray[np.float64]:
        made = embedder(folder, **settings)
        await made.start()
        try:
            return await made.embed(texts)
        finally:
            await made.close()
            await made.close()

    return asyncio.run(main())


def expected(folder: Path, text: str, pooling: str, layer: int, most: int = 512) -> NDArray[np.float64]:
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = (tokenizer(text)["input_ids"] or [0])[:most]
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0].double().numpy()
    vector: NDArray[np.float64] = states.mean(axis=0) if pooling == "mean" else states[-1]
    return vector / np.sqrt((vector**2).sum())  # type: ignore[no-any-return]


@pytest.mark.parametrize(("pooling", "layer"), [("mean", -1), ("last", -1), ("mean", 1), ("last", -2), ("mean", 0)])
def test_vectors_are_those_of_single_passes(folder: Path, pooling: str, layer: int) -> None:
    """Padding, the order of computing and the size of batches have no effect."""
    wanted = np.stack([expected(folder, text, pooling, layer) for text in TEXTS])
    for batch in (1, 4, 32):
        found = embedded(folder, *TEXTS, pooling=pooling, layer=layer, batch=batch)
        np.testing.assert_allclose(wanted, found, atol=2e-6)


def test_long_texts_are_cut(folder: Path) -> None:
    found = embedded(folder, "x" * 90, "abcdefgh", max_tokens=8, pooling="last")
    np.testing.assert_allclose(expected(folder, "x" * 90, "last", -1, 8), found[0], atol=2e-6)
    np.testing.assert_allclose(expected(folder, "abcdefgh", "last", -1), found[1], atol=2e-6)


def test_no_texts_have_no_vectors(folder: Path) -> None:
    assert 0 == len(embedded(folder))


def test_the_version_is_of_the_files(folder: Path, tmp_path: Path) -> None:
    """A copy has the same version, and one byte of the weights changes it."""
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    assert embedder(folder).version == embedder(copy).version
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert embedder(folder).version != embedder(copy).version


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    for act in (lambda: embedded(tmp_path, "text"), lambda: embedder(tmp_path).version):
        with pytest.raises(OperatorError) as caught:
            act()
        assert ("operator.embedding", str(tmp_path)) == (caught.value.code, caught.value.found)


def test_pickled_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    (copy / "model.safetensors").unlink()
    torch.save(AutoModel.from_pretrained(folder).state_dict(), copy / "pytorch_model.bin")
    with pytest.raises(OperatorError) as caught:
        embedded(copy, "text")
    assert ("operator.embedding", str(copy)) == (caught.value.code, caught.value.where)


def test_a_layer_that_the_model_does_not_have_is_refused(folder: Path) -> None:
    with pytest.raises(OperatorError) as caught:
        embedded(folder, "text", layer=17)
    assert ("embedder.layer", 17) == (caught.value.where, caught.value.found)
