"""Hashed embeddings: counts of sequences of three characters, as they are counted here in another way."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from jackfield.abc.operator import OperatorContext
from jackfield.errors import ConfigError
from jackfield.sdk import structure
from jackfield_embeddings import EmbedderConfig, make_embedder
from jackfield_embeddings.base import Vectors


def embedded(*texts: str, dimensions: int = 512) -> Vectors:
    config = structure(EmbedderConfig, {"name": "hashed", "dimensions": dimensions})
    return asyncio.run(make_embedder(config, OperatorContext()).embed(texts))


def expected(text: str, dimensions: int) -> list[float]:
    padded = "  " + text + "  "
    counts = Counter(map("".join, zip(padded, padded[1:], padded[2:], strict=False)))
    vector = [0.0] * dimensions
    for sequence, number in counts.items():
        vector[xxhash.xxh3_64(sequence.encode("utf-8", "surrogatepass")).intdigest() % dimensions] += number
    length = sum(value**2 for value in vector) ** 0.5
    return [value / length for value in vector]


@given(st.lists(st.text(), min_size=1, max_size=4), st.sampled_from([16, 100, 512]))
def test_a_vector_counts_the_sequences_of_three_characters(texts: list[str], dimensions: int) -> None:
    found = embedded(*texts, dimensions=dimensions)
    assert (len(texts), dimensions) == found.shape
    np.testing.assert_allclose([expected(text, dimensions) for text in texts], found, atol=1e-12)


@given(st.lists(st.text(max_size=30), min_size=2, max_size=6))
def test_a_vector_does_not_depend_on_the_texts_beside_it(texts: list[str]) -> None:
    np.testing.assert_array_equal(np.concatenate([embedded(text) for text in texts]), embedded(*texts))


def test_texts_that_are_written_alike_are_nearer() -> None:
    first, near, far = embedded("Add 12 and 30.", "Add 13 and 30.", "Paris is the capital of France")
    assert first @ near > 0.8 > 0.4 > first @ far


def test_half_of_a_surrogate_pair_has_a_vector() -> None:
    assert pytest.approx(1.0) == float(np.linalg.norm(embedded("\ud800")))


def test_no_texts_have_no_vectors() -> None:
    assert (0, 512) == embedded().shape


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"name": "hashed", "path": "folder"}, "path"),
        ({"name": "hashed", "batch": 4}, "batch"),
        ({"name": "transformers"}, "path"),
        ({"name": "transformers", "path": "folder", "dimensions": 64}, "dimensions"),
        ({"name": "address", "model": "m"}, "url"),
        ({"name": "address", "url": "host/v1", "model": "m"}, "url"),
        ({"name": "address", "url": "http://host/v1"}, "model"),
        ({"name": "address", "url": "http://host/v1", "model": "m", "layer": 3}, "layer"),
        ({"name": "hashed", "dimensions": 3}, "dimensions"),
        ({"name": "other"}, "name"),
    ],
)
def test_settings_without_effect_or_sense_are_refused(settings: dict[str, object], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        structure(EmbedderConfig, settings)
    assert where in str(caught.value)
