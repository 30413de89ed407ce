"""Data: tasks, their seeded and resumable order, and tokenization."""
