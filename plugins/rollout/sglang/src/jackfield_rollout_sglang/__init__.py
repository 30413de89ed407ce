"""A rollout server on SGLang."""
