"""Rollout server on vLLM."""
