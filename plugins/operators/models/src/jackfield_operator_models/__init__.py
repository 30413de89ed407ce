"""Operators on rows that ask a model: the one that is trained, another one, or an embedder."""
