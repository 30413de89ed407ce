"""Samples in a database: SQLite or PostgreSQL."""
