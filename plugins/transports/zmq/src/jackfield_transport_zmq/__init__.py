"""Samples in storage units, and weights between processes, by ZeroMQ."""
