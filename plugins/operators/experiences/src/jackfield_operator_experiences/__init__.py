"""Operators on experiences, which shape their rewards."""
