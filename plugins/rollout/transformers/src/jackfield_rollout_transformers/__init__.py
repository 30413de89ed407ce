"""Jackfield's embedded rollout server: a continuous decode loop over a transformers model, on CPU or GPU."""
