"""Samples in an SQLite file."""
