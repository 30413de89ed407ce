"""Samples in the object store of a Ray cluster."""
