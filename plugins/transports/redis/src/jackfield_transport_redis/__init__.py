"""Samples on a Redis server."""
