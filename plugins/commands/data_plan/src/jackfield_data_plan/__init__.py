"""Pipelines of data from words: plans by a model or by keywords, statistics of stages, and thresholds."""
