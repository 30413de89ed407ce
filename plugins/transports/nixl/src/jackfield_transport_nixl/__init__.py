"""Weights between processes, and samples in registered memory, by NIXL over UCX."""
