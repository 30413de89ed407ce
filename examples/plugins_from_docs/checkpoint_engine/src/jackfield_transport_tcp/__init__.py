"""Weights over TCP connections."""
