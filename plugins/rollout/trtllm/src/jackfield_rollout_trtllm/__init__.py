"""A rollout server on TensorRT-LLM."""
