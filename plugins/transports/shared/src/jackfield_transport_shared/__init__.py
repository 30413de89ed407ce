"""Weights through shared memory, between processes of one host."""
