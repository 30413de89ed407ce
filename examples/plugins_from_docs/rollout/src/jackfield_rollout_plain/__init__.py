"""The shortest rollout server that keeps the contract."""
