"""Embeddings of texts: vectors of length 1, whose product is the cosine similarity."""

from __future__ import annotations

from jackfield_embeddings.base import Embedder, EmbedderContext
from jackfield_embeddings.hashed import HashedEmbedder
from jackfield_embeddings.settings import EmbedderConfig, make_embedder

__all__ = ["Embedder", "EmbedderConfig", "EmbedderContext", "HashedEmbedder", "make_embedder"]
