"""Isolation of model-written code. Its processes import it with the standard library alone: it imports nothing."""
